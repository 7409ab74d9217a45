"""The queue of an actor: ordered, bounded, and countable.

Knows items and who waits. Knows no actor. Order is the order in which `put` was called, also among
those who wait for room: a mailbox that is full delays a sender and never reorders it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from jitllm.errors import JitllmError

T = TypeVar("T")


class Stopped(JitllmError):
    """An actor takes no messages any more, or stopped before it answered."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} has stopped", "open the engine again")
        self.name = name


class Lost(Stopped):
    """The process of an actor ended, or does not move, before it answered.

    Whether it did what it was asked is not known. A later message finds the actor that took its
    place, if one did.
    """

    def __init__(self, name: str, problem: str = "its process ended") -> None:
        super().__init__(name)
        self.problem = f"{name} was lost: {problem}"


@dataclass(frozen=True, slots=True)
class MailboxStatistics:
    """A mailbox at one moment."""

    num_queued: int
    """Messages that were put and not yet taken."""
    max_queued: int
    """Where senders begin to wait."""
    num_waiting: int
    """Senders that wait for room."""
    peak_queued: int
    """The most messages that were ever queued."""
    num_put: int
    """Messages that were ever put."""
    is_closed: bool


class Mailbox(Generic[T]):
    """One actor takes, any number of senders put."""

    def __init__(self, name: str, max_queued: int) -> None:
        if max_queued < 1:
            raise ValueError(f"a mailbox of {max_queued} holds nothing")
        self.name = name
        self._max_queued = max_queued
        self._queued: deque[T] = deque()
        self._senders: deque[tuple[asyncio.Future[None], T]] = deque()
        self._taker: asyncio.Future[None] | None = None
        self._peak_queued = 0
        self._num_put = 0
        self._is_closed = False

    async def put(self, item: T) -> None:
        """Queue `item`, after waiting for room if there is none.

        Raises `Stopped` when the mailbox is closed or gets closed meanwhile. Cancelled while it
        waits, it takes `item` back, unless room for it came in that same moment.
        """
        if self.offer(item):  # then nobody waits either
            return
        turn = asyncio.get_running_loop().create_future()
        self._senders.append((turn, item))
        try:
            await turn
        except asyncio.CancelledError:
            self._senders = deque(entry for entry in self._senders if entry[0] is not turn)
            raise

    def offer(self, item: T) -> bool:
        """Queue `item` if there is room. Raises `Stopped` when the mailbox is closed."""
        if self._is_closed:
            raise Stopped(self.name)
        if len(self._queued) >= self._max_queued:
            return False
        self._queue(item)
        return True

    async def take(self) -> T:
        """The oldest message, when there is one; cancelled, it leaves the mailbox as it was.

        Raises `Stopped` once the mailbox is closed. Only one task takes.
        """
        while not self._queued:
            if self._is_closed:
                raise Stopped(self.name)
            self._taker = asyncio.get_running_loop().create_future()
            try:
                await self._taker
            finally:
                self._taker = None
        item = self._queued.popleft()
        while self._senders and len(self._queued) < self._max_queued:
            turn, waiting = self._senders.popleft()
            if not turn.done():  # a sender that gave up is on its way out
                self._queue(waiting)
                turn.set_result(None)
        return item

    def close(self, error: Stopped | None = None) -> list[T]:
        """Refuse what comes from now on and what waits for room; what was queued, in order.

        error: what those who wait for room get, by default `Stopped`.
        """
        self._is_closed = True
        left, self._queued = list(self._queued), deque()
        for turn, _ in self._senders:
            if not turn.done():
                turn.set_exception(error or Stopped(self.name))
        self._senders.clear()
        self._wake_taker()
        return left

    def statistics(self) -> MailboxStatistics:
        """Counts of this moment."""
        return MailboxStatistics(
            num_queued=len(self._queued),
            max_queued=self._max_queued,
            num_waiting=len(self._senders),
            peak_queued=self._peak_queued,
            num_put=self._num_put,
            is_closed=self._is_closed,
        )

    def _queue(self, item: T) -> None:
        self._queued.append(item)
        self._num_put += 1
        self._peak_queued = max(self._peak_queued, len(self._queued))
        self._wake_taker()

    def _wake_taker(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)
