"""How activations are quantised on a GPU: eight threads a group of 32."""

from __future__ import annotations

from jitllm.kernels.gpu import Bucket, GpuEnv, GpuLaunch, count_word, spec, threads_for
from jitllm.kernels.layout import GROUP
from jitllm.kernels.quantize import Quantize


def launches(op: Quantize, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: src, dst, bytes between rows of each, groups of a row, word of the count."""
    groups = -(-op.src.width // GROUP)
    threads = threads_for(groups * 8, env)
    args = (
        env.buffer(op.src),
        env.buffer(op.dst),
        op.src.stride_bytes,
        op.dst.stride_bytes,
        groups,
        count_word(op.dst),
    )
    grid = (-(-groups * 8 // threads), bucket.rows(op.dst.rows), 1)
    return [GpuLaunch(spec("quantize", env, threads=threads), grid, args)]
