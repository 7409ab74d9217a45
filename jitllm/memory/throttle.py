"""Work on many bytes that takes a share of the time only: in pieces, with pauses between them.

Knows bytes and seconds. Knows no file and no memory. One thread works; any other may hurry it, or
have it give up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import perf_counter

PIECE_BYTES = 256 << 10
"""What is done between two pauses: a fraction of a millisecond."""
HURRIED_PIECE_BYTES = 8 << 20
"""What is done at once where nobody wants pauses: enough to keep many reads in flight."""


class Abandoned(Exception):
    """The work was given up between two pieces."""


class Throttle:
    """How one piece of work takes its time."""

    def __init__(self, share: float = 1.0) -> None:
        """share: the part of the time, in (0, 1], that may be worked. Raises `ValueError`."""
        if not 0 < share <= 1:
            raise ValueError(f"a share of {share} is not in (0, 1]")
        self._pauses = 1 / share - 1
        self._wake = threading.Event()
        self._is_abandoned = False
        if share == 1:
            self.hurry()
        self.busy_s = 0.0
        """Seconds that were worked so far."""

    def hurry(self) -> None:
        """No more pauses: somebody waits for it."""
        self._wake.set()

    def abandon(self) -> None:
        """Give up before the next piece; what is done already stays done."""
        self._is_abandoned = True
        self._wake.set()

    def pieces(self, num_bytes: int) -> Iterator[range]:
        """`[0, num_bytes)` in pieces, each to be done before the next one is asked for.

        Raises `Abandoned` in place of a piece. The pause after the last piece is kept too: work
        that follows has its share with it.
        """
        start = 0
        while start < num_bytes:
            if self._is_abandoned:
                raise Abandoned
            size = HURRIED_PIECE_BYTES if self._wake.is_set() else PIECE_BYTES
            piece = range(start, min(start + size, num_bytes))
            began_s = perf_counter()
            yield piece
            took_s = perf_counter() - began_s
            self.busy_s += took_s
            self._wake.wait(min(took_s * self._pauses, threading.TIMEOUT_MAX))
            start = piece.stop
