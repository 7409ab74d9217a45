"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import Buffer, Weight

MAX_EXPERTS = 1024
"""Experts of a block, at most: a kernel keeps the scores of all of them on its stack."""

LEAST_SUM = 2.0**-14
"""Weights are divided by their sum, or by this if that is smaller."""


@dataclass(frozen=True, slots=True)
class Route:
    """ids[t] = the chosen experts of token t, as many as `ids` is wide; routed[t] = their weights.

    logits: f32 [tokens, experts], at most MAX_EXPERTS. ids: i32 [tokens, used]. routed: f32
    [tokens, used]. bias: f32 [experts]; it changes who is chosen, and no weight.

    Scores of a token, p:
    - "softmax": e_i = exp(logit_i - the largest), p_i = e_i / sum of e; the sum has 16 lanes,
      i mod 16, and then the tree of `Kernel.hsum`.
    - "sigmoid": p_i = 1 / (1 + exp(-logit_i)).

    c_i = p_i + bias_i, where a NaN counts as the smallest number. With `groups` > 1 the experts are
    cut into so many runs of equal length; a run's score is the sum of its two largest c, and only
    the `groups_used` best runs are chosen from. Chosen are the experts with the largest c, in that
    order; of equal ones, experts or runs, the lower id comes first.

    The weights are p of the chosen ones; `is_normalised`: divided by max(their sum in that order,
    LEAST_SUM). Then times `scale`. All in f32.
    """

    logits: Buffer
    ids: Buffer
    routed: Buffer
    score: str
    bias: Weight | None = None
    groups: int = 1
    groups_used: int = 1
    is_normalised: bool = False
    scale: float = 1.0

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Logits."""
        return (self.logits,)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """Experts and their weights."""
        return (self.ids, self.routed)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The bias."""
        return () if self.bias is None else (self.bias,)
