"""DeepSeek 1: plain attention, leading dense blocks, shared experts."""

from jitllm.models.spec import Attention, Experts, RopeStyle, Spec

DEEPSEEK = Spec("deepseek", Attention(RopeStyle.INTERLEAVED), experts=Experts())
