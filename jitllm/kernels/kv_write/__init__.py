"""Keys and values of the step's tokens into KV pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jitllm.kernels.layout import GROUP
from jitllm.kernels.op import PAGES, Buffer, Weight


class Matrix(NamedTuple):
    """A part of a KV page: rows for all KV heads, in which positions lie side by side."""

    rows: int
    position_bytes: int


def page_matrices(kv_heads: int, k_dim: int, v_dim: int, kv_element: str) -> tuple[Matrix, ...]:
    """What a KV page is made of, one after the other: keys, values, and the scales of both where
    elements have scales. Whatever knows no more than that may carry any type."""
    if kv_element == "q8_0":
        return (
            Matrix(kv_heads * k_dim // 4, 4),
            Matrix(kv_heads, v_dim),
            Matrix(kv_heads * k_dim // GROUP, 2),
            Matrix(kv_heads * v_dim // GROUP, 2),
        )
    size = 2 if kv_element == "f16" else 4
    return Matrix(kv_heads * k_dim, size), Matrix(kv_heads, v_dim * size)


def page_bytes(kv_heads: int, k_dim: int, v_dim: int, page_tokens: int, kv_element: str) -> int:
    """Bytes of one KV page of one block."""
    matrices = page_matrices(kv_heads, k_dim, v_dim, kv_element)
    return page_tokens * sum(rows * size for rows, size in matrices)


@dataclass(frozen=True, slots=True)
class KvWrite:
    """Store k[t], v[t] at position positions[t] of sequence row_of[t].

    k: f32 [tokens, kv_heads * k_dim]; v: f32 [tokens, kv_heads * v_dim]. A page of P positions
    holds, element f16 (rounded to nearest even) or f32: keys [kv_heads][k_dim][P] (transposed),
    then values [kv_heads][P][v_dim]. The page of position p of row r is entry
    (p // P) * num_blocks + slot of the row's page table (`Ctx.tables`).

    Element q8_0, for k_dim and v_dim that are multiples of 32: groups of 32 dimensions of a head
    have a scale. amax = max |x| of the group; scale = f16(amax / 127); q = round to nearest even of
    (x * (127 / amax)), clamped to [-127, 127], and 0 where amax is 0: the bytes that ggml's
    `quantize_row_q8_0` makes on x86 (its reference rounds ties away from zero, and multiplies by
    1 / (amax / 127)). A page holds four dimensions of a key in a word, the first in its lowest
    byte: keys u32 [kv_heads][k_dim / 4][P], values i8 [kv_heads][P][v_dim], scales of keys f16
    [kv_heads][k_dim / 32][P], scales of values f16 [kv_heads][v_dim / 32][P].
    """

    k: Buffer
    v: Buffer
    block: int
    kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Keys and values."""
        return (self.k, self.v)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """KV pages."""
        return (PAGES,)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """None."""
        return ()
