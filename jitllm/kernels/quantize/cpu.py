"""Quantising activations on the CPU: a work item is one row."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from jitllm.jit.emit import LANES, Kernel, Value, f32v, i8, i32v
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
from jitllm.kernels.op import Buffer, Count, Env, KernelSpec, Launch, Rows
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
        with fours(k, k.const(0), groups) as four:
            store_records(k, [halves_at(k, src + g * GROUP_BYTES) for g in four], dst, four)


def records_at(quantized: Buffer | None, env: Env) -> tuple[int, int]:
    """Argument words of an op that may give records as well: their address, and bytes between rows
    of them."""
    return (0, 0) if quantized is None else (env.buffer(quantized), quantized.stride_bytes)


Halves = tuple[Value, Value]
"""The f32 of a group, in two vectors."""

GROUP_BYTES = GROUP * 4
"""Of a group before it is quantised."""


def halves_at(k: Kernel, address: Value) -> Halves:
    """The group at an address."""
    return k.load(address, f32v), k.load(address + LANES * 4, f32v)


@contextmanager
def fours(k: Kernel, start: Value, stop: Value) -> Iterator[list[Value]]:
    """Loop over groups, four at a time. Those that are missing at the end are the last one again:
    nothing may be written that a later one of the four reads."""
    with k.loop(start, stop, 4) as first:
        yield [k.min(first + n, stop - 1) for n in range(4)]


def quantized(k: Kernel, halves: Halves) -> tuple[Value, Value, Value]:
    """The scale of a group, and either half of it as i32 [16] in -127..127."""
    scale, inverse = _scale(k, k.hmax(_sizes(k, halves)))
    lo, hi = (_round(k, x * inverse) for x in halves)
    return scale, lo, hi


def store_records(k: Kernel, four: Sequence[Halves], row: Value, groups: Sequence[Value]) -> None:
    """Write the records of four groups to their places in a row.

    Four are folded and divided together: for one alone, that is a chain as long as for all.
    """
    scales, inverses = _scale(k, _folded(k, [_sizes(k, halves) for halves in four], k.max))
    numbers = [
        [_round(k, x * k.shuffle(inverses, inverses, [4 * n] * LANES)) for x in halves]
        for n, halves in enumerate(four)
    ]
    lows, highs = (_folded(k, half, operator.add) for half in zip(*numbers, strict=True))
    totals = lows + highs
    words = {
        ACT_SCALE: scales,
        ACT_SUM: totals.to_float() * scales,
        ACT_NEG_ISUM: -totals,
        ACT_NEG_ISUM_LO: -lows,
        ACT_NEG_ISUM_HI: -highs,
        ACT_SUM_LO: lows.to_float() * scales,
        ACT_SUM_HI: highs.to_float() * scales,
        _UNUSED: k.const(0, i32v),
    }
    ends = [
        _interleaved(k, [words[at + 4 * n].as_i32() for n in range(4)])
        for at in (GROUP, GROUP + LANES)
    ]
    for n, (group, (lo, hi)) in enumerate(zip(groups, numbers, strict=True)):
        record = row + group * ACT_RECORD_BYTES
        parts = lo.trunc(i8), hi.trunc(i8), *(end.part(4 * n, 4) for end in ends)
        for index, part in enumerate(parts):
            k.store(part, record + LANES * index)


def _sizes(k: Kernel, halves: Halves) -> Value:
    return k.max(*(k.abs(x) for x in halves))


def _scale(k: Kernel, amax: Value) -> tuple[Value, Value]:
    """Scales and their inverses, of a number or of each lane."""
    inverse = k.select(amax.eq(0.0), k.const(0.0, amax.type), 127.0 / amax)
    return amax / 127.0, inverse


def _round(k: Kernel, x: Value) -> Value:
    # Clamped first, which gives the same integers: the rounding is exact only for small numbers.
    bound = k.const(127.0, x.type)
    return k.round_to_int(k.min(k.max(x, -bound), bound))


def _folded(k: Kernel, vectors: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Four vectors, each folded to a number: that of vector n is in lanes 4n to 4n + 3."""
    for width in (8, 4):
        vectors = [
            combine(
                *(
                    k.shuffle(a, b, [n for n in range(2 * LANES) if n // width % 2 == odd])
                    for odd in (0, 1)
                )
            )
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    (folded,) = vectors
    for distance in (2, 1):
        swapped = k.shuffle(folded, folded, [n ^ distance for n in range(LANES)])
        folded = combine(folded, swapped)
    return folded


def _interleaved(k: Kernel, four: Sequence[Value]) -> Value:
    """Lane n of vector n % 4, for every lane n."""
    first, last = (
        k.shuffle(a, b, [n + LANES * (n % 2) for n in range(LANES)])
        for a, b in (four[:2], four[2:])
    )
    return k.shuffle(first, last, [n + LANES * (n % 4 > 1) for n in range(LANES)])
