"""GLM 4.5: some have norms on heads; the norm before the feed-forward layer has another name."""

from jitllm.models.spec import Attention, Experts, QkNorm, RopeStyle, RouterScore, Spec

GLM4_MOE = Spec(
    "glm4moe",
    Attention(RopeStyle.HALVES, qk_norm=QkNorm.HEAD, optional_norm=True),
    experts=Experts(RouterScore.SIGMOID),
    ffn_norm="attn_post_norm",
)
