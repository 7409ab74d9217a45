"""Quantising activations on the CPU: a work item is one row."""

from __future__ import annotations

from jitllm.jit.emit import LANES, Kernel, Value, f32, f32v, i8, i32
from jitllm.kernels.layout import (
    ACT_NEG_ISUM,
    ACT_NEG_ISUM_HI,
    ACT_NEG_ISUM_LO,
    ACT_RECORD_BYTES,
    ACT_SCALE,
    ACT_SUM,
    ACT_SUM_HI,
    ACT_SUM_LO,
    GROUP,
)
from jitllm.kernels.op import Count, Env, KernelSpec, Launch, Rows
from jitllm.kernels.quantize import Quantize

SRC, DST, SRC_STRIDE, DST_STRIDE, GROUPS = range(5)
"""Argument words: addresses, bytes between rows, groups of a row."""

_UNUSED = 60
"""The record's last word; written as zero, so that equal rows are equal bytes."""


def launches(op: Quantize, env: Env) -> list[Launch]:
    """One launch, an item a row."""
    args = (
        env.buffer(op.src),
        env.buffer(op.dst),
        op.src.stride_bytes,
        op.dst.stride_bytes,
        -(-op.src.width // GROUP),
    )
    count = Count.OUTPUTS if op.dst.rows is Rows.OUTPUTS else Count.TOKENS
    return [Launch(KernelSpec.of("quantize"), count, 1, args)]


def emit(k: Kernel) -> None:
    """The kernel; it serves every width."""
    groups = k.arg(GROUPS)
    with k.items() as row:
        src = k.arg(SRC) + row * k.arg(SRC_STRIDE)
        dst = k.arg(DST) + row * k.arg(DST_STRIDE)
        with k.loop(0, groups) as g:
            _record(k, src + g * (GROUP * 4), dst + g * ACT_RECORD_BYTES)


def quantized(k: Kernel, src: Value) -> tuple[Value, Value, Value]:
    """The scale of the 32 f32 at an address, and either half of them as i32 [16] in -127..127."""
    halves = [k.load(src + offset, f32v) for offset in (0, LANES * 4)]
    amax = k.hmax(k.max(*(k.abs(x) for x in halves)))
    scale = amax / 127.0
    inverse = k.select(amax.eq(0.0), k.const(0.0, f32), 127.0 / amax)
    lo, hi = (_round(k, x * inverse) for x in halves)
    return scale, lo, hi


def _record(k: Kernel, src: Value, record: Value) -> None:
    scale, lo, hi = quantized(k, src)
    k.store(lo.trunc(i8), record)
    k.store(hi.trunc(i8), record + LANES)
    sum_lo, sum_hi = k.hsum(lo), k.hsum(hi)
    total = sum_lo + sum_hi
    for offset, value in (
        (ACT_SCALE, scale),
        (ACT_SUM, total.to_float() * scale),
        (ACT_NEG_ISUM, -total),
        (ACT_NEG_ISUM_LO, -sum_lo),
        (ACT_NEG_ISUM_HI, -sum_hi),
        (ACT_SUM_LO, sum_lo.to_float() * scale),
        (ACT_SUM_HI, sum_hi.to_float() * scale),
        (_UNUSED, k.const(0, i32)),
    ):
        k.store(value, record + offset)


def _round(k: Kernel, x: Value) -> Value:
    # Clamped first, which gives the same integers: the rounding is exact only for small numbers.
    bound = k.const(127.0, x.type)
    return k.round_to_int(k.min(k.max(x, -bound), bound))
