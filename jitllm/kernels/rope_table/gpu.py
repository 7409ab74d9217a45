"""How rotary angles are computed on a GPU: a thread an angle, in turns of 2^64 parts.

Angles are integers there: a position times a frequency in turns wraps exactly, so no f64 is needed
and no position is too large.
"""

from __future__ import annotations

import struct

from jitllm.kernels.gpu import Bucket, GpuEnv, GpuLaunch, float_bits, spec, threads_for
from jitllm.kernels.op import Const
from jitllm.kernels.rope_table import RopeTable

_TWO_PI, _FRACTION_BITS = 0x6487ED5110B4611A62633145C06E0E689, 128
"""2 pi in parts of 2^-128."""


def launches(op: RopeTable, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: dst, turns, bytes between rows, frequencies, the scale's f32 bits."""
    count = op.dst.width // 2
    threads = threads_for(count, env)
    args = (
        env.buffer(op.dst),
        env.const(_turns(op.frequencies)),
        op.dst.stride_bytes,
        count,
        float_bits(op.scale),
    )
    grid = (-(-count // threads), bucket.tokens, 1)
    return [GpuLaunch(spec("rope_table", env, threads=threads), grid, args)]


def _turns(frequencies: Const) -> Const:
    """f64 radians a position as u64 parts of a turn."""
    count = len(frequencies.data) // 8
    radians = struct.unpack(f"<{count}d", frequencies.data)
    data = struct.pack(f"<{count}Q", *(turns(f) for f in radians))
    return Const(f"{frequencies.name}.turns", data)


def turns(radians: float) -> int:
    """An angle in parts of 2^-64 of a turn, rounded, modulo a turn."""
    numerator, denominator = radians.as_integer_ratio()
    doubled = (numerator << (64 + _FRACTION_BITS + 1)) // (denominator * _TWO_PI)
    return (doubled + 1 >> 1) % 2**64
