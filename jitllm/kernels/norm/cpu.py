"""Root-mean-square norms on the CPU: an item is one segment of one row."""

from __future__ import annotations

from jitllm.jit.emit import LANES, Kernel, Value, f32, f32v, i32
from jitllm.kernels.norm import Norm
from jitllm.kernels.op import Count, Env, KernelSpec, Launch, Rows, f32_bits

SRC, DST, WEIGHT, ADD, SRC_STRIDE, DST_STRIDE, ADD_STRIDE, SEGMENT, SEGMENTS, EPS = range(10)
"""Argument words: addresses, bytes between rows, elements of a segment, segments of a row, and the
bits of eps."""


def launches(op: Norm, env: Env) -> list[Launch]:
    """One launch; every segment of every row is an item, so threads share a single row's heads."""
    segments = op.src.width // op.segment
    args = (
        env.buffer(op.src),
        env.buffer(op.dst),
        env.weight(op.weight),
        0 if op.add is None else env.buffer(op.add),
        op.src.stride_bytes,
        op.dst.stride_bytes,
        0 if op.add is None else op.add.stride_bytes,
        op.segment,
        segments,
        f32_bits(op.eps),
    )
    count = Count.OUTPUTS if op.dst.rows is Rows.OUTPUTS else Count.TOKENS
    return [Launch(KernelSpec.of("norm", add=op.add is not None), count, segments, args)]


def emit(k: Kernel, *, add: bool) -> None:
    """The kernel; it serves every width and segment."""
    segment, segments, weight = k.arg(SEGMENT), k.arg(SEGMENTS), k.arg(WEIGHT)
    eps = k.arg(EPS).trunc(i32).as_f32()
    tail = segment % LANES
    whole = segment - tail
    with k.items() as item:
        row, offset = item.udiv(segments), item.urem(segments) * segment * 4
        src = k.arg(SRC) + row * k.arg(SRC_STRIDE) + offset
        dst = k.arg(DST) + row * k.arg(DST_STRIDE) + offset
        residual = k.arg(ADD) + row * k.arg(ADD_STRIDE) + offset

        acc = k.var(k.const(0.0, f32v))
        with k.loop(0, whole, LANES) as i:
            x = k.load(src + i * 4, f32v)
            acc.set(k.fma(x, x, acc.get()))
        with k.if_(tail > 0):
            x = k.load_part(src + whole * 4, tail)
            acc.set(k.fma(x, x, acc.get()))
        mean = k.hsum(acc.get()) / segment.trunc(i32).to_float()
        r = k.const(1.0, f32) / k.sqrt(mean + eps)

        def scaled(x: Value, gain: Value) -> Value:
            return (x * r) * gain

        with k.loop(0, whole, LANES) as i:
            y = scaled(k.load(src + i * 4, f32v), k.load(weight + i * 4, f32v))
            if add:
                y = y + k.load(residual + i * 4, f32v)
            k.store(y, dst + i * 4)
        with k.if_(tail > 0):
            y = scaled(k.load_part(src + whole * 4, tail), k.load_part(weight + whole * 4, tail))
            if add:
                y = y + k.load_part(residual + whole * 4, tail)
            k.store_part(y, dst + whole * 4, tail)
