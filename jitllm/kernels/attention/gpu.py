"""How attention is launched on a GPU: the keys of a token are cut into parts that are computed side
by side and then merged, or where keys come one range after another, range by range.

Where a part begins is a function of the token's position alone, and a part's arithmetic does not
depend on who computes it: a step with few tokens has a thread group for each part and a second
launch that merges them, a step with many has one thread group for all parts of a token. Launches
over ranges of keys give the same bits if no part is divided by them (`part_keys`).
"""

from __future__ import annotations

import math

from jitllm.kernels.attention import CHUNK_KEYS, Attention
from jitllm.kernels.gpu import Bucket, GpuEnv, GpuLaunch, float_bits, spec
from jitllm.kernels.op import KernelSpec

PARTS = 16
"""Parts that the keys of a token are cut into."""

MAX_HEADS = 4
"""Query heads of one KV head that a thread group takes together, so that keys are loaded once."""

ENOUGH_GROUPS = 512
"""With so many thread groups there is no need for more."""

_THREADS = 128


def launches(op: Attention, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Of all keys: in parts and their merger, or at once. Arguments: q, dst, partial results, bytes
    between rows of q and of dst, byte offset of the block's column, bytes of a table row, window,
    bits of the softcap, carry, bytes between rows of it."""
    groups = op.heads // heads_together(op.heads // op.kv_heads)
    if bucket.tokens * groups >= ENOUGH_GROUPS:
        return ranged_launches(op, env, bucket)
    row_bytes = 4 * (op.v_dim + 2)
    args = _args(op, env, env.scratch(bucket.tokens * op.heads * PARTS * row_bytes))
    return [
        GpuLaunch(_kernel(op, env, "PART"), (groups, bucket.tokens, PARTS), args),
        GpuLaunch(_kernel(op, env, "MERGE"), (groups, bucket.tokens, 1), args),
    ]


def ranged_launches(op: Attention, env: GpuEnv, bucket: Bucket) -> list[GpuLaunch]:
    """Of the keys in each row's range (`Ctx.RANGES`)."""
    groups = op.heads // heads_together(op.heads // op.kv_heads)
    return [GpuLaunch(_kernel(op, env, "WHOLE"), (groups, bucket.tokens, 1), _args(op, env, 0))]


def part_keys(num_keys: int) -> int:
    """Keys of the longest part of any token that sees at most so many: a power of two, and every
    part of every such token begins at a multiple of its own length."""
    chunks = -(-num_keys // CHUNK_KEYS)
    return CHUNK_KEYS << (-(-chunks // PARTS) - 1).bit_length()


def _kernel(op: Attention, env: GpuEnv, mode: str) -> KernelSpec:
    return spec(
        "attention",
        env,
        mode=mode,
        threads=_THREADS,
        together=heads_together(op.heads // op.kv_heads),
        heads=op.heads,
        kv_heads=op.kv_heads,
        k_dim=op.k_dim,
        v_dim=op.v_dim,
        page_tokens=env.page_tokens,
        f16=env.kv_element == "f16",
        q8_0=env.kv_element == "q8_0",
        softcapped=op.softcap > 0,
        scale=_f32(op.scale),
        parts=PARTS,
    )


def _args(op: Attention, env: GpuEnv, partial: int) -> tuple[int, ...]:
    return (
        env.buffer(op.q),
        env.buffer(op.dst),
        partial,
        op.q.stride_bytes,
        op.dst.stride_bytes,
        8 * env.block_slot(op.block),
        8 * env.num_blocks,
        op.window,
        float_bits(op.softcap),
        env.buffer(op.carry),
        op.carry.stride_bytes,
    )


def heads_together(group: int) -> int:
    """The largest divisor of a KV head's query heads that is at most MAX_HEADS."""
    return max(n for n in range(1, min(group, MAX_HEADS) + 1) if group % n == 0)


def _f32(value: float) -> float:
    """The f32 nearest to a value, so that its digits are short."""
    rounded = float(f"{value:.9g}")
    assert math.isclose(rounded, value, rel_tol=1e-8)
    return rounded
