"""Root-mean-square norms on the CPU: an item is one segment of one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jitllm.jit.emit import LANES, Kernel, Value, f32, f32v, i32
from jitllm.kernels.layout import GROUP
from jitllm.kernels.norm import Norm
from jitllm.kernels.op import Count, Env, KernelSpec, Launch, Rows, f32_bits
from jitllm.kernels.quantize.cpu import (
    GROUP_BYTES,
    Halves,
    fours,
    halves_at,
    records_at,
    store_records,
)

SRC, DST, WEIGHT, ADD, SRC_STRIDE, DST_STRIDE, ADD_STRIDE, SEGMENT, SEGMENTS, EPS = range(10)
RECORDS, RECORDS_STRIDE = 10, 11
"""Argument words: addresses, bytes between rows, elements of a segment, segments of a row, and the
bits of eps; the address of records, and bytes between rows of them."""


def launches(op: Norm, env: Env) -> list[Launch]:
    """One launch; every segment of every row is an item, so threads share a single row's heads."""
    segments = op.src.width // op.segment
    args = (
        env.buffer(op.src),
        0 if op.drops else env.buffer(op.dst),
        env.weight(op.weight),
        0 if op.add is None else env.buffer(op.add),
        op.src.stride_bytes,
        op.dst.stride_bytes,
        0 if op.add is None else op.add.stride_bytes,
        op.segment,
        segments,
        f32_bits(op.eps),
        *records_at(op.quantized, env),
    )
    count = Count.OUTPUTS if op.dst.rows is Rows.OUTPUTS else Count.TOKENS
    quantizes = op.quantized is not None
    assert segments == 1 or not quantizes, "records are of rows"
    spec = KernelSpec.of("norm", add=op.add is not None, quantizes=quantizes, drops=op.drops)
    return [Launch(spec, count, segments, args)]


def emit(k: Kernel, *, add: bool, quantizes: bool = False, drops: bool = False) -> None:
    """The kernel; it serves every width and segment."""
    segment, segments, weight = k.arg(SEGMENT), k.arg(SEGMENTS), k.arg(WEIGHT)
    eps = k.arg(EPS).trunc(i32).as_f32()
    tail = segment % LANES
    whole = segment - tail

    def vector(address: Value) -> Value:
        return k.load(address, f32v)

    def part(address: Value) -> Value:
        return k.load_part(address, tail)

    with k.items() as item:
        row, offset = item.udiv(segments), item.urem(segments) * segment * 4
        src = k.arg(SRC) + row * k.arg(SRC_STRIDE) + offset
        dst = k.arg(DST) + row * k.arg(DST_STRIDE) + offset
        residual = k.arg(ADD) + row * k.arg(ADD_STRIDE) + offset

        acc = k.var(k.const(0.0, f32v))
        with k.loop(0, whole, LANES) as i:
            x = vector(src + i * 4)
            acc.set(k.fma(x, x, acc.get()))
        with k.if_(tail > 0):
            x = part(src + whole * 4)
            acc.set(k.fma(x, x, acc.get()))
        mean = k.hsum(acc.get()) / segment.trunc(i32).to_float()
        r = k.const(1.0, f32) / k.sqrt(mean + eps)

        def scaled(at: Value, gain: Value, load: Callable[[Value], Value]) -> Value:
            y = (load(src + at) * r) * gain
            return y + load(residual + at) if add else y

        if not quantizes:
            with k.loop(0, whole * 4, LANES * 4) as at:
                k.store(scaled(at, vector(weight + at), vector), dst + at)
            with k.if_(tail > 0):
                at = whole * 4
                k.store_part(scaled(at, part(weight + at), part), dst + at, tail)
        else:
            records = k.arg(RECORDS) + row * k.arg(RECORDS_STRIDE)

            def groups(four: Sequence[Value], gains: Sequence[Halves]) -> None:
                found = []
                for g, (low, high) in zip(four, gains, strict=True):
                    at = g * GROUP_BYTES
                    found.append((scaled(at, low, vector), scaled(at + LANES * 4, high, vector)))
                for g, (low, high) in zip(four, found, strict=True):
                    if not drops:
                        k.store(low, dst + g * GROUP_BYTES)
                        k.store(high, dst + g * GROUP_BYTES + LANES * 4)
                store_records(k, found, records, four)

            num_whole, rest = segment.udiv(GROUP), segment % GROUP
            with fours(k, k.const(0), num_whole) as four:
                groups(four, [halves_at(k, weight + g * GROUP_BYTES) for g in four])
            with k.if_(rest > 0):  # rows are padded, gains are not
                ends = k.min(rest, k.const(LANES)), k.max(rest - LANES, k.const(0))
                at = weight + num_whole * GROUP_BYTES
                gains = k.load_part(at, ends[0]), k.load_part(at + LANES * 4, ends[1])
                groups([num_whole] * 4, [gains] * 4)
