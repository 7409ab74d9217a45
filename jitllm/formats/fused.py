"""Tensors that files keep as one and graphs want apart.

Knows which parts there are and how many rows each has. A row of a weight matrix is whole in every
format, so parts are taken out of the source as they are.
"""

from __future__ import annotations

from jitllm.models.hparams import Hparams

Part = tuple[str, int]
"""A role, and how many rows (of a vector: elements) it has."""


FUSED_ROLES = frozenset({"attn_qkv"})


def parts_of(role: str, hparams: Hparams) -> tuple[Part, ...]:
    """The parts, in their order, of a fused matrix, or of the bias of one (`attn_qkv.bias`)."""
    hp = hparams
    parts = (
        ("attn_q", hp.heads * hp.k_dim),
        ("attn_k", hp.kv_heads * hp.k_dim),
        ("attn_v", hp.kv_heads * hp.v_dim),
    )
    _, dot, suffix = role.partition(".")
    return tuple((f"{part}{dot}{suffix}", rows) for part, rows in parts)


def is_fused(role: str) -> bool:
    """Whether a role must be taken apart."""
    return role.partition(".")[0] in FUSED_ROLES
