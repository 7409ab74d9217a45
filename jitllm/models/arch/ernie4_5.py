"""ERNIE 4.5 with experts: a bias on the choice, leading dense blocks, shared experts."""

from jitllm.models.spec import Attention, Experts, RopeStyle, Spec

ERNIE4_5_MOE = Spec(
    "ernie4_5-moe", Attention(RopeStyle.INTERLEAVED), experts=Experts(is_normalised=True)
)
