"""Tensor names of GGUF files and roles."""

from __future__ import annotations

import pytest

from jitllm.errors import UnsupportedModel
from jitllm.formats.names import role_of, source_name


@pytest.mark.parametrize(
    ("name", "role", "block"),
    [
        ("token_embd.weight", "token_embd", None),
        ("output.weight", "output", None),
        ("rope_freqs.weight", "rope_freqs", None),
        ("blk.0.attn_q.weight", "attn_q", 0),
        ("blk.61.attn_q.bias", "attn_q.bias", 61),
        ("blk.5.ffn_down_exps.weight", "ffn_down_exps", 5),
        ("blk.5.exp_probs_b.bias", "exp_probs_b.bias", 5),
        ("blk.7.post_attention_norm.weight", "attn_post_norm", 7),
        ("blk.7.post_ffw_norm.weight", "ffn_post_norm", 7),
    ],
)
def test_names_and_roles(name: str, role: str, block: int | None) -> None:
    assert role_of(name) == (role, block)
    assert source_name(role, block) == name


@pytest.mark.parametrize(
    "name",
    ["", "blk.0", "blk.00.attn_q.weight", "blk.-1.attn_q.weight", "blk.9999999.attn_q.weight",
     "attn_q.weight", "blk.0.token_embd.weight", "blk.0.attn_q", "blk.\u0663.attn_q.weight",
     "blk.0.attn_rel_b.weight", "token_embd.weight\n"],
)  # fmt: skip
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="is not supported"):
        role_of(name)


def test_a_role_without_a_name_is_shown_as_it_is() -> None:
    assert source_name("mystery", 3) == "blk.3.mystery"
    assert source_name("mystery", None) == "mystery"
