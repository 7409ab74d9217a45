"""How pairs are sorted on a GPU: one thread group, a thread an expert."""

from __future__ import annotations

from jitllm.kernels.dispatch import Dispatch
from jitllm.kernels.gpu import Bucket, GpuEnv, GpuLaunch, spec, threads_for
from jitllm.kernels.op import PANEL_TOKENS
from jitllm.kernels.route import MAX_EXPERTS


def launches(op: Dispatch, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: ids, table, bytes between rows of ids, experts of a token, experts."""
    args = (
        env.buffer(op.ids),
        env.buffer(op.table),
        op.ids.stride_bytes,
        op.ids.width,
        op.experts,
    )
    kernel = spec(
        "dispatch",
        env,
        threads=threads_for(op.experts, env),
        max_experts=MAX_EXPERTS,
        panel_tokens=PANEL_TOKENS,
    )
    return [GpuLaunch(kernel, (1, 1, 1), args)]
