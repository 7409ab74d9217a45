"""How products with experts are launched on a GPU: as plain ones are, for the rows of a panel."""

from __future__ import annotations

import struct

from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.gpu import Bucket, GpuEnv, GpuLaunch, spec, weights_params
from jitllm.kernels.layout import FORMATS, GROUP, num_tiles
from jitllm.kernels.matmul.gpu import rows_at_once, slices
from jitllm.kernels.op import PANEL_TOKENS, Const, Weight


def launches(op: ExpertMatMul, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: src, dst, addresses of the matrices, table, bytes between rows of src and between
    pairs of dst, pairs that read the same row, groups of a row, blocks of rows in a panel."""
    weight = op.weight
    groups = FORMATS[weight.format].padded_cols(weight.cols) // GROUP
    pairs = bucket.tokens * op.used
    # Of a token's experts no two are the same, so a panel has no more rows than there are tokens.
    rows = rows_at_once(-(-pairs // weight.experts))
    blocks = -(-min(bucket.tokens, PANEL_TOKENS) // rows)
    panels = min(pairs, weight.experts + pairs // PANEL_TOKENS)
    kernel = spec(
        "expert_matmul",
        env,
        rows=rows,
        slices=slices(groups, env.traits.subgroup_size),
        fast_dot=env.traits.has_fast_dot,
        **weights_params(weight.format),
    )
    args = (
        env.buffer(op.src),
        env.buffer(op.dst),
        env.const(_addresses(weight, env)),
        env.buffer(op.table),
        op.src.stride_bytes // (op.used // op.pairs_per_row),
        op.dst.stride_bytes // op.used,
        op.pairs_per_row,
        groups,
        blocks,
    )
    return [GpuLaunch(kernel, (panels * blocks, num_tiles(weight.rows), 1), args)]


def _addresses(weight: Weight, env: GpuEnv) -> Const:
    found = [env.weight(weight.of_expert(expert)) for expert in range(weight.experts)]
    return Const(f"{weight.role}.{weight.block}", struct.pack(f"<{len(found)}Q", *found))
