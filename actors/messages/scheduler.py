"""What a scheduler is asked, and what it answers: requests, moves, sessions."""

from __future__ import annotations

from dataclasses import dataclass

from actors.actor import Message
from actors.parts import Parts
from jitllm.engine import Delta, Moved, ParkedIn, Request, SchedulerStats, SessionState
from jitllm.schedule.placement_map import PlacementMap


@dataclass(frozen=True, slots=True)
class Arranged:
    """The moves that a map took, in order."""

    moves: tuple[Moved, ...]


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sequences under way, in order of arrival."""

    states: tuple[SessionState, ...]


@dataclass(frozen=True, slots=True)
class Submit(Message[Parts[Delta]]):
    """Queue a request; its reply comes in deltas, as they become known.

    Refused with an error, before the first of them, when it cannot be served at all. Who follows no
    more ends the request between two steps, in whatever state it is.
    """

    request: Request


@dataclass(frozen=True, slots=True)
class Move(Message[Moved]):
    """Move blocks, and the head if asked, to a device while replies go on.

    is_live: copy ahead of the hand-over; otherwise replies stand still all the time. Refused with
    `PlacementError`; nothing has changed then.
    """

    blocks: tuple[int, ...]
    to: str
    head: bool = False
    is_live: bool = True


@dataclass(frozen=True, slots=True)
class Arrange(Message[Arranged]):
    """Go from the present placement to what a map makes of it, while replies go on.

    strict: all of it or nothing, refused with `PlacementError`; otherwise what cannot be is noted.
    """

    wanted: PlacementMap
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Park(Message[Sessions]):
    """Let the sequences of a request wait without pages, until they are resumed.

    Answered once their keys and values are where they wait. Refused with `UnknownSession`.
    """

    name: str
    to: ParkedIn = "disk"


@dataclass(frozen=True, slots=True)
class Resume(Message[Sessions]):
    """Let the sequences of a request go on when it is their turn."""

    name: str


@dataclass(frozen=True, slots=True)
class SessionsRequest(Message[Sessions]):
    """Say which sequences are under way."""


@dataclass(frozen=True, slots=True)
class Rebudget(Message[None]):
    """Change what the model may take on each host."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Drain(Message[None]):
    """Refuse requests from now on, or take them again; those that are here go on."""

    is_draining: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerStatsRequest(Message[SchedulerStats]):
    """Say what runs."""


SchedulerMessage = (
    Submit
    | Move
    | Arrange
    | Park
    | Resume
    | SessionsRequest
    | Rebudget
    | Drain
    | SchedulerStatsRequest
)
