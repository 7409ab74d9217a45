"""Mellum 2: three local blocks, then a global one; every block has experts."""

from jitllm.models.spec import Attention, Experts, LocalBlocks, QkNorm, RopeStyle, Spec

MELLUM = Spec(
    "mellum",
    Attention(RopeStyle.HALVES, qk_norm=QkNorm.HEAD, local=LocalBlocks(period=4)),
    experts=Experts(is_normalised=True),
)
