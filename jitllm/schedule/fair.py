"""Time slices: who makes way when there is no room for keys and values of one who waits.

A level says how fair: 0 serves whoever came first until it is done; from 1 to 100, slices get
shorter and priorities count for less. A slice is never so short that putting histories away and
bringing them back would take more than a share of the time. Knows sequences, counts and seconds.
Reads no clock, and moves nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jitllm.schedule import plan
from jitllm.schedule.sequence import MIN_PROMISED_TOKENS, Sequence

MAX_LEVEL = 100

LONGEST_TOKENS = 256
"""A slice at level 1."""
SHORTEST_TOKENS = 8
"""A slice at level 100."""

MOST_TIMES = 8.0
"""A slice at level 1 takes so many times what it takes to swap all rows; at level 100, once."""

LONGEST_HEAD_START_S = 60.0
"""What high priority is ahead of others at level 1."""
SHORTEST_HEAD_START_S = 1.0
"""The same at level 100."""


@dataclass(frozen=True, slots=True)
class Fairness:
    """Time slices of one level, 0 to 100."""

    level: int = 0

    @property
    def has_slices(self) -> bool:
        """Whether anybody ever makes way."""
        return self.level > 0

    @property
    def head_start_s(self) -> float:
        """How much earlier a request of high priority seems to have come."""
        return LONGEST_HEAD_START_S + self._share * (SHORTEST_HEAD_START_S - LONGEST_HEAD_START_S)

    def quantum_tokens(self, num_rows: int, swap_s: float, step_s: float) -> int:
        """Tokens of a reply that a sequence gets before it has to make way.

        swap_s: what parking a sequence and bringing it back take. step_s: what a step takes. Both
        are 0 before anything is known of them.
        """
        tokens = _between(LONGEST_TOKENS, SHORTEST_TOKENS, self._share)
        times = _between(MOST_TIMES, 1.0, self._share)
        pays_at = times * num_rows * swap_s / step_s if step_s > 0 else 0.0
        return max(round(tokens), math.ceil(pays_at))

    def urgency(self, sequence: Sequence) -> tuple[float, ...]:
        """What waiting sequences are ordered by, the most urgent one first.

        With slices by how long they have waited; those of high priority have a head start.
        """
        if not self.has_slices:
            return plan.urgency(sequence)
        since_s = self._since_s(sequence, sequence.queued_s)
        return not sequence.is_overdue, since_s, sequence.id

    def victims(
        self,
        waiting: Sequence,
        running: Seq[Sequence],
        missing_tokens: float,
        quantum_tokens: int,
        now_s: float,
    ) -> tuple[Sequence, ...]:
        """Who should make way for `waiting`; nobody, if those who can would not make enough room.

        missing_tokens: positions that there is no room for. Who has had its slice of a reply makes
        way, lowest priority and longest served first, unless it would be the next one to come back.
        """
        if not self.has_slices:
            return ()
        able = [
            sequence
            for sequence in running
            if sequence.is_replying
            and sequence.num_served >= quantum_tokens
            and self._is_ahead(waiting, sequence, now_s)
        ]
        chosen: list[Sequence] = []
        for sequence in sorted(able, key=lambda s: (s.is_high, -s.num_served, s.id)):
            if missing_tokens <= 0:
                break
            stay = [other for other in running if other is not sequence and other not in chosen]
            missing_tokens -= _freed_tokens(sequence, stay)
            chosen.append(sequence)
        return tuple(chosen) if missing_tokens <= 0 else ()

    def _is_ahead(self, waiting: Sequence, running: Sequence, now_s: float) -> bool:
        """Whether `waiting` would be admitted before `running`, if that one waited from now on."""
        since_s = self._since_s(waiting, waiting.queued_s)
        return waiting.is_overdue or since_s < self._since_s(running, now_s)

    def _since_s(self, sequence: Sequence, queued_s: float) -> float:
        return queued_s - (self.head_start_s if sequence.is_high else 0.0)

    @property
    def _share(self) -> float:
        """The way from level 1 to level 100, in [0, 1]."""
        return (max(self.level, 1) - 1) / (MAX_LEVEL - 1)


def _between(first: float, last: float, share: float) -> float:
    """The way from one to the other in equal factors."""
    return first * math.exp(share * math.log(last / first))


def _freed_tokens(sequence: Sequence, stay: Iterable[Sequence]) -> int:
    """Positions whose room is free once a sequence has gone; those that others may share stay."""
    promised = sequence.num_prompt + sequence.num_before + MIN_PROMISED_TOKENS
    held = max(min(promised, sequence.max_tokens), sequence.num_tokens)
    shared = max((_num_common(sequence.tokens, other.tokens) for other in stay), default=0)
    return held - shared


def _num_common(tokens: Seq[int], others: Seq[int]) -> int:
    """Leading tokens that two sequences have in common."""
    lengths = range(1, min(len(tokens), len(others)) + 1)
    return bisect_left(lengths, True, key=lambda n: tokens[:n] != others[:n])
