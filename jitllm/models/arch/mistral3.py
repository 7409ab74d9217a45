"""Mistral 3 and Ministral 3: YaRN, and a temperature that grows with the position."""

from jitllm.models.spec import Attention, RopeStyle, Spec

MISTRAL3 = Spec("mistral3", Attention(RopeStyle.INTERLEAVED, has_temperature=True))
