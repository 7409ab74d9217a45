"""Gemma 3: five local blocks, then a global one; the 27B (62 blocks) scales scores by width."""

from jitllm.models.spec import (
    Activation,
    Attention,
    FeedForward,
    LocalBlocks,
    QkNorm,
    RopeStyle,
    Spec,
)

GEMMA3 = Spec(
    "gemma3",
    Attention(
        RopeStyle.HALVES,
        qk_norm=QkNorm.HEAD,
        local=LocalBlocks(period=6, rope_base=10_000.0),
        width_scaled=(62,),
    ),
    FeedForward(Activation.GELU),
    post_norms=True,
    scaled_embedding=True,
)
