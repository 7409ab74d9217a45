"""Numbers from a file: defaults, and refusals that name the key."""

from __future__ import annotations

import pytest

from jitllm.models.hparams import BadModel, Config, Hparams
from jitllm.models.rope import ScalingKind

PLAIN: Config = {
    "context_length": 512,
    "block_count": 3,
    "embedding_length": 256,
    "feed_forward_length": 384,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def test_defaults() -> None:
    hparams = Hparams.read(PLAIN)
    assert (hparams.kv_heads, hparams.k_dim, hparams.v_dim, hparams.num_rotated) == (4, 64, 64, 64)
    assert (hparams.rope_base, hparams.window, hparams.temperature) == (10_000.0, 0, None)
    assert (hparams.scaling.factor, hparams.scaling.original_context) == (1.0, 512)


def test_a_factor_without_a_type_is_linear() -> None:
    scaling = Hparams.read({**PLAIN, "rope.scaling.factor": 4.0}).scaling
    assert (scaling.kind, scaling.factor) == (ScalingKind.LINEAR, 4.0)


def test_one_number_for_each_block_counts_where_all_are_equal() -> None:
    assert Hparams.read({**PLAIN, "attention.head_count_kv": [2, 2, 2]}).kv_heads == 2
    with pytest.raises(BadModel, match="attention.head_count_kv differs from block to block"):
        Hparams.read({**PLAIN, "attention.head_count_kv": [2, 4, 2]})


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("block_count", 0, "block_count is 0, not between 1 and"),
        ("block_count", 3.0, "block_count is 3.0, not a whole number"),
        ("block_count", True, "block_count is True, not a whole number"),
        ("context_length", 2**31, "context_length is 2147483648, not between"),
        ("attention.head_count_kv", 3, "attention.head_count 4 is no multiple of 3 KV heads"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "epsilon is nan, not between"),
        ("attention.layer_norm_rms_epsilon", "small", "epsilon is 'small', not a number"),
        ("rope.dimension_count", 65, "rope.dimension_count is 65, not between 1 and 64"),
        ("rope.dimension_count", 63, "rope.dimension_count is 63, an odd number"),
        ("rope.freq_base", 1.0, "rope.freq_base is 1, not between"),
        ("rope.scaling.type", "longrope", "rope.scaling.type 'longrope' is not supported"),
        ("rope.scaling.type", 3, "rope.scaling.type is 3, not a word"),
        ("rope.scaling.factor", -1.0, "rope.scaling.factor is -1, not between"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping is 30.0, which no graph"),
        ("attention.sliding_window_pattern", [True], "has 1 entry for 3 blocks"),
    ],
)
def test_refusals_name_the_key(key: str, value: object, problem: str) -> None:
    with pytest.raises(BadModel) as refusal:
        Hparams.read({**PLAIN, key: value})  # type: ignore[dict-item]
    assert problem in str(refusal.value)


@pytest.mark.parametrize("key", PLAIN)
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(BadModel, match=f"{key} is missing"):
        Hparams.read({k: v for k, v in PLAIN.items() if k != key})


def test_a_temperature_with_too_many_steps_is_refused() -> None:
    config = {**PLAIN, "context_length": 2**20, "attention.temperature_scale": 0.1}
    with pytest.raises(BadModel, match="too many steps"):
        Hparams.read({**config, "rope.scaling.original_context_length": 4})
