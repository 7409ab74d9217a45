"""Qwen 2 and 2.5: biases on queries, keys and values."""

from jitllm.models.spec import Attention, RopeStyle, Spec

QWEN2 = Spec("qwen2", Attention(RopeStyle.HALVES))
