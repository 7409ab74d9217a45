"""Granite 3, dense and with experts: what is added, embedded and said is scaled by the file."""

from dataclasses import replace

from jitllm.models.spec import Attention, Experts, RopeStyle, Spec

GRANITE = Spec("granite", Attention(RopeStyle.INTERLEAVED), scaled_by_file=True)
GRANITE_MOE = replace(GRANITE, name="granitemoe", experts=Experts(is_normalised=True))
