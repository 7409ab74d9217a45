"""How embedding rows are launched on a GPU: a thread group a token."""

from __future__ import annotations

from jitllm.kernels.embed import Embed
from jitllm.kernels.gpu import (
    Bucket,
    GpuEnv,
    GpuLaunch,
    float_bits,
    spec,
    threads_for,
    weights_params,
)
from jitllm.kernels.layout import FORMATS, GROUP


def launches(op: Embed, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: table, dst, bytes between rows, groups of a row, the factor's f32 bits."""
    groups = FORMATS[op.table.format].padded_cols(op.table.cols) // GROUP
    threads = threads_for(groups * (GROUP // 4), env)
    kernel = spec("embed", env, threads=threads, **weights_params(op.table.format))
    args = (
        env.weight(op.table),
        env.buffer(op.dst),
        op.dst.stride_bytes,
        groups,
        float_bits(op.scale),
    )
    return [GpuLaunch(kernel, (bucket.tokens, 1, 1), args)]
