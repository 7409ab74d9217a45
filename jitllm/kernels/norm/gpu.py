"""How norms are launched on a GPU: a thread group a segment."""

from __future__ import annotations

from jitllm.kernels.gpu import (
    Bucket,
    GpuEnv,
    GpuLaunch,
    count_word,
    float_bits,
    spec,
    threads_for,
)
from jitllm.kernels.norm import Norm


def launches(op: Norm, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: src, dst, weight, add, bytes between rows (src, dst, add), segment, bits of eps,
    word of the count."""
    is_wide = op.segment % 4 == 0
    items = op.segment // 4 if is_wide else op.segment
    kernel = spec(
        "norm", env, threads=threads_for(items, env), wide=is_wide, add=op.add is not None
    )
    args = (
        env.buffer(op.src),
        env.buffer(op.dst),
        env.weight(op.weight),
        env.buffer(op.add) if op.add else 0,
        op.src.stride_bytes,
        op.dst.stride_bytes,
        op.add.stride_bytes if op.add else 0,
        op.segment,
        float_bits(op.eps),
        count_word(op.dst),
    )
    groups = (op.src.width // op.segment, bucket.rows(op.dst.rows), 1)
    return [GpuLaunch(kernel, groups, args)]
