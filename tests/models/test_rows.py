"""Every row, in exact arithmetic, gives the logits of an independent engine; every feature counts.

No kernel is involved: a failure here is a wrong row, a wrong number or a wrong wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from jitllm.models.build import build
from jitllm.models.hparams import Hparams
from jitllm.models.registry import spec_of
from jitllm.models.rope import Scaling, ScalingKind
from jitllm.models.spec import Activation, LocalBlocks, RopeStyle, Spec
from tests.models import oracle
from tests.models.reference import Source, logits

MAX_DIFFERENCE = 2e-4
MAX_RMS = 5e-5


@pytest.mark.parametrize("name", oracle.FLOAT_MODELS)
def test_float_weights_give_the_golden_logits(name: str) -> None:
    source = oracle.model(name)
    tokens, truth = oracle.golden(name)
    difference = logits(source.graph(), source.values, tokens) - truth
    assert np.abs(difference).max() <= MAX_DIFFERENCE
    assert np.sqrt((difference**2).mean()) <= MAX_RMS


@pytest.mark.parametrize("weight_type", oracle.WEIGHT_TYPES)
def test_quantised_activations_stay_close_to_exact_ones(weight_type: str) -> None:
    source = oracle.quantized(weight_type)
    tokens, truth = oracle.golden(weight_type)
    difference = logits(source.graph(), source.values, tokens) - truth
    assert np.abs(difference).max() <= 0.3
    assert np.sqrt((difference**2).mean()) <= 0.06


# --- take one feature away ---------------------------------------------------------------------


class Variant:
    """A model that may be changed before it is wired."""

    def __init__(self, source: Source) -> None:
        self.spec: Spec = spec_of(source.arch)
        self.hparams: Hparams = source.hparams
        self.weights = list(source.weights)
        self.factors = source.rope_factors

    def attention(self, **changes: object) -> None:
        """Change axes of attention."""
        self.spec = replace(self.spec, attention=replace(self.spec.attention, **changes))

    def numbers(self, **changes: object) -> None:
        """Change numbers."""
        self.hparams = replace(self.hparams, **changes)

    def scaling(self, **changes: object) -> None:
        """Change numbers of the rotary scaling."""
        self.numbers(scaling=replace(self.hparams.scaling, **changes))

    def drop(self, *roles: str) -> None:
        """Leave tensors out."""
        self.weights = [w for w in self.weights if w.role not in roles]


Change = Callable[[Variant], None]


def no_rope_factors(v: Variant) -> None:
    v.drop("rope_freqs")
    v.factors = None


def without_ramp(v: Variant) -> None:
    stretch = 1.0 + 0.1 * math.log(v.hparams.scaling.factor)
    v.scaling(kind=ScalingKind.LINEAR, attention_factor=stretch)


def no_head_norm(v: Variant) -> None:
    v.attention(head_norm=False)
    v.drop("attn_q_norm", "attn_k_norm")


def no_post_norms(v: Variant) -> None:
    v.spec = replace(v.spec, post_norms=False)
    v.drop("attn_post_norm", "ffn_post_norm")


def embedding_as_it_is(v: Variant) -> None:
    v.spec = replace(v.spec, scaled_embedding=False)


def another_activation(v: Variant) -> None:
    v.spec = replace(v.spec, feed_forward=replace(v.spec.feed_forward, activation=Activation.SILU))


def without_bias(role: str) -> Change:
    return lambda v: v.drop(f"{role}.bias")


QKV = ("attn_q", "attn_k", "attn_v")

CHANGES: dict[str, tuple[str, Change]] = {
    "llama: rope factors": ("llama", no_rope_factors),
    "llama: pairs": ("llama", lambda v: v.attention(rope=RopeStyle.HALVES)),
    "llama: rope base": ("llama", lambda v: v.numbers(rope_base=10_000.0)),
    "llama-linear: scaling": ("llama-linear", lambda v: v.numbers(scaling=Scaling())),
    "llama-yarn: scaling": ("llama-yarn", lambda v: v.numbers(scaling=Scaling())),
    "llama-yarn: ramp": ("llama-yarn", without_ramp),
    "llama-yarn: stretch": ("llama-yarn", lambda v: v.scaling(log_multiplier=1.0)),
    "llama-yarn: kind": ("llama-yarn", lambda v: v.scaling(kind=ScalingKind.LINEAR)),
    "llama-yarn: original": ("llama-yarn", lambda v: v.scaling(original_context=512)),
    **{
        f"llama-bias: {role} bias": ("llama-bias", without_bias(role))
        for role in (*QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    },
    **{f"qwen2: {role} bias": ("qwen2", without_bias(role)) for role in QKV},
    "qwen2: pairs": ("qwen2", lambda v: v.attention(rope=RopeStyle.INTERLEAVED)),
    "qwen3: head norm": ("qwen3", no_head_norm),
    "gemma3: window": ("gemma3", lambda v: v.numbers(window=0)),
    "gemma3: wider window": ("gemma3", lambda v: v.numbers(window=17)),
    "gemma3: period": ("gemma3", lambda v: v.attention(local=LocalBlocks(7, 10_000.0))),
    "gemma3: local base": ("gemma3", lambda v: v.attention(local=LocalBlocks(6, 1e6))),
    "gemma3: scaling": ("gemma3", lambda v: v.numbers(scaling=Scaling())),
    "gemma3: head norm": ("gemma3", no_head_norm),
    "gemma3: post norms": ("gemma3", no_post_norms),
    "gemma3: scaled embedding": ("gemma3", embedding_as_it_is),
    "gemma3: activation": ("gemma3", another_activation),
    "mistral3: temperature": ("mistral3", lambda v: v.numbers(temperature=None)),
    "mistral3: log multiplier": ("mistral3", lambda v: v.scaling(log_multiplier=0.0)),
    "mistral3: ramp start": ("mistral3", lambda v: v.scaling(beta_fast=32.0)),
    "mistral3: ramp end": ("mistral3", lambda v: v.scaling(beta_slow=1.0)),
    "mistral3: eps": ("mistral3", lambda v: v.numbers(eps=1e-3)),
    "mistral3: score scale": ("mistral3", lambda v: v.numbers(attention_scale=0.1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_without_a_feature_the_logits_are_wrong(change: str) -> None:
    name, take_away = CHANGES[change]
    source = oracle.model(name)
    variant = Variant(source)
    take_away(variant)
    graph = build(variant.spec, variant.hparams, variant.weights, variant.factors)
    tokens, truth = oracle.golden(name)
    difference = np.abs(logits(graph, source.values, tokens) - truth).max()
    assert difference > 10 * MAX_DIFFERENCE
