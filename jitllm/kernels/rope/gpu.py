"""How heads are rotated on a GPU: a thread a pair, or an element that is only scaled."""

from __future__ import annotations

from jitllm.kernels.gpu import Bucket, GpuEnv, GpuLaunch, spec, threads_for
from jitllm.kernels.rope import Rope


def launches(op: Rope, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: x, table, bytes between rows of each, items of a row, factors, positions that
    share one, the last factor."""
    scales = op.position_scale
    pairs = op.num_rotated // 2
    per_head = pairs + (op.head_dim - op.num_rotated if scales else 0)
    items = op.x.width // op.head_dim * per_head
    threads = threads_for(items, env)
    kernel = spec(
        "rope",
        env,
        threads=threads,
        head_dim=op.head_dim,
        num_pairs=pairs,
        per_head=per_head,
        interleaved=op.interleaved,
        scaled=scales is not None,
    )
    args = (
        env.buffer(op.x),
        env.buffer(op.table),
        op.x.stride_bytes,
        op.table.stride_bytes,
        items,
        env.const(scales) if scales else 0,
        op.scale_positions,
        len(scales.data) // 4 - 1 if scales else 0,
    )
    return [GpuLaunch(kernel, (-(-items // threads), bucket.tokens, 1), args)]
