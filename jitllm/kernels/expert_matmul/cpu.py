"""Products with experts on the CPU: the tiles of `kernels/matmul`, on gathered rows.

A unit of work is two tiles of an expert against one panel of its rows. How many there are is known
only in the step, so an item is an equal share of them.
"""

from __future__ import annotations

import struct

from jitllm.jit.emit import Kernel, Value, f32v, i32, i64
from jitllm.kernels.dispatch import HEAD_BYTES, RECORD_BYTES
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.layout import FORMATS, GROUP, WORD_ROW_BYTES, FormatCode, num_tiles
from jitllm.kernels.matmul.cpu import Product
from jitllm.kernels.matmul.pairs import PAIR_TILES
from jitllm.kernels.op import Const, Count, Env, KernelSpec, Launch, Weight

SRC, DST, MATRICES, TABLE, SRC_STRIDE, DST_STRIDE, PAIRS_PER_ROW, GROUPS, TILES = range(9)
"""Argument words: addresses (MATRICES: u64 address of each expert's matrix), bytes between rows of
src and between pairs of dst, pairs that read the same row, groups of a row, tiles of a matrix."""

SHARES = 256
"""Items: several for each of many threads, and few enough that empty ones cost nothing."""


def launches(op: ExpertMatMul, env: Env) -> list[Launch]:
    """One launch of equal shares."""
    weight = op.weight
    segments = op.used // op.pairs_per_row
    args = (
        env.buffer(op.src),
        env.buffer(op.dst),
        env.const(addresses(weight, env)),
        env.buffer(op.table),
        op.src.stride_bytes // segments,
        op.dst.stride_bytes // op.used,
        op.pairs_per_row,
        FORMATS[weight.format].padded_cols(weight.cols) // GROUP,
        num_tiles(weight.rows),
    )
    spec = KernelSpec.of("expert_matmul", format=weight.format.name)
    return [Launch(spec, Count.ONE, SHARES, args)]


def addresses(weight: Weight, env: Env) -> Const:
    """The address of each expert's matrix, u64."""
    found = [env.weight(weight.of_expert(expert)) for expert in range(weight.experts)]
    return Const(f"{weight.role}.{weight.block}", struct.pack(f"<{len(found)}Q", *found))


def emit(k: Kernel, *, format: str) -> None:
    """The kernel of one weight format."""
    product = Product(k, FORMATS[FormatCode[format]], k.arg(GROUPS))
    table, tiles = k.arg(TABLE), k.arg(TILES)
    num_pairs = (tiles + (PAIR_TILES - 1)).udiv(PAIR_TILES)
    units = k.load(table, i32).sext(i64) * num_pairs

    def record(n: Value) -> Value:
        return table + HEAD_BYTES + n * RECORD_BYTES

    def pair(n: Value) -> Value:
        return k.load(record(n), i32).sext(i64)

    def source(n: Value) -> Value:
        return k.arg(SRC) + pair(n).udiv(k.arg(PAIRS_PER_ROW)) * k.arg(SRC_STRIDE)

    with (
        k.items() as share,
        k.loop((units * share).udiv(SHARES), (units * (share + 1)).udiv(SHARES)) as unit,
    ):
        panel, tile = record(unit.udiv(num_pairs)), unit.urem(num_pairs) * PAIR_TILES
        expert, start, stop = (k.load(panel + at, i32).sext(i64) for at in (4, 8, 12))
        matrix = k.load(k.arg(MATRICES) + expert * 8, i64)

        def write(t: Value, first: Value, size: Value, sums: Value) -> None:
            with k.loop(0, size) as r:
                y = k.load(sums + r * WORD_ROW_BYTES, f32v)
                to = k.arg(DST) + pair(first + r) * k.arg(DST_STRIDE)
                k.store(y, to + (tile + t) * WORD_ROW_BYTES)

        tiles_here = k.min(tiles - tile, k.const(PAIR_TILES))
        at = matrix + tile * product.tile_bytes
        product.rows(at, tiles_here, start, stop, source, write)
    product.finish()
