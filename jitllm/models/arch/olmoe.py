"""OLMoE: norms on all heads of a token together, weights as the softmax leaves them."""

from jitllm.models.spec import Attention, Experts, QkNorm, RopeStyle, Spec

OLMOE = Spec("olmoe", Attention(RopeStyle.HALVES, qk_norm=QkNorm.ROW), experts=Experts())
