"""Keys and values of the step's tokens into KV pages."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import PAGES, Buffer, Weight


def page_bytes(kv_heads: int, k_dim: int, v_dim: int, page_tokens: int, kv_element: str) -> int:
    """Bytes of one KV page of one block."""
    return kv_heads * (k_dim + v_dim) * page_tokens * (2 if kv_element == "f16" else 4)


@dataclass(frozen=True, slots=True)
class KvWrite:
    """Store k[t], v[t] at position positions[t] of sequence row_of[t].

    k: f32 [tokens, kv_heads * k_dim]; v: f32 [tokens, kv_heads * v_dim]. A page of P positions
    holds, element f16 (rounded to nearest even) or f32: keys [kv_heads][k_dim][P] (transposed),
    then values [kv_heads][P][v_dim]. The page of position p of row r is entry
    (p // P) * num_blocks + slot of the row's page table (`Ctx.tables`).
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
