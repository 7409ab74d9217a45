"""Qwen 3, dense: norms on the heads of queries and keys."""

from jitllm.models.spec import Attention, RopeStyle, Spec

QWEN3 = Spec("qwen3", Attention(RopeStyle.HALVES, head_norm=True))
