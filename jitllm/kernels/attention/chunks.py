"""Where the keys and values of a chunk are on the CPU: in their page, or gathered from small ones.

Knows page tables and what a page is made of. Knows no arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

from jitllm.jit.emit import Kernel, Value, i8, i16, i32, i64, vec
from jitllm.kernels.attention import CHUNK_KEYS
from jitllm.kernels.kv_write import page_matrices

_LINE_BYTES = 64


class Part(NamedTuple):
    """A matrix of a chunk: where the chunk's first position is in the first of the KV head's rows,
    and how many bytes from there the next chunk's is; None where that is not known."""

    at: Value
    ahead: Value | None = None


Chunk = tuple[Part, ...]
"""Its keys, its values, and their scales if they have any. Every matrix has a row of `row_keys`
positions for each of the KV head's rows."""


class Place(NamedTuple):
    """Where a chunk is looked for. table: address of the block's column of a sequence's page table.
    position: of its first key."""

    table: Value
    kv_head: Value
    position: Value


class Chunks:
    """Emits what finds chunks. column: byte offset of the block's column in a page table.
    table_row: bytes of a row of it."""

    def __init__(
        self,
        k: Kernel,
        *,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        page_tokens: int,
        kv_element: str,
        table_row: int,
    ) -> None:
        self.k, self.page_tokens, self._table_row = k, page_tokens, table_row
        self.row_keys = max(page_tokens, CHUNK_KEYS)
        matrices = page_matrices(kv_heads, k_dim, v_dim, kv_element)
        self._matrices = [(rows // kv_heads, rows, size) for rows, size in matrices]
        if page_tokens < CHUNK_KEYS:
            self._gathered = [
                k.stack(i8, own * CHUNK_KEYS * size) for own, _, size in self._matrices
            ]

    def chunk(self, place: Place, start: Value, stop: Value, after: Place) -> Chunk:
        """The chunk at a place. Only pages that hold a key of [start, stop) are touched, but that
        what follows the last of these chunks, `after`, is fetched."""
        k, (table, kv_head, base) = self.k, place
        if self.page_tokens >= CHUNK_KEYS:
            here = self._page(table, kv_head, base)
            following = base + CHUNK_KEYS
            is_last = following >= stop
            next_one = (
                k.select(is_last, a, b)
                for a, b in zip(after, (table, kv_head, following), strict=True)
            )
            there = self._page(*next_one)
            return tuple(Part(at, then - at) for at, then in zip(here, there, strict=True))
        first = k.max(base, start & -self.page_tokens)
        with k.loop(first, k.min(base + CHUNK_KEYS, stop), self.page_tokens) as position:
            self._gather(self._page(table, kv_head, position), position - base)
        return tuple(map(Part, self._gathered))

    def _page(self, table: Value, kv_head: Value, position: Value) -> list[Value]:
        """Addresses of a position in the first of the KV head's rows of each matrix."""
        k, per_page = self.k, self.page_tokens
        at = k.load(table + position.udiv(per_page) * k.arg(self._table_row), i64)
        offset, found = position.urem(per_page), []
        for own, rows, size in self._matrices:
            found.append(at + (kv_head * (own * per_page) + offset) * size)
            at = at + rows * per_page * size
        return found

    def _gather(self, page: list[Value], key: Value) -> None:
        """Copy a small page to where its keys stand in the chunk."""
        k, per_page = self.k, self.page_tokens
        for from_, into, (own, _, size) in zip(page, self._gathered, self._matrices, strict=True):
            num_bytes = per_page * size
            if size <= 4:
                kind, step = vec(i16 if size == 2 else i32, per_page), num_bytes
            else:
                kind, step = (i16, 2) if size % 4 else (i32, 4)
            with k.loop(0, own) as row:
                start, to = from_ + row * num_bytes, into + (row * CHUNK_KEYS + key) * size
                with k.loop(0, num_bytes, step) as at:
                    k.store(k.load(start + at, kind), to + at)

    def fetch(self, address: Value, ahead: Value | None, num_bytes: int) -> None:
        """Have fetched what lies `ahead` of so many bytes at an address."""
        if ahead is not None:
            for offset in range(0, num_bytes, _LINE_BYTES):
                self.k.prefetch(address + ahead + offset)
