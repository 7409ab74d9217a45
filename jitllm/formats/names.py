"""Names of tensors in GGUF files, and the roles that the rest of jitllm knows them by.

Knows names. Knows no shapes, and not which architecture needs which role.
"""

from __future__ import annotations

import re

from jitllm.errors import UnsupportedModel

_DENSE = {"token_embd": "token_embd", "output_norm": "output_norm", "output": "output"}
_DENSE_VECTORS = {"rope_freqs.weight": "rope_freqs"}

_BLOCK = {
    "attn_norm": "attn_norm",
    "attn_q": "attn_q",
    "attn_k": "attn_k",
    "attn_v": "attn_v",
    "attn_qkv": "attn_qkv",
    "attn_output": "attn_output",
    "attn_q_norm": "attn_q_norm",
    "attn_k_norm": "attn_k_norm",
    "post_attention_norm": "attn_post_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "ffn_gate",
    "ffn_up": "ffn_up",
    "ffn_down": "ffn_down",
    "post_ffw_norm": "ffn_post_norm",
    "ffn_gate_inp": "ffn_gate_inp",
    "ffn_gate_exps": "ffn_gate_exps",
    "ffn_up_exps": "ffn_up_exps",
    "ffn_down_exps": "ffn_down_exps",
    "ffn_gate_inp_shexp": "ffn_gate_inp_shexp",
    "ffn_gate_shexp": "ffn_gate_shexp",
    "ffn_up_shexp": "ffn_up_shexp",
    "ffn_down_shexp": "ffn_down_shexp",
    "exp_probs_b": "exp_probs_b",
}
EXPERT_ROLES = frozenset({"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"})
"""Of which there is a matrix for each expert, in one tensor of three dimensions."""

ROW_ROLES = frozenset({"ffn_gate_inp_shexp"})
"""Matrices of a single row, which files have as vectors."""


def _with_parts(names: dict[str, str]) -> dict[str, str]:
    """Source names with their suffix: the weight has the bare role, the bias says so."""
    weights = {f"{name}.weight": role for name, role in names.items()}
    return weights | {f"{name}.bias": f"{role}.bias" for name, role in names.items()}


_DENSE_ROLES = _with_parts(_DENSE) | _DENSE_VECTORS
_BLOCK_ROLES = _with_parts(_BLOCK)
_DENSE_NAMES = {role: name for name, role in _DENSE_ROLES.items()}
_BLOCK_NAMES = {role: name for name, role in _BLOCK_ROLES.items()}

_IN_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)", re.ASCII)


def role_of(name: str) -> tuple[str, int | None]:
    """The role of the tensor `name`, and its block; None in the dense region.

    Raises UnsupportedModel, which lists what is known, for a name that no graph has a use for.
    """
    if match := _IN_BLOCK.fullmatch(name):
        role = _BLOCK_ROLES.get(match[2])
        if role is not None:
            return role, int(match[1])
    elif (role := _DENSE_ROLES.get(name)) is not None:
        return role, None
    raise UnsupportedModel("tensor", name, [*_DENSE, "rope_freqs", *(f"blk.N.{n}" for n in _BLOCK)])


def source_name(role: str, block: int | None) -> str:
    """The GGUF name of a role, for messages; a role that has none is given back with its block."""
    if block is None:
        return _DENSE_NAMES.get(role, role)
    return f"blk.{block}.{_BLOCK_NAMES.get(role, role)}"
