"""Hunyuan with experts: heads are normalised after they are rotated, and a shared expert."""

from jitllm.models.spec import Attention, Experts, QkNorm, RopeStyle, Spec

HUNYUAN_MOE = Spec(
    "hunyuan-moe",
    Attention(RopeStyle.HALVES, qk_norm=QkNorm.HEAD, norm_after_rope=True),
    experts=Experts(is_normalised=True),
)
