"""The decision of each step: who computes which tokens, who is admitted.

Pure functions of plain values: the same view gives the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from jitllm.schedule.sequence import Sequence
from jitllm.schedule.step import Span, SpanOutputs


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one step: rows, tokens and output rows that a device's buffers hold."""

    rows: int
    tokens: int
    outputs: int


class Newcomers(NamedTuple):
    """Sequences without a token of a reply: how many, and what is left of their prompts."""

    num: int
    tokens: int


def urgency(sequence: Sequence) -> tuple[float, ...]:
    """Who was passed too often, then high priority, then arrival."""
    rank = 0 if sequence.is_overdue else 1 if sequence.is_high else 2
    return rank, sequence.id


def next_admission(
    waiting: Seq[Sequence],
    running: Seq[Sequence],
    budget: Budget,
    page_tokens: int,
    refused_tokens: int | None = None,
    order: Callable[[Sequence], tuple[float, ...]] = urgency,
) -> Sequence | None:
    """Who should be admitted now; None when nobody should.

    In the order of `order`. A sequence whose prefix someone computes right now waits until that is
    done. refused_tokens: the least that there was no room for; who needs less goes ahead of those
    who need more, unless one of these was passed too often.
    """
    if len(running) >= budget.rows:
        return None
    for sequence in sorted(waiting, key=order):
        if refused_tokens is not None and sequence.promised_tokens >= refused_tokens:
            if sequence.is_overdue:
                return None
        elif not any(_is_computing_for(other, sequence, page_tokens) for other in running):
            return sequence
    return None


def _is_computing_for(running: Sequence, waiting: Sequence, page_tokens: int) -> bool:
    """Whether the page that `running` computes next is one that `waiting` could share."""
    if not waiting.prefix:
        return False
    page = running.num_computed // page_tokens
    return (
        page < len(waiting.prefix)
        and page < len(running.prefix)
        and waiting.prefix[page] == running.prefix[page]
    )


def has_room(waiting: Seq[Sequence], running: Seq[Sequence], budget: Budget, queue: int) -> bool:
    """Whether one more sequence may be taken in. queue: how many may wait besides those that a
    step has rows for; negative for any number."""
    rows = max(budget.rows - len(running), 0)
    return queue < 0 or len(waiting) < queue + rows


def newcomers(
    waiting: Seq[Sequence],
    running: Seq[Sequence],
    budget: Budget,
    refused_tokens: int | None = None,
) -> Newcomers:
    """Who waits for a first token, and has a row or could: there is one, and room."""
    could = [s for s in waiting if refused_tokens is None or s.promised_tokens < refused_tokens]
    prompts = [s for s in running if not s.is_replying]
    prompts += could[: max(budget.rows - len(running), 0)]
    return Newcomers(len(prompts), sum(sequence.num_pending for sequence in prompts))


def spans(
    running: Seq[Sequence], budget: Budget, prompt_tokens: int | None = None
) -> tuple[Span, ...]:
    """The rows of the next step.

    Replies that have begun come first, one token each. Then prompts, high priority first, in order
    of arrival: together they get `prompt_tokens` at the most and what is left of the budget.
    Whoever wants outputs of a whole prompt leaves one to each of the others.
    """
    ready = [s for s in running if s.num_pending]
    replies = [s for s in ready if s.is_replying][: budget.rows]
    prompts = sorted((s for s in ready if not s.is_replying), key=_turn)
    prompts = prompts[: budget.rows - len(replies)]
    tokens, outputs = budget.tokens, budget.outputs
    others = len(replies) + len(prompts)
    chosen: list[Span] = []
    for index, sequence in enumerate((*replies, *prompts)):
        if index == len(replies) and prompt_tokens is not None:
            tokens = min(tokens, prompt_tokens)
        others -= 1
        span = _span(sequence, tokens, outputs, max(outputs - others, 1))
        if span is None:
            continue
        tokens -= len(span.tokens)
        outputs -= span.num_outputs
        chosen.append(span)
    return tuple(chosen)


def goes_on(spans: Seq[Span], running: Seq[Sequence], waiting: Seq[Sequence]) -> bool:
    """Whether the next step is this one again with the tokens that it samples.

    Until a sequence ends, which the device sees by itself, or somebody comes or goes.
    """
    return (
        not waiting
        and all(span.sample and span.outputs is SpanOutputs.LAST for span in spans)
        and [span.sequence for span in spans] == [sequence.id for sequence in running]
    )


def _turn(sequence: Sequence) -> tuple[bool, int]:
    return not sequence.is_high, sequence.id


def _span(sequence: Sequence, tokens: int, outputs: int, most: int) -> Span | None:
    """As much of a sequence as fits, or None. most: outputs that a whole prompt may take."""
    count = min(sequence.num_pending, tokens, sequence.chunk_tokens or tokens)
    wants_all = sequence.all_outputs and sequence.num_computed < sequence.num_prompt
    num_repeated = sequence.num_reported - sequence.num_computed
    if wants_all and num_repeated > 0:
        wants_all = False
        count = min(count, num_repeated)
    elif wants_all:
        count = min(count, outputs, most)
    if count <= 0:
        return None
    start, stop = sequence.num_computed, sequence.num_computed + count
    is_last = stop == sequence.num_tokens
    if is_last and not outputs:
        return None
    kind = SpanOutputs.ALL if wants_all else SpanOutputs.LAST if is_last else SpanOutputs.NONE
    return Span(
        sequence=sequence.id,
        start=start,
        tokens=tuple(sequence.tokens[start:stop]),
        outputs=kind,
        sample=is_last and sequence.num_tokens < sequence.max_tokens,
        target=-1 if is_last else sequence.tokens[stop],
    )
