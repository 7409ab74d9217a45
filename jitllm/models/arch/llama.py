"""Llama 1 to 3, Mistral 7B, Mixtral and what shares their graph."""

from jitllm.models.spec import Attention, Experts, RopeStyle, Spec

LLAMA = Spec("llama", Attention(RopeStyle.INTERLEAVED), experts=Experts(is_normalised=True))
