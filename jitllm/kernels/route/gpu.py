"""How tokens are routed on a GPU: a thread group a token."""

from __future__ import annotations

from jitllm.kernels.gpu import Bucket, GpuEnv, GpuLaunch, float_bits, spec, threads_for
from jitllm.kernels.route import LEAST_SUM, Route


def launches(op: Route, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: logits, ids, routed, bias, bytes between rows (logits, ids, routed), the scale's
    f32 bits."""
    experts = op.logits.width
    kernel = spec(
        "route",
        env,
        threads=threads_for(experts, env),
        experts=experts,
        used=op.ids.width,
        runs=op.groups,
        runs_used=op.groups_used,
        score=op.score.upper(),
        biased=op.bias is not None,
        normalised=op.is_normalised,
        least_sum=LEAST_SUM,
    )
    args = (
        env.buffer(op.logits),
        env.buffer(op.ids),
        env.buffer(op.routed),
        env.weight(op.bias) if op.bias else 0,
        op.logits.stride_bytes,
        op.ids.stride_bytes,
        op.routed.stride_bytes,
        float_bits(op.scale),
    )
    return [GpuLaunch(kernel, (bucket.tokens, 1, 1), args)]
