"""How keys and values are stored on a GPU: a thread an element, or a group that has a scale."""

from __future__ import annotations

from jitllm.kernels.gpu import Bucket, GpuEnv, GpuLaunch, spec, threads_for
from jitllm.kernels.kv_write import KvWrite
from jitllm.kernels.layout import GROUP


def launches(op: KvWrite, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Arguments: k, v, bytes between rows of each, byte offset of the block's column, bytes of a
    table row."""
    has_scales = env.kv_element == "q8_0"
    items = op.kv_heads * (op.k_dim + op.v_dim) // (GROUP if has_scales else 1)
    threads = threads_for(items, env)
    kernel = spec(
        "kv_write",
        env,
        threads=threads,
        kv_heads=op.kv_heads,
        k_dim=op.k_dim,
        v_dim=op.v_dim,
        page_tokens=env.page_tokens,
        f16=env.kv_element == "f16",
        q8_0=has_scales,
    )
    args = (
        env.buffer(op.k),
        env.buffer(op.v),
        op.k.stride_bytes,
        op.v.stride_bytes,
        8 * env.block_slot(op.block),
        8 * env.num_blocks,
    )
    return [GpuLaunch(kernel, (-(-items // threads), bucket.tokens, 1), args)]
