"""Models with one feature taken away: what the oracle must notice.

Knows rows and numbers. Knows no arithmetic: whoever wires a variant decides what computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jitllm.kernels.op import Weight
from jitllm.models.build import build
from jitllm.models.graph import Graph
from jitllm.models.hparams import Hparams
from jitllm.models.rope import Scaling, ScalingKind
from jitllm.models.spec import Activation, LocalBlocks, QkNorm, RopeStyle, RouterScore, Spec


@dataclass
class Variant:
    """What a graph is built from; it may be changed before it is wired."""

    spec: Spec
    hparams: Hparams
    weights: Sequence[Weight]
    factors: Sequence[float] | None

    def graph(self) -> Graph:
        """The graph as it is now."""
        return build(self.spec, self.hparams, self.weights, self.factors)

    def attention(self, **changes: object) -> None:
        """Change axes of attention."""
        self.spec = replace(self.spec, attention=replace(self.spec.attention, **changes))

    def numbers(self, **changes: object) -> None:
        """Change numbers."""
        self.hparams = replace(self.hparams, **changes)

    def experts(self, **changes: object) -> None:
        """Change numbers of the mixture."""
        self.numbers(experts=replace(self.hparams.experts, **changes))

    def routing(self, **changes: object) -> None:
        """Change axes of the mixture."""
        self.spec = replace(self.spec, experts=replace(self.spec.experts, **changes))

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
    v.attention(qk_norm=QkNorm.NONE)
    v.drop("attn_q_norm", "attn_k_norm")


def no_post_norms(v: Variant) -> None:
    v.spec = replace(v.spec, post_norms=False)
    v.drop("attn_post_norm", "ffn_post_norm")


def embedding_as_it_is(v: Variant) -> None:
    v.spec = replace(v.spec, scaled_embedding=False)


def another_activation(v: Variant) -> None:
    v.spec = replace(v.spec, feed_forward=replace(v.spec.feed_forward, activation=Activation.SILU))


def without_shared_experts(v: Variant) -> None:
    v.experts(has_shared=False)
    v.drop(*(f"ffn_{role}_shexp" for role in ("gate", "up", "down")))


def ungated_shared_expert(v: Variant) -> None:
    v.routing(shared_gate=False)
    v.drop("ffn_gate_inp_shexp")


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
    "granite: embedding scale": ("granite", lambda v: v.numbers(embedding_scale=11.0)),
    "granite: residual scale": ("granite", lambda v: v.numbers(residual_scale=0.25)),
    "granite: logit scale": ("granite", lambda v: v.numbers(logit_scale=2.1)),
    "llama-moe: used": ("llama-moe", lambda v: v.experts(used=3)),
    "llama-moe: normalised": ("llama-moe", lambda v: v.routing(is_normalised=False)),
    "qwen2moe: not normalised": ("qwen2moe", lambda v: v.routing(is_normalised=True)),
    "qwen2moe: shared gate": ("qwen2moe", ungated_shared_expert),
    "qwen3moe: head norm": ("qwen3moe", no_head_norm),
    "olmoe: norm of rows": ("olmoe", no_head_norm),
    "granitemoe: residual scale": ("granitemoe", lambda v: v.numbers(residual_scale=0.25)),
    "granitemoe: shared experts": ("granitemoe", without_shared_experts),
    "deepseek: shared experts": ("deepseek", without_shared_experts),
    "bailingmoe: normalised": ("bailingmoe", lambda v: v.experts(is_normalised=False)),
    "bailingmoe2: groups": ("bailingmoe2", lambda v: v.experts(groups=1, groups_used=1)),
    "bailingmoe2: used groups": ("bailingmoe2", lambda v: v.experts(groups_used=1)),
    "bailingmoe2: bias": ("bailingmoe2", without_bias("exp_probs_b")),
    "dots1: score": ("dots1", lambda v: v.experts(score=RouterScore.SOFTMAX)),
    "dots1: scale": ("dots1", lambda v: v.experts(scale=1.0)),
    "dots1: bias": ("dots1", without_bias("exp_probs_b")),
    "ernie4_5-moe: bias": ("ernie4_5-moe", without_bias("exp_probs_b")),
    "glm4moe: head norm": ("glm4moe", no_head_norm),
    "minimax-m2: bias": ("minimax-m2", without_bias("exp_probs_b")),
    "hunyuan-moe: norm last": ("hunyuan-moe", lambda v: v.attention(norm_after_rope=False)),
    "mellum: window": ("mellum", lambda v: v.numbers(window=0)),
    "mellum: period": ("mellum", lambda v: v.attention(local=LocalBlocks(5))),
}
"""What is taken away: the model that has it, and how."""
