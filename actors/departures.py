"""How sequences leave the devices: at their end, to be parked, or with a device that died.

Knows queues and what the devices have of each sequence. Decides nothing about who goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from actors.mailbox import Stopped
from actors.park import Parker
from actors.queues import Queues
from actors.relocate import Mover
from actors.reply import Reply
from actors.route import Route
from actors.seam import Seam
from jitllm.engine import Finish, ParkedIn
from jitllm.errors import HistoryError, JitllmError
from jitllm.log import logger
from jitllm.schedule.sequence import Sequence

MAX_LOSSES = 2
"""Deaths of a device that a request survives."""

_log = logger(__name__)


class Departures:
    """See above. came_free: called when there may be room. falls_back: requests survive the death
    of a device."""

    def __init__(
        self,
        queues: Queues,
        route: Route,
        mover: Mover,
        parker: Parker,
        seam: Seam,
        came_free: Callable[[], None],
        *,
        falls_back: bool,
    ) -> None:
        self._queues = queues
        self._route = route
        self._mover = mover
        self._parker = parker
        self._seam = seam
        self._came_free = came_free
        self._falls_back = falls_back
        self.num_losses = 0
        """Losses that sequences began again after."""
        self.recovery_s = 0.0
        """Until devices could go on, the last time."""

    async def end(self, reply: Reply, finish: Finish, error: Exception | None = None) -> None:
        """Give a sequence's place back, and hand out the last delta of its reply."""
        await self.close((reply,))
        self._queues.finish(reply, finish, error)

    async def close(self, replies: Iterable[Reply]) -> None:
        """Give the places of sequences on the devices back."""
        gone = [reply.sequence for reply in replies]
        await self.vacate([sequence for sequence in gone if sequence in self._queues.running])
        for queue in (self._queues.waiting, self._queues.held):
            queue[:] = [sequence for sequence in queue if sequence not in gone]

    async def vacate(self, gone: Seq[Sequence], queue: list[Sequence] | None = None) -> None:
        """Sequences run no more; they wait in a queue from now on, if there is one for them."""
        if not gone:
            return
        for sequence in gone:
            self._queues.running.remove(sequence)
            if queue is not None:
                queue.append(sequence)
        self._came_free()
        try:
            await self._route.close(*(sequence.id for sequence in gone))
        except Stopped as error:
            await self.recover(error)
        for sequence in gone:
            self._seam.came_free(sequence.num_computed)

    async def park(
        self, sequence: Sequence, to: ParkedIn, queue: list[Sequence], *, is_slice: bool = False
    ) -> None:
        """Between two steps, put the history of a sequence that runs away, and it into a queue.

        Raises what hinders it; then it runs on, or begins again if a device died of it.
        """
        async with self._mover.without(sequence.id):
            try:
                await self._parker.store(sequence, to, is_slice=is_slice)
            except Stopped as error:
                await self.recover(error)
                raise
            await self.vacate((sequence,), queue)

    async def part_with(self, error: HistoryError) -> None:
        """Those of whom something cannot be read begin again, and who has no room ends."""
        for sequence in [s for s in self._queues.running if s.id in error.sequences]:
            reply = self._queues.replies[sequence.id]
            reply.losses += 1
            if error.is_lost and self._falls_back and reply.losses <= MAX_LOSSES:
                _log.warning("%s; a sequence begins again", error)
                await self.vacate((sequence,), self._queues.waiting)
                sequence.restart()
                self._mover.fell_back(sequence.id, 0)
            else:
                await self.end(reply, Finish.ERROR, error)

    async def recover(self, error: JitllmError, *others: Sequence) -> None:
        """What a device had computed is gone; it is computed again, from the tokens.

        others: sequences that it was occupied with besides those that run. A sequence that was
        there too often when a device died may be why.
        """
        began_s = time.perf_counter()
        lost = [*self._queues.running, *others]
        _log.warning("%s; %d sequences begin again", error, len(lost))
        self._queues.running.clear()
        self._came_free()
        fatal: JitllmError | None = None if self._falls_back else error
        try:
            await self._route.recover()
        except JitllmError as last:  # and so nothing can be computed any more
            fatal = last
            lost += [s for s in (*self._queues.waiting, *self._queues.held) if s not in lost]
            self._queues.held.clear()
        for sequence in lost:
            reply = self._queues.replies[sequence.id]
            reply.losses += 1
            if self._parker.get(sequence.id) is None:  # else nothing of it was lost
                sequence.restart()
            self._mover.fell_back(sequence.id, 0)
            if sequence in self._queues.waiting:
                self._queues.waiting.remove(sequence)
            if fatal is not None or reply.losses > MAX_LOSSES:
                self._queues.finish(reply, Finish.ERROR, fatal or error)
        self._queues.waiting[:0] = [s for s in lost if s.id in self._queues.replies]
        self.num_losses += 1
        self.recovery_s = time.perf_counter() - began_s
