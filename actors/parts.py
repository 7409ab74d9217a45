"""A reply in parts: who answers puts one after the other, who follows takes them.

Knows two ends in one process. Knows no actor and no wire: where the ends are in two processes, each
has a `Parts` of its own, and frames carry what one has to the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Self, TypeVar

P = TypeVar("P")


def _ignore() -> None:
    """What is called when nobody listens."""


class Parts(Generic[P]):
    """A reply that is followed; its handler makes it, and goes on to put parts after it returned.

    left: called when who followed leaves before the end: it closed its iterator, was cancelled, or
    its process is gone. Parts are immutable. They wait until they are taken, any number of them: a
    reader that is slow, or stuck, is waited for with memory, so put no more than has an end.
    """

    def __init__(self, left: Callable[[], None] = _ignore) -> None:
        self._left = left
        self._waiting: deque[P] = deque()
        self._has_ended = False
        self._was_left = False
        self._error: BaseException | None = None
        self._changed: Callable[[], None] = _ignore
        self._turn: asyncio.Future[None] | None = None  # of who waits for a part
        self._sending = threading.Lock()
        self._num_sent = 0  # by another thread, and not here yet
        self._carry: Callable[[P], None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it ended, failed, or was left. Parts may still wait to be taken."""
        return self._has_ended or self._was_left

    # --- who answers -------------------------------------------------------------------------

    def put(self, part: P) -> None:
        """The next part. Dropped when who followed has left; `ValueError` after the end."""
        if self._is_open():
            self._waiting.append(part)
            self._tell()

    def send(self, part: P, loop: asyncio.AbstractEventLoop) -> None:
        """`put`, from another thread than that of the event loop in which all else happens."""
        with self._sending:
            if self._carry is not None:
                self._carry(part)
                return
            self._num_sent += 1
        loop.call_soon_threadsafe(self._arrive, part)

    def _arrive(self, part: P) -> None:
        with self._sending:
            self._num_sent -= 1
        self.put(part)

    def end(self) -> None:
        """There are no more parts. `ValueError` when it had an end already."""
        if self._is_open():
            self._has_ended = True
            self._tell()

    def fail(self, error: BaseException) -> None:
        """After the parts so far, raise `error` in who follows. `ValueError` after the end."""
        if self._is_open():
            self._error = error
            self.end()

    # --- who follows -------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> P:
        """The next part, once it is there. Raises what the reply failed with."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopAsyncIteration
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn
        return self._waiting.popleft()

    def leave(self) -> None:
        """Take no more; the actor is told, unless it was over. Twice is as good as once."""
        self._waiting.clear()
        with self._sending:
            self._carry = None
        if not self.is_over:
            self._was_left = True
            self._tell()
            self._left()

    # --- who passes it on --------------------------------------------------------------------

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` at every part and at the end, in place of who was called before."""
        self._changed = changed

    def shortcut(self, carry: Callable[[P], None]) -> None:
        """Have `carry` take what another thread sends from now on, in that thread: no event loop
        need wake up for it. Not while anything that came before is still to be taken."""
        with self._sending:
            if not (self._num_sent or self._waiting or self.is_over):
                self._carry = carry

    def take(self) -> list[P]:
        """All parts that wait."""
        parts = list(self._waiting)
        self._waiting.clear()
        return parts

    @property
    def error(self) -> BaseException | None:
        """What it failed with, once it did."""
        return self._error

    def _tell(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None and not turn.done():
            turn.set_result(None)
        self._changed()

    def _is_open(self) -> bool:
        if self._has_ended:
            raise ValueError("a reply that has ended was to get another part or end")
        return not self._was_left
