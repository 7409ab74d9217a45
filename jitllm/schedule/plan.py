"""The decision of each step: who computes which tokens, who is admitted.

Pure functions of plain values: the same view gives the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jitllm.schedule.sequence import Sequence
from jitllm.schedule.step import Span, SpanOutputs


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one step: rows, tokens and output rows that a device's buffers hold."""

    rows: int
    tokens: int
    outputs: int


def admissible(waiting: Seq[Sequence], num_running: int, budget: Budget) -> tuple[Sequence, ...]:
    """Waiting sequences that a step has a row for, in order of arrival."""
    return tuple(waiting[: max(budget.rows - num_running, 0)])


def spans(running: Seq[Sequence], budget: Budget) -> tuple[Span, ...]:
    """The rows of the next step, in order of arrival.

    Sequences that need one token come first, so that a long prompt never holds a reply up for
    more than its chunk; what is left of the token budget goes to the others.
    """
    ready = [s for s in running if s.num_pending]
    ready.sort(key=lambda s: s.num_pending > 1)
    tokens, outputs = budget.tokens, budget.outputs
    chosen: list[Span] = []
    for sequence in ready[: budget.rows]:
        span = _span(sequence, tokens, outputs)
        if span is None:
            break
        tokens -= len(span.tokens)
        outputs -= span.num_outputs
        chosen.append(span)
    return tuple(chosen)


def _span(sequence: Sequence, tokens: int, outputs: int) -> Span | None:
    """As much of a sequence as fits, or None."""
    count = min(sequence.num_pending, tokens, sequence.chunk_tokens or tokens)
    wants_all = sequence.all_outputs and sequence.num_computed < sequence.num_prompt
    if wants_all:
        count = min(count, outputs)
    if count <= 0 or outputs <= 0:
        return None
    start, stop = sequence.num_computed, sequence.num_computed + count
    is_last = stop == sequence.num_tokens
    kind = SpanOutputs.ALL if wants_all else SpanOutputs.LAST if is_last else SpanOutputs.NONE
    return Span(
        sequence=sequence.id,
        start=start,
        tokens=tuple(sequence.tokens[start:stop]),
        outputs=kind,
        sample=is_last and sequence.num_tokens < sequence.max_tokens,
        target=-1 if is_last else sequence.tokens[stop],
    )
