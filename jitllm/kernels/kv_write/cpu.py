"""Keys and values into pages on the CPU: an item is one KV head of one token."""

from __future__ import annotations

from jitllm.jit.emit import LANES, Kernel, Value, f32, i16, i32, i64, lanes_of, spans
from jitllm.kernels.kv_write import KvWrite
from jitllm.kernels.op import Count, Ctx, Env, KernelSpec, Launch


def launches(op: KvWrite, env: Env) -> list[Launch]:
    """One launch; arguments: k, v, byte offset of the block's column, bytes of a table row."""
    spec = KernelSpec.of(
        "kv_write",
        kv_heads=op.kv_heads,
        k_dim=op.k_dim,
        v_dim=op.v_dim,
        page_tokens=env.page_tokens,
        kv_element=env.kv_element,
        k_stride=op.k.stride_bytes,
        v_stride=op.v.stride_bytes,
    )
    args = (
        env.buffer(op.k),
        env.buffer(op.v),
        8 * env.block_slot(op.block),
        8 * env.num_blocks,
    )
    return [Launch(spec, Count.TOKENS, op.kv_heads, args)]


def emit(
    k: Kernel,
    *,
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    page_tokens: int,
    kv_element: str,
    k_stride: int,
    v_stride: int,
) -> None:
    """A key goes into a column of its page, element by element; a value is a row."""
    keys, values, column, table_row = (k.arg(n) for n in range(4))
    element, size = (i16, 2) if kv_element == "f16" else (f32, 4)
    staged = k.stack(element, LANES)

    def store(value: Value, address: Value) -> None:
        if kv_element == "f16":
            k.store_f16(value, address)
        else:
            k.store(value, address)

    with k.items() as item:
        token, head = item.udiv(kv_heads), item.urem(kv_heads)
        position = k.load(k.ctx(Ctx.POSITIONS) + token * 4, i32).zext(i64)
        row = k.load(k.ctx(Ctx.ROW_OF) + token * 4, i32).zext(i64)
        table = k.load(k.ctx(Ctx.TABLES) + row * 8, i64)
        page = k.load(table + position.udiv(page_tokens) * table_row + column, i64)
        offset = position.urem(page_tokens)

        key = keys + token * k_stride + head * (k_dim * 4)
        into = page + (head * (k_dim * page_tokens) + offset) * size
        for first, lanes in spans(k_dim):
            store(k.load(key + first * 4, lanes_of(f32, lanes)), staged)
            for lane in range(lanes):
                at = into + (first + lane) * page_tokens * size
                k.store(k.load(staged + lane * size, element), at)

        value = values + token * v_stride + head * (v_dim * 4)
        into = (
            page + (kv_heads * k_dim * page_tokens + (head * page_tokens + offset) * v_dim) * size
        )
        for first, lanes in spans(v_dim):
            store(k.load(value + first * 4, lanes_of(f32, lanes)), into + first * size)
