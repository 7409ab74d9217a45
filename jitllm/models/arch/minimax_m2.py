"""MiniMax M2: norms on all heads of a token together, sigmoid scores with a bias on the choice."""

from jitllm.models.spec import Attention, Experts, QkNorm, RopeStyle, RouterScore, Spec

MINIMAX_M2 = Spec(
    "minimax-m2",
    Attention(RopeStyle.HALVES, qk_norm=QkNorm.ROW),
    experts=Experts(RouterScore.SIGMOID, is_normalised=True),
)
