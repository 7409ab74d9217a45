"""Qwen 2 and 2.5: biases on queries, keys and values; mixtures with a gated shared expert."""

from jitllm.models.spec import Attention, Experts, RopeStyle, Spec

QWEN2 = Spec("qwen2", Attention(RopeStyle.HALVES))
QWEN2_MOE = Spec("qwen2moe", Attention(RopeStyle.HALVES), experts=Experts(shared_gate=True))
