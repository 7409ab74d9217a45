"""What ops are written in for GPUs: launches, and what a device tells its kernels.

`kernels/<op>/gpu.slang` computes an op on every kind of GPU; `kernels/<op>/gpu.py` says how it is
launched. Memory is named by 64-bit device addresses, as on the CPU. Knows no API and no driver.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol

from jitllm.kernels.layout import FORMATS, GROUP, FormatCode
from jitllm.kernels.op import Buffer, Ctx, Env, KernelSpec, Rows

MAX_THREADS = 256
"""Of a thread group; every device has so many."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What kernels are specialised for on a device.

    subgroup_size: threads that run in step, a power of two. has_fast_dot: dot products of four
    bytes are one instruction. shared_bytes: memory of a thread group.
    """

    subgroup_size: int
    has_fast_dot: bool
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Upper bounds of the steps that one recording serves; kernels read the true counts."""

    tokens: int
    outputs: int

    def rows(self, rows: Rows) -> int:
        """Most rows of a buffer of this kind."""
        return self.outputs if rows is Rows.OUTPUTS else self.tokens


@dataclass(frozen=True, slots=True)
class GpuLaunch:
    """One kernel call: a grid of thread groups.

    kernel: the folder under `kernels/` and what `gpu.slang` is compiled with: a parameter `rows`
    becomes the definition ROWS. args: up to 12 64-bit words, addresses and integers.
    barrier: wait for everything before this call.
    """

    kernel: KernelSpec
    groups: tuple[int, int, int]
    args: tuple[int, ...]
    barrier: bool = True


class GpuEnv(Env, Protocol):
    """Where a program's buffers and weights are on a device."""

    traits: Traits

    def scratch(self, num_bytes: int) -> int:
        """Address of memory for one op's own partial results; all ops share it."""


def spec(op: str, env: GpuEnv, **params: int | float | str | bool) -> KernelSpec:
    """A kernel specialised for the device too."""
    return KernelSpec.of(op, subgroup=env.traits.subgroup_size, **params)


def weights_params(code: FormatCode) -> dict[str, int]:
    """What `weights.slang` is compiled with to read matrices of a format."""
    form = FORMATS[code]
    bits = (*form.planes, 0, 0)[:2]
    floats = {FormatCode.F32: 1, FormatCode.F16: 2, FormatCode.BF16: 3}
    return {
        "float_kind": floats.get(code, 0),
        "bits_low": bits[0],
        "bits_high": bits[1],
        "plane_high": form.plane_offset(1) if len(form.planes) > 1 else 0,
        "bias": form.bias,
        "scales": form.scales_per_group if form.is_quantized else 1,
        "scale_offset": form.scale_offset,
        "scale_signed": int(form.scale_signed),
        "has_min": int(form.has_min),
        "min_added": int(form.min_is_added),
        "min_offset": form.min_offset,
        "group_bytes": form.group_bytes,
        "super_groups": form.super_cols // GROUP,
        "super_header": form.super_header_bytes,
    }


def count_word(buffer: Buffer) -> int:
    """Word of the step context that counts a buffer's rows."""
    return int(Ctx.NUM_OUTPUTS if buffer.rows is Rows.OUTPUTS else Ctx.NUM_TOKENS)


def float_bits(value: float) -> int:
    """The bits of a value as f32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def threads_for(items: int, env: GpuEnv, most: int = MAX_THREADS) -> int:
    """Threads of a group that has `items` to share: a power of two, whole subgroups."""
    threads = env.traits.subgroup_size
    while threads < min(items, most):
        threads *= 2
    return threads
