"""The steps of a device that go on from one by themselves, a token for each sequence.

Runs in the thread that computes, between two native calls: whatever is done here keeps every core
of the device waiting. So the next step is written down where the one before was, nothing but ids
and positions changes, and what a step gave is copied as it is, to be read elsewhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct

from jitllm.devices.runner import Runner, SeatMemory
from jitllm.engine import MAX_TOP_LOGPROBS, Sampling
from jitllm.kernels.sample import PAIR_BYTES, RECORD_BYTES, Field, move_on
from jitllm.schedule.step import Span, SpanOutputs

TOP_BYTES = PAIR_BYTES * MAX_TOP_LOGPROBS
"""Room for the likeliest tokens of one output."""

_TOKEN = Struct("<i")


@dataclass(slots=True)
class Seat:
    """What the device keeps of a sequence: its history for penalties, and the room promised.

    memory: its ids and biases as the kernel reads them. num_published: page sets
    that others may share, and digest: the name of the last of them. shares: whether it takes part.
    namespace: what those names begin with.
    """

    sampling: Sampling
    logprobs: bool
    top_logprobs: int
    memory: SeatMemory
    max_tokens: int
    promised_tokens: int
    shares: bool
    num_published: int
    digest: bytes
    stop_ids: frozenset[int]
    namespace: bytes

    def num_top(self, span: Span) -> int:
        """Likeliest tokens to name at each output of a span."""
        has_logprobs = self.logprobs or span.outputs is SpanOutputs.ALL
        return self.top_logprobs if has_logprobs else 0

    def history(self, position: int) -> tuple[int, int]:
        """Address and number of the ids up to a position that penalties are for."""
        window = position + 1
        if self.sampling.repeat_last_n >= 0:
            window = min(self.sampling.repeat_last_n, window)
        return self.memory.history_at(position + 1 - window), window


@dataclass(frozen=True, slots=True)
class Outcome:
    """What sampling gave: a record for each output, and TOP_BYTES for each if anybody asked."""

    records: bytes | memoryview
    tops: bytes | memoryview


class Decode:
    """Steps after a first one that was written down and samples for every sequence.

    seats: of the spans. num_left: steps that there is room for after the first. describe: writes
    any step down. starts: the first position of each sequence in the step that was written last.
    """

    def __init__(
        self,
        runner: Runner,
        spans: Sequence[Span],
        seats: Sequence[Seat],
        num_left: int,
        describe: Callable[[tuple[Span, ...]], None],
    ) -> None:
        self._runner = runner
        self._spans: Sequence[Span] | None = spans  # of the first step, while it is the last one
        self._seats = seats
        self._num_left = num_left
        self._describe = describe
        self._positions = [span.stop - 1 for span in spans]
        self.starts = [span.start for span in spans]
        self._num_outputs = sum(span.num_outputs for span in spans)
        self._wants_top = any(s.num_top(span) for s, span in zip(seats, spans, strict=True))

    def outcome(self) -> Outcome:
        """A copy of what the step gave that was run."""
        records = bytes(self._runner.records[: RECORD_BYTES * self._num_outputs])
        top_bytes = TOP_BYTES * self._num_outputs if self._wants_top else 0
        return Outcome(records, bytes(self._runner.tops[:top_bytes]))

    def advance(self, outcome: Outcome) -> bool:
        """Write the step down that goes on from an outcome; False if a sequence ends with that, or
        needs a page."""
        if not self._num_left:
            return False
        tokens = self._tokens(outcome.records)
        if any(token in seat.stop_ids for token, seat in zip(tokens, self._seats, strict=True)):
            return False
        self._num_left -= 1
        self._positions = self.starts = [position + 1 for position in self._positions]
        if self._spans is not None:
            pairs = zip(self._spans, tokens, strict=True)
            self._describe(tuple(span.next(token) for span, token in pairs))
            self._spans, self._num_outputs = None, len(tokens)
        else:
            self._write(tokens)
        return True

    def _tokens(self, records: bytes | memoryview) -> list[int]:
        """The id that was drawn for each sequence: that of its last output."""
        output = -1
        tokens: list[int] = []
        counts = [1] * len(self._seats)
        if self._spans is not None:
            counts = [span.num_outputs for span in self._spans]
        for count in counts:
            output += count
            tokens += _TOKEN.unpack_from(records, RECORD_BYTES * output + Field.TOKEN)
        return tokens

    def _write(self, tokens: list[int]) -> None:
        """Row i is token i and output i, as it was in the step before."""
        step, records, count = self._runner.step, self._runner.records, len(tokens)
        step.tokens[:count] = ids = array("i", tokens)
        step.positions[:count] = array("i", self._positions)
        for row, (position, seat) in enumerate(zip(self._positions, self._seats, strict=True)):
            seat.memory.write(position, ids[row : row + 1])
            move_on(records, row, position + 1, *seat.history(position))
