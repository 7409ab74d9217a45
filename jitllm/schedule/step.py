"""What one step computes: spans of tokens of several sequences, in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from jitllm.memory.use import Phase


class SpanOutputs(StrEnum):
    """Which tokens of a span give logits."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class Span(NamedTuple):
    """Tokens [start, start + len(tokens)) of a sequence, one row of the batch.

    sample: draw the next token from the last position's logits. target: the token that follows
    the span if it is known already (-1 if not), for its log-probability.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]
    outputs: SpanOutputs
    sample: bool
    target: int = -1

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    @property
    def num_outputs(self) -> int:
        """Output rows of this span."""
        if self.outputs is SpanOutputs.NONE:
            return 0
        return len(self.tokens) if self.outputs is SpanOutputs.ALL else 1

    def next(self, token: int) -> Span:
        """The span that goes on with the token that was drawn at the end of this one."""
        return Span(self.sequence, self.stop, (token,), SpanOutputs.LAST, sample=True)


class SpanResult(NamedTuple):
    """What a device computed for a span. `token` is None where nothing was sampled.

    prompt_logprobs: log-probability of the token after each output position that has one.
    top_logprobs: the likeliest (token id, log-probability) pairs where `token` was drawn, and
    prompt_top_logprobs those of each entry of prompt_logprobs; empty where not asked for.
    """

    sequence: int
    token: int | None
    logprob: float
    prompt_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


def phase_of(spans: Sequence[Span]) -> Phase:
    """Whether a step computes any part of a prompt; a prompt of one token is like a reply."""
    is_prompt = any(len(span.tokens) > 1 or not span.sample for span in spans)
    return "prompt" if is_prompt else "decode"


def following(spans: Sequence[Span], results: Sequence[SpanResult]) -> tuple[Span, ...]:
    """The step after one that sampled for every span: the same with the tokens that came."""
    return tuple(
        span.next(result.token)
        for span, result in zip(spans, results, strict=True)
        if result.token is not None
    )
