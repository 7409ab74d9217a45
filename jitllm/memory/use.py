"""What was read: in each phase of the work, and of experts that come one by one.

Knows phases, bytes and a clock. Knows no block and no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Literal, get_args


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """What paging experts one by one did since the engine started.

    room_bytes: what the budget holds of them. all_bytes: what all of them would take. resident,
    held_bytes: those that are there. hits, reads: those that steps needed and found there, and
    those that had to be read. bytes_read: for these. read_s: time that reads took, overlapping or
    not. wait_s: time that steps waited.
    """

    room_bytes: int = 0
    all_bytes: int = 0
    resident: int = 0
    held_bytes: int = 0
    hits: int = 0
    reads: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    wait_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The part of the needed ones that was there; 0 where none was needed."""
        return self.hits / max(self.hits + self.reads, 1)

    def plus(self, other: ExpertUse) -> ExpertUse:
        """Together with another pager's."""
        return ExpertUse(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )


Phase = Literal["load", "prompt", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Before the first step; steps with a part of a prompt; steps with a token of each reply."""


@dataclass(frozen=True, slots=True)
class PhaseUse:
    """What was read in one phase of the work.

    bytes_read: from the container. requests: reads of a block, an expert or the dense region.
    faults: what steps had to wait for. seconds: while something was being read. tokens: those that
    the phase computed.
    """

    bytes_read: int = 0
    requests: int = 0
    faults: int = 0
    seconds: float = 0.0
    tokens: int = 0

    @property
    def bytes_per_token(self) -> float:
        """0 where no token was computed."""
        return self.bytes_read / self.tokens if self.tokens else 0.0

    @property
    def bytes_per_second(self) -> float:
        """While something was being read; 0 where nothing was."""
        return self.bytes_read / self.seconds if self.seconds > 0 else 0.0

    def plus(self, other: PhaseUse) -> PhaseUse:
        """Together with another pager's."""
        return PhaseUse(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )


@dataclass(slots=True)
class _Count:
    num_bytes: int = 0
    requests: int = 0
    faults: int = 0
    seconds: float = 0.0
    num_open: int = 0
    since_s: float = 0.0


class ReadUse:
    """Counts reads under the phase in which they began; `phase` is the present one."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.phase: Phase = "load"
        self._clock = clock
        self._counts = {phase: _Count() for phase in PHASES}

    def fault(self, number: int = 1) -> None:
        """A step has to wait for something that it needs."""
        self._counts[self.phase].faults += number

    def begin(self) -> Phase:
        """A read begins; under which phase it is to be ended."""
        count = self._counts[self.phase]
        if not count.num_open:
            count.since_s = self._clock()
        count.num_open += 1
        count.requests += 1
        return self.phase

    def end(self, phase: Phase, num_bytes: int) -> None:
        """A read is over, in which so many bytes came; none if it failed."""
        count = self._counts[phase]
        count.num_bytes += num_bytes
        count.num_open -= 1
        if not count.num_open:
            count.seconds += self._clock() - count.since_s

    @property
    def phases(self) -> dict[Phase, PhaseUse]:
        """All of it; tokens are not known here."""
        return {
            phase: PhaseUse(count.num_bytes, count.requests, count.faults, count.seconds)
            for phase, count in self._counts.items()
        }
