"""Qwen 3, dense and with experts: norms on the heads of queries and keys."""

from jitllm.models.spec import Attention, Experts, QkNorm, RopeStyle, Spec

_ATTENTION = Attention(RopeStyle.HALVES, qk_norm=QkNorm.HEAD)

QWEN3 = Spec("qwen3", _ATTENTION)
QWEN3_MOE = Spec("qwen3moe", _ATTENTION, experts=Experts(is_normalised=True))
