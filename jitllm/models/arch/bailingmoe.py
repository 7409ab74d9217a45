"""Ling 1 and 2: shared experts; the second routes by groups, with a bias on the choice."""

from jitllm.models.spec import Attention, Experts, QkNorm, RopeStyle, RouterScore, Spec

BAILING_MOE = Spec("bailingmoe", Attention(RopeStyle.INTERLEAVED), experts=Experts())
BAILING_MOE2 = Spec(
    "bailingmoe2",
    Attention(RopeStyle.HALVES, qk_norm=QkNorm.HEAD),
    experts=Experts(RouterScore.SIGMOID),
)
