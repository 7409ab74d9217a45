"""How output rows are copied on a GPU: a thread 16 bytes."""

from __future__ import annotations

from jitllm.kernels.gather import Gather
from jitllm.kernels.gpu import Bucket, GpuEnv, GpuLaunch, spec, threads_for


def launches(op: Gather, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: src, dst, bytes of a row."""
    pieces = op.dst.stride_bytes // 16
    threads = threads_for(pieces, env)
    args = (env.buffer(op.src), env.buffer(op.dst), op.dst.stride_bytes)
    grid = (-(-pieces // threads), bucket.outputs, 1)
    return [GpuLaunch(spec("gather", env, threads=threads), grid, args)]
