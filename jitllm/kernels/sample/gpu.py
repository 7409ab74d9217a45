"""How tokens are sampled on a GPU: a thread group an output."""

from __future__ import annotations

from jitllm.kernels.gpu import MAX_THREADS, Bucket, GpuEnv, GpuLaunch, spec, threads_for
from jitllm.kernels.sample import Sample


def launches(op: Sample, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: logits, bytes between rows, ids, scratch, bytes between its rows."""
    args = (
        env.buffer(op.logits),
        op.logits.stride_bytes,
        op.logits.width,
        env.buffer(op.scratch),
        op.scratch.stride_bytes,
    )
    kernel = spec("sample", env, threads=threads_for(MAX_THREADS, env))
    return [GpuLaunch(kernel, (bucket.outputs, 1, 1), args)]
