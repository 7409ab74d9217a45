"""The steps of a device that go on from one by themselves, a token for each sequence.

Runs in the thread that computes, between two native calls: whatever is done here keeps every core
of the device waiting. So the next step is written down where the one before was, nothing but ids
and positions changes, and what a step gave is copied as it is, to be read elsewhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from struct import Struct

from actors.messages.device import Outcome
from actors.seats import Seat
from jitllm.devices.runner import Runner
from jitllm.engine import MAX_TOP_LOGPROBS, TopLogprobs
from jitllm.kernels.sample import (
    PAIR_BYTES,
    RECORD_BYTES,
    Field,
    move_history,
    move_to,
    tokens_in,
    unpack_top,
)
from jitllm.schedule.step import Span, SpanOutputs, SpanResult

TOP_BYTES = PAIR_BYTES * MAX_TOP_LOGPROBS
"""Room for the likeliest tokens of one output."""

_Output = tuple[int, int, float, float, int]
_OUTPUT = Struct(
    f"<{Field.TARGET}xi{Field.TOKEN - Field.TARGET - 4}xiff"
    f"{Field.NUM_TOP - Field.TARGET_LOGPROB - 4}xI{RECORD_BYTES - Field.NUM_TOP - 4}x"
)
"""Of a record: TARGET, TOKEN, TOKEN_LOGPROB, TARGET_LOGPROB, NUM_TOP."""


def results(spans: Sequence[Span], outcome: Outcome) -> tuple[SpanResult, ...]:
    """What an outcome says of each span of its step."""
    outputs = list(_OUTPUT.iter_unpack(outcome.records))
    found, row = [], 0
    for span in spans:
        stop = row + span.num_outputs
        found.append(_result(span, outputs[row:stop], row, outcome.tops))
        row = stop
    return tuple(found)


def _result(span: Span, outputs: Sequence[_Output], row: int, tops: bytes) -> SpanResult:
    """row: the first of its outputs in the step."""
    if not outputs:
        return SpanResult(span.sequence, None, 0.0)
    _, token, logprob, _, num_top = outputs[-1]
    if span.outputs is SpanOutputs.LAST and not num_top:  # as nearly always
        return SpanResult(span.sequence, token if span.sample else None, logprob)
    found = [_top(tops, row + at, num_top) for at in range(len(outputs) if num_top else 0)]
    known = [target_logprob for target, _, _, target_logprob, _ in outputs if target >= 0]
    wants_prompt = span.outputs is SpanOutputs.ALL
    return SpanResult(
        span.sequence,
        token if span.sample else None,
        logprob,
        prompt_logprobs=tuple(known) if wants_prompt else (),
        top_logprobs=found[-1] if span.sample and found else (),
        prompt_top_logprobs=tuple(found[: len(known)]) if wants_prompt else (),
    )


def _top(tops: bytes, row: int, num_top: int) -> TopLogprobs:
    start = TOP_BYTES * row
    return unpack_top(tops[start : start + PAIR_BYTES * num_top])


def outcome_of(
    runner: Runner, spans: Sequence[Span], seats: Sequence[Seat], *, is_short: bool
) -> Outcome:
    """A copy of what the step gave that was run."""
    return _copied(runner, *_counts(spans, seats), is_short)


def _counts(spans: Sequence[Span], seats: Sequence[Seat]) -> tuple[int, int]:
    """Outputs of a step, and how many of them have likeliest tokens: all, if any has."""
    num_outputs = sum(span.num_outputs for span in spans)
    wants_top = any(seat.num_top(span) for seat, span in zip(seats, spans, strict=True))
    return num_outputs, num_outputs if wants_top else 0


def _copied(runner: Runner, num_outputs: int, num_tops: int, is_short: bool) -> Outcome:
    records = bytes(runner.records[: RECORD_BYTES * num_outputs])
    return Outcome(records, bytes(runner.tops[: TOP_BYTES * num_tops]), is_short)


class Decode:
    """Steps after a first one that was written down and samples for every sequence.

    seats: of the spans. num_left: steps that there is room for after the first. describe: writes
    any step down. is_short: see `Outcome`.
    """

    def __init__(
        self,
        runner: Runner,
        spans: Sequence[Span],
        seats: Sequence[Seat],
        num_left: int,
        describe: Callable[[tuple[Span, ...]], None],
        *,
        is_short: bool,
    ) -> None:
        self._runner = runner
        self._seats = seats
        self._num_left = num_left
        self._describe = describe
        self._is_short = is_short
        self._first: Sequence[Span] | None = spans  # while it is the last one that was run
        self._untold: list[list[int]] = []  # tokens of the last steps that no history has
        self._go_by(spans)

    def _go_by(self, spans: Sequence[Span]) -> None:
        """Where what belongs to each sequence is in the step that was written last."""
        self._sequences = [span.sequence for span in spans]
        self._starts = [span.start for span in spans]
        self._positions = [span.stop - 1 for span in spans]
        self._outputs = [stop - 1 for stop in accumulate(span.num_outputs for span in spans)]
        self._num_outputs, self._num_tops = _counts(spans, self._seats)
        self._penalised = [
            (row, seat) for row, seat in enumerate(self._seats) if seat.sampling.penalises
        ]

    def outcome(self) -> Outcome:
        """A copy of what the step gave that was run."""
        return _copied(self._runner, self._num_outputs, self._num_tops, self._is_short)

    @property
    def rows(self) -> Iterator[tuple[int, int]]:
        """Sequences of the step that was written last, and the first position of each in it."""
        return zip(self._sequences, self._starts, strict=True)

    @property
    def computed(self) -> dict[int, int]:
        """Positions of each sequence that there are after the step that was run."""
        stops = (position + 1 for position in self._positions)
        return dict(zip(self._sequences, stops, strict=True))

    def advance(self, outcome: Outcome) -> bool:
        """Write the step down that goes on from an outcome; False if a sequence ends with that, or
        needs a page."""
        if not self._num_left:
            return False
        tokens = self._tokens(outcome.records)
        if any(token in seat.stop_ids for token, seat in zip(tokens, self._seats, strict=True)):
            return False
        self._num_left -= 1
        if self._first is not None:
            pairs = zip(self._first, tokens, strict=True)
            spans = tuple(span.next(token) for span, token in pairs)
            self._describe(spans)
            self._go_by(spans)
            self._first = None
        else:
            self._positions = self._starts = [position + 1 for position in self._positions]
            self._write(tokens)
        return True

    def settle(self) -> None:
        """Tell every sequence's history the tokens of all steps that were written down."""
        count = len(self._untold)
        for row, (position, seat) in enumerate(zip(self._positions, self._seats, strict=True)):
            ids = array("i", [tokens[row] for tokens in self._untold])
            seat.memory.write(position + 1 - count, ids)
        self._untold.clear()

    def _tokens(self, records: bytes) -> list[int]:
        """The id that was drawn for each sequence: that of its last output."""
        tokens = tokens_in(records)
        return [tokens[output] for output in self._outputs]

    def _write(self, tokens: list[int]) -> None:
        """Row i is token i and output i, as it was in the step before."""
        step, records, count = self._runner.step, self._runner.records, len(tokens)
        step.tokens[:count] = array("i", tokens)
        step.positions[:count] = array("i", self._positions)
        move_to(records, array("Q", [position + 1 for position in self._positions]))
        self._untold.append(tokens)
        if self._penalised:
            self.settle()
            for row, seat in self._penalised:
                move_history(records, row, *seat.history(self._positions[row]))
