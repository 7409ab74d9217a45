"""How experts are added up on a GPU: a thread four elements."""

from __future__ import annotations

from jitllm.kernels.combine import Combine
from jitllm.kernels.gpu import Bucket, GpuEnv, GpuLaunch, float_bits, spec, threads_for


def launches(op: Combine, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: src, routed, dst, add, bytes between rows (src, routed, dst), bytes of a segment,
    segments, the scale's f32 bits."""
    pieces = op.dst.stride_bytes // 16
    threads = threads_for(pieces, env)
    args = (
        env.buffer(op.src),
        env.buffer(op.routed),
        env.buffer(op.dst),
        env.buffer(op.add) if op.add else 0,
        op.src.stride_bytes,
        op.routed.stride_bytes,
        op.dst.stride_bytes,
        op.dst.width * 4,
        op.src.width // op.dst.width,
        float_bits(op.scale),
    )
    kernel = spec("combine", env, threads=threads, has_add=op.add is not None)
    return [GpuLaunch(kernel, (-(-pieces // threads), bucket.tokens, 1), args)]
