"""How gated activations are launched on a GPU: a thread four elements."""

from __future__ import annotations

from jitllm.kernels.glu import Glu
from jitllm.kernels.gpu import Bucket, GpuEnv, GpuLaunch, count_word, spec, threads_for


def launches(op: Glu, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: gate, up, dst, bytes of a row, word of the count."""
    pieces = op.dst.stride_bytes // 16
    threads = threads_for(pieces, env)
    kernel = spec("glu", env, threads=threads, activation=op.activation.upper())
    args = (
        env.buffer(op.gate),
        env.buffer(op.up),
        env.buffer(op.dst),
        op.dst.stride_bytes,
        count_word(op.dst),
    )
    grid = (-(-pieces // threads), bucket.rows(op.dst.rows), 1)
    return [GpuLaunch(kernel, grid, args)]
