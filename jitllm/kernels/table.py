"""Which ops there are, and how many kernels each takes for a weight format on each kind of device.

Asks the modules of every op. Run as a program it prints `docs/kernels.md`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jitllm.jit.tiers import TIERS
from jitllm.kernels.dispatch import Dispatch
from jitllm.kernels.embed import Embed
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.gpu import Bucket, Traits
from jitllm.kernels.layout import FORMATS, GROUP, TILE_ROWS, Format
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.matmul.amx import BLOCK_ROWS
from jitllm.kernels.op import Buffer, Const, Element, Op, Weight

_FOLDER = Path(__file__).resolve().parent

_PAGE = """\
# Kernels

This page is generated: `python -m jitllm.kernels.table > docs/kernels.md`.

An op is a folder of `jitllm/kernels/`: its contract, a reference in NumPy for tests, `cpu.py`,
which emits it for every instruction set of a CPU, and `gpu.slang`, one source for every kind of
GPU. Kernels are compiled when a model is loaded, for the machine in front of them and for the
model's shapes and formats, and kept on disk.

{ops}

## Ops by weight format

Files are converted to these formats, and every device computes on the same bytes
([format.md](format.md)). "activations": what a weight of the format is multiplied by; 8-bit ones
are f32 that were rounded in groups of {group} with a scale. Under an op: how many kernels a format
takes of a CPU (one for all shapes) and of a GPU (one for 1, 2, 4 and 8 rows at once, where that
makes a difference). They share their arithmetic: a row has the same bits in any company.

{formats}

Keys and values are f16, f32 or q8_0 (`-kv-type`), on every kind of device. Of q8_0, 32 dimensions
of a head are signed bytes with an f16 scale.

## Instruction sets of CPUs

`auto` takes the last one that can be used; `-tier` takes another one. All of them compute the same
bits. `jitllm hardware` lists what can be used here, and why the others cannot.

{tiers}
"""


class Nowhere:
    """A `GpuEnv` of no device: everything is at address 0, so that ops can be asked for their
    launches."""

    num_blocks, page_tokens = 1, 64
    traits = Traits(subgroup_size=32, has_fast_dot=True, shared_bytes=48 << 10)

    def __init__(self, kv_element: str = "f16") -> None:
        self.kv_element = kv_element

    def buffer(self, buffer: Buffer) -> int:
        return 0

    def weight(self, weight: Weight) -> int:
        return 0

    def const(self, const: Const) -> int:
        return 0

    def block_slot(self, block: int) -> int:
        return 0

    def scratch(self, num_bytes: int) -> int:
        return 0


def _embed(weight: Weight, src: Buffer) -> Op:
    return Embed(weight, Buffer("dst", weight.cols))


def _matmul(weight: Weight, src: Buffer) -> Op:
    return MatMul(src, Buffer("dst", weight.rows), weight)


def _expert_matmul(weight: Weight, src: Buffer) -> Op:
    bank = Weight(weight.role, 0, weight.format, weight.rows, weight.cols, experts=8)
    dst, pairs = Buffer("dst", 2 * weight.rows), Dispatch.table_buffer("pairs", 2)
    return ExpertMatMul(src, dst, bank, pairs, 2)


WITH_WEIGHTS: dict[str, Callable[[Weight, Buffer], Op]] = {
    "embed": _embed,
    "matmul": _matmul,
    "expert_matmul": _expert_matmul,
}
"""The ops that read matrices of weights, made of one and of activations for it."""

_BYTES = {
    "generic": "plain integers",
    "smull": "`smull`",
    "sdot": "`sdot`",
    "maddubs": "`vpmaddubsw`",
    "vnni256": "`vpdpbusd`",
    "vnni512": "`vpdpbusd`, 512 bits at once",
}
"""How a tier's `dot` is called in assembly."""

_BUCKETS = tuple(Bucket(1 << i, 1) for i in range(10))


def describe() -> str:
    """The text of `docs/kernels.md`."""
    return _PAGE.format(ops=_ops(), formats=_formats(), group=GROUP, tiers=_tiers())


def num_kernels(op: str, format: Format) -> tuple[int, int]:
    """Kernels of an op for matrices of a format, on a CPU and on a GPU, whatever a step holds."""
    element = Element.Q8 if format.is_quantized else Element.F32
    weight = Weight("weight", None, format.code, 64, 512)
    made = WITH_WEIGHTS[op](weight, Buffer("src", 512, element=element))
    nowhere: Any = Nowhere()
    cpu, gpu = (importlib.import_module(f"jitllm.kernels.{op}.{kind}") for kind in ("cpu", "gpu"))
    on_cpu = {launch.kernel for launch in cpu.launches(made, nowhere)}
    on_gpu = {
        launch.kernel for bucket in _BUCKETS for launch in gpu.launches(made, nowhere, bucket)
    }
    return len(on_cpu), len(on_gpu)


def _ops() -> str:
    rows = []
    for path in sorted(_FOLDER.glob("*/reference.py")):
        folder = path.parent
        text = importlib.import_module(f"jitllm.kernels.{folder.name}").__doc__ or ""
        has = ((folder / source).exists() for source in ("cpu.py", "gpu.slang"))
        what = text.partition("\n")[0].rstrip(".")
        rows.append([f"`{folder.name}`", what, *("yes" if there else "-" for there in has)])
    return _table(["op", "what it computes", "CPU", "GPU"], rows)


def _formats() -> str:
    rows = []
    for format in FORMATS.values():
        counts = (num_kernels(op, format) for op in WITH_WEIGHTS)
        rows.append(
            [
                format.name,
                f"{_bits(format):g}",
                str(format.scale_cols) if format.is_quantized else "-",
                "8 bits" if format.is_quantized else "f32",
                *(f"CPU {on_cpu}, GPU {on_gpu}" for on_cpu, on_gpu in counts),
            ]
        )
    head = ["format", "bits a weight", "weights with one scale", "activations"]
    return _table([*head, *(f"`{op}`" for op in WITH_WEIGHTS)], rows)


def _tiers() -> str:
    rows = []
    for tier in TIERS:
        how = _BYTES[tier.dot]
        if tier.has_amx:
            how = f"`tdpbssd` where {BLOCK_ROWS} rows or more are multiplied, else {how}"
        rows.append([f"`{tier.name}`", ", ".join(tier.needs) or "-", how])
    return _table(["tier", "flags of the processor", "bytes are multiplied by"], rows)


def _bits(format: Format) -> float:
    """What a weight takes, scales included."""
    cols = format.super_cols or GROUP
    return 8 * format.tile_bytes(cols) / (cols * TILE_ROWS)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    print(describe(), end="")
