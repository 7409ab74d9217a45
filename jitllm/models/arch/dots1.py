"""dots.llm1: sigmoid scores with a bias on the choice, leading dense blocks, shared experts."""

from jitllm.models.spec import Attention, Experts, QkNorm, RopeStyle, RouterScore, Spec

DOTS1 = Spec(
    "dots1",
    Attention(RopeStyle.HALVES, qk_norm=QkNorm.HEAD),
    experts=Experts(RouterScore.SIGMOID),
)
