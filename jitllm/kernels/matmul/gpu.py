"""How matrix products are launched on a GPU: a thread group a tile and a few activation rows.

A group's threads are four quads of weight rows times `slices` of the columns: slice s takes the
groups of 32 columns s, s + slices, and so on, and the slices are added in order. The number of
slices depends on nothing but the columns, so a row meets the same arithmetic in any company.
"""

from __future__ import annotations

from jitllm.kernels.gpu import (
    Bucket,
    GpuEnv,
    GpuLaunch,
    count_word,
    float_bits,
    spec,
    weights_params,
)
from jitllm.kernels.layout import FORMATS, GROUP, num_tiles
from jitllm.kernels.matmul import MatMul

MAX_SLICES = 32
MAX_ROWS = 8
"""Activation rows that a thread group takes at once: weights are unpacked once for all of them."""


def launches(op: MatMul, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: src, dst, weight, bias and add (or 0), bytes between rows (src, dst), groups of a
    row, weight rows, word of the count, the scale's f32 bits."""
    groups = FORMATS[op.weight.format].padded_cols(op.weight.cols) // GROUP
    num_rows = bucket.rows(op.src.rows)
    rows = rows_at_once(num_rows)
    kernel = spec(
        "matmul",
        env,
        rows=rows,
        slices=slices(groups, env.traits.subgroup_size),
        fast_dot=env.traits.has_fast_dot,
        **weights_params(op.weight.format),
    )
    args = (
        env.buffer(op.src),
        env.buffer(op.dst),
        env.weight(op.weight),
        env.weight(op.bias) if op.bias else 0,
        env.buffer(op.add) if op.add else 0,
        op.src.stride_bytes,
        op.dst.stride_bytes,
        groups,
        op.weight.rows,
        count_word(op.src),
        float_bits(op.scale),
    )
    # Blocks of rows first: those that run side by side then share the tiles that they read.
    return [GpuLaunch(kernel, (-(-num_rows // rows), num_tiles(op.weight.rows), 1), args)]


def rows_at_once(num_rows: int) -> int:
    """The smallest power of two that holds them, at most MAX_ROWS."""
    return min(1 << max(num_rows - 1, 0).bit_length(), MAX_ROWS)


def slices(groups: int, subgroup_size: int) -> int:
    """Slices of the columns: a power of two that fills subgroups."""
    wanted = max(groups, subgroup_size // 4, 1)
    return min(1 << (wanted - 1).bit_length(), MAX_SLICES)
