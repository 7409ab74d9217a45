"""Keys and values into pages on the CPU: an item is one KV head of one token."""

from __future__ import annotations

from jitllm.jit.emit import LANES, Kernel, Value, f32, i8, i16, i32, i64, lanes_of, spans, vec
from jitllm.kernels.kv_write import KvWrite, page_matrices
from jitllm.kernels.layout import GROUP
from jitllm.kernels.op import Count, Ctx, Env, KernelSpec, Launch
from jitllm.kernels.quantize.cpu import GROUP_BYTES, halves_at, quantized


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
    matrices = page_matrices(kv_heads, k_dim, v_dim, kv_element)
    kind = _Groups if kv_element == "q8_0" else _Elements
    stored = kind(k, page_tokens, kv_element)

    with k.items() as item:
        token, head = item.udiv(kv_heads), item.urem(kv_heads)
        position = k.load(k.ctx(Ctx.POSITIONS) + token * 4, i32).zext(i64)
        row = k.load(k.ctx(Ctx.ROW_OF) + token * 4, i32).zext(i64)
        table = k.load(k.ctx(Ctx.TABLES) + row * 8, i64)
        at = k.load(table + position.udiv(page_tokens) * table_row + column, i64)
        offset, into = position.urem(page_tokens), []
        for rows, size in matrices:
            into.append(at + (head * (rows // kv_heads * page_tokens) + offset) * size)
            at = at + rows * page_tokens * size
        key = keys + token * k_stride + head * (k_dim * 4)
        value = values + token * v_stride + head * (v_dim * 4)
        stored.key(key, k_dim, into[::2])
        stored.value(value, v_dim, into[1::2])


class _Elements:
    """f16 or f32."""

    def __init__(self, k: Kernel, page_tokens: int, kv_element: str) -> None:
        self.k, self.page_tokens, self.is_half = k, page_tokens, kv_element == "f16"
        self.element, self.size = (i16, 2) if self.is_half else (f32, 4)
        self.staged = k.stack(self.element, LANES)

    def store(self, value: Value, address: Value) -> None:
        if self.is_half:
            self.k.store_f16(value, address)
        else:
            self.k.store(value, address)

    def key(self, source: Value, dim: int, into: list[Value]) -> None:
        k, size = self.k, self.size
        for first, lanes in spans(dim):
            self.store(k.load(source + first * 4, lanes_of(f32, lanes)), self.staged)
            for lane in range(lanes):
                element = k.load(self.staged + lane * size, self.element)
                k.store(element, into[0] + (first + lane) * self.page_tokens * size)

    def value(self, source: Value, dim: int, into: list[Value]) -> None:
        for first, lanes in spans(dim):
            loaded = self.k.load(source + first * 4, lanes_of(f32, lanes))
            self.store(loaded, into[0] + first * self.size)


class _Groups:
    """q8_0. `into`: elements, and their scales."""

    def __init__(self, k: Kernel, page_tokens: int, kv_element: str) -> None:
        self.k, self.page_tokens = k, page_tokens

    def key(self, source: Value, dim: int, into: list[Value]) -> None:
        k, words, scales = self.k, *into
        with k.loop(0, dim // GROUP) as group:
            for half, numbers in enumerate(self.group(source, group, scales)):
                quads = numbers.trunc(i8).bits(vec(i32, LANES // 4))
                for n in range(LANES // 4):
                    word = group * (GROUP // 4) + (half * (LANES // 4) + n)
                    k.store(quads[n], words + word * (self.page_tokens * 4))

    def value(self, source: Value, dim: int, into: list[Value]) -> None:
        k, row, scales = self.k, *into
        with k.loop(0, dim // GROUP) as group:
            for half, numbers in enumerate(self.group(source, group, scales)):
                k.store(numbers.trunc(i8), row + group * GROUP + half * LANES)

    def group(self, source: Value, group: Value, scales: Value) -> tuple[Value, Value]:
        """The halves of a group, i32 [16] in -127..127; its scale is stored."""
        scale, low, high = quantized(self.k, halves_at(self.k, source + group * GROUP_BYTES))
        self.k.store_f16(scale, scales + group * (self.page_tokens * 2))
        return low, high
