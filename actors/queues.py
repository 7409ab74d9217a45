"""The sequences of a scheduler: which of them run, wait or are held back, and the reply of each.

Knows requests and queues. Knows no device and no step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from actors.reply import Reply
from jitllm.engine import Delta, Finish, SequenceState
from jitllm.errors import UnknownSession
from jitllm.schedule.sequence import Sequence


class Queues:
    """See above. ended: told the number of a sequence whose reply is over."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self.replies: dict[int, Reply] = {}
        """By the number of the sequence."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.held: list[Sequence] = []
        """Parked, until somebody wants them to go on."""
        self.cancelled: set[int] = set()
        """Whose clients have gone."""
        self.refused_tokens: int | None = None
        """The least that there was no room for; who waits and needs as much waits on."""

    def add(self, reply: Reply) -> None:
        """A request has come. It waits, or is held where others of its name are."""
        name = reply.request.name
        is_held = bool(name) and any(self.name_of(sequence) == name for sequence in self.held)
        self.replies[reply.sequence.id] = reply
        (self.held if is_held else self.waiting).append(reply.sequence)

    def name_of(self, sequence: Sequence) -> str:
        """What its request is called."""
        return self.replies[sequence.id].request.name

    def named(self, name: str) -> list[Sequence]:
        """The sequences of a request. Raises `UnknownSession` when there are none."""
        found = [
            reply.sequence
            for reply in self.replies.values()
            if name and reply.request.name == name and not reply.is_done
        ]
        if not found:
            raise UnknownSession(name)
        return found

    def state_of(self, sequence: Sequence) -> SequenceState:
        """Which queue it is in."""
        if sequence in self.running:
            return SequenceState.RUNNING
        return SequenceState.PARKED if sequence in self.held else SequenceState.WAITING

    def resume(self, sequences: Iterable[Sequence]) -> None:
        """Those of them that are parked wait for their turn from now on."""
        for sequence in sequences:
            if sequence in self.held:
                self.held.remove(sequence)
                sequence.queued_s = time.perf_counter()
                self.waiting.append(sequence)

    def under_way(self) -> list[Reply]:
        """The replies that are not over."""
        return [reply for reply in self.replies.values() if not reply.is_done]

    def push(self, reply: Reply, delta: Delta) -> None:
        """Hand a delta to the client; one with a finish is the last."""
        reply.deltas.put(delta)
        reply.is_done = delta.finish is not None
        if reply.is_done:
            reply.deltas.end()
            self.replies.pop(reply.sequence.id, None)
            self._ended(reply.sequence.id)

    def finish(self, reply: Reply, finish: Finish, error: Exception | None = None) -> None:
        """Hand out the last delta of a reply."""
        usage = reply.usage(time.perf_counter())
        self.push(reply, Delta(finish=finish, usage=usage, error=error))
