"""Llama 1 to 3, Mistral 7B and what shares their graph."""

from jitllm.models.spec import Attention, RopeStyle, Spec

LLAMA = Spec("llama", Attention(RopeStyle.INTERLEAVED))
