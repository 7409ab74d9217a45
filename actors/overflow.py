"""Keys and values of a device beyond their budget: when they leave memory, and when they come back.

What is read and written is so in the device's compute thread, between two steps or, for the passes
of attention, within one. Knows sequences, positions and pages. Without a budget there is nothing to
do.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar

from actors.messages.device import Piece
from jitllm.devices.host import Pass
from jitllm.engine import KvSpill
from jitllm.errors import HistoryError, JitllmError
from jitllm.log import logger
from jitllm.memory.pages import KvPages
from jitllm.memory.passes import Row

R = TypeVar("R")

_log = logger(__name__)


class Overflow:
    """See above. compute: the thread that computes. halt: has it rest. is_lost: whether an error
    means that the device is gone, which nobody here can mend."""

    def __init__(
        self,
        pages: KvPages,
        compute: Executor,
        halt: Callable[[], Awaitable[None]],
        is_lost: Callable[[Exception], bool],
    ) -> None:
        self._is_lost = is_lost
        self._pages = pages
        self._compute = compute
        self._halt = halt

    @property
    def totals(self) -> KvSpill:
        """What was read and written so far, and what is in the file."""
        spill = self._pages.spill
        return KvSpill(self._pages.spilled_bytes, spill.bytes_read, spill.bytes_written)

    async def fit(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Have all sets that a step writes in memory, and of the others what has room there.

        spans: (sequence, first position, end). Raises `HistoryError` for a file that fails: of the
        sequences with something in it, or where it takes no more, of the longest one.
        """
        spill, pages = self._pages.spill, self._pages
        if spill.has_room(pages.columns):
            return
        written = {page_set for span in spans for page_set in pages.sets(*span)}
        if back := sorted(written.intersection(spill.parted)):
            with self._losing(sequence for sequence, _, _ in spans):
                await self._do(partial(spill.bring_back, back, pages.columns))
            pages.rewrite(frozenset(back))
        try:
            await self._put_surplus_away(written, {span[0]: span[1] for span in spans})
        except JitllmError as error:
            if self._is_lost(error):
                raise
            longest = max((sequence for sequence, _, _ in spans), key=pages.num_taken)
            raise HistoryError((longest,), error, is_lost=False) from error

    @contextmanager
    def _losing(self, sequences: Iterable[int]) -> Iterator[None]:
        """Within it the file is read for sequences."""
        try:
            yield
        except JitllmError as error:
            if self._is_lost(error):
                raise
            parted = self._pages.spill.parted
            lost = (s for s in sequences if not parted.isdisjoint(self._pages.sets(s)))
            raise HistoryError(tuple(lost), error, is_lost=True) from error

    async def fit_around(self, pieces: Iterable[Piece]) -> None:
        """Have in memory what has room there; what pieces are about stays. Raises `JitllmError`."""
        if not self._pages.spill.has_room(self._pages.columns):
            await self._put_surplus_away(self._sets(pieces), {})

    async def _put_surplus_away(self, wanted: set[int], starts: Mapping[int, int]) -> None:
        """starts: see `KvPages.seen`."""
        spill, pages = self._pages.spill, self._pages
        columns = pages.columns
        gone = spill.surplus(wanted, columns)
        if gone and not spill.keeps_idle:
            pages.shrink(0)
            gone = spill.surplus(wanted, columns)
        if not gone:
            return
        try:
            if spill.window and (unseen := spill.whole - wanted - pages.seen(spill.window, starts)):
                await self._do(partial(spill.narrow, sorted(unseen), columns))
                gone = spill.surplus(wanted, columns)
            await self._do(partial(spill.put_away, gone, columns))
        except JitllmError as error:
            # What is only kept is given up before a reply is.
            if self._is_lost(error) or not pages.give_up_idle():
                raise
            await self._do(spill.reclaim)
            rest = spill.surplus(wanted, columns)
            gone = [*gone, *rest]
            await self._do(partial(spill.put_away, rest, columns))
            _log.warning("%s; prefixes that were kept are given up", error)
        finally:
            pages.rewrite(frozenset(gone))

    def _sets(self, pieces: Iterable[Piece], first: int = 0) -> set[int]:
        return {
            page_set
            for piece in pieces
            for page_set in self._pages.sets(piece.sequence, max(piece.start, first), piece.stop)
        }

    @asynccontextmanager
    async def at_hand(
        self, blocks: Iterable[int], pieces: Iterable[Piece], *, is_written: bool, first: int = 0
    ) -> AsyncIterator[None]:
        """Within it, pages of pieces are in memory, from position `first` on.

        is_written: what they hold at its end is what they shall hold. Raises `JitllmError`.
        """
        spill = self._pages.spill
        parted = spill.parted
        sets = self._sets(pieces, first).intersection(parted) if parted else set()
        absent = frozenset((s, block) for s in sets for block in blocks if spill.is_away(s, block))
        if not absent:
            yield
            return
        await self._do(partial(spill.bring, absent))
        try:
            yield
        finally:
            await self._do(partial(spill.put, absent, is_written=is_written))

    def passes(self, rows: Iterable[tuple[int, int]], blocks: range) -> Generator[Pass, None, None]:
        """The passes of a step's attention, none where all that it looks at is in memory; see
        `Spilling.passes`. rows: sequences, and the first position of each that is computed. Raises
        `HistoryError`."""
        spill, pages = self._pages.spill, self._pages
        if spill.parted:
            looking = {sequence: Row(pages.sets(sequence), start) for sequence, start in rows}
            with self._losing(looking):
                yield from spill.passes(list(looking.values()), blocks, pages.set_bytes)

    async def _do(self, work: Callable[[], R]) -> R:
        """In the compute thread, while no step runs there."""
        await self._halt()
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)
