"""Page sets that go to a file where a budget has no room for them.

A set keeps its addresses wherever its content is; what is in the file has no memory behind them.
Blocks with a window never look at the oldest
pages of a history again, so those of them go first, while the rest of their sets stays.

For attention, pages of one block come to where they belong, are looked at and go, while those of
the next pass are on their way. Knows sets, columns and a file. Knows no tokens. What reads and
writes is for the thread that computes.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait

from jitllm.devices.host import Pass
from jitllm.memory.columns import Columns
from jitllm.memory.page_file import PageFile
from jitllm.memory.page_memory import VirtualPages
from jitllm.memory.passes import Row, Stretch, stretches
from jitllm.memory.spilling import PASSING_PART, Pages, Spilling

NUM_IN_FLIGHT = 8
"""Reads at once."""

READ_BYTES = 512 << 10
"""Most bytes of a read, unless a page has more."""

MAX_PASSING_BYTES = 16 << 20
"""More at once would not be faster."""

MAX_AHEAD = 3
"""Passes whose pages are read while those of one are looked at."""


class Spill(Spilling):
    """The sets of `memory` that are in use; those that go are in `file`. See `Spilling`."""

    def __init__(
        self,
        memory: VirtualPages,
        file: PageFile,
        budget_sets: int,
        page_tokens: int,
        windows: Sequence[int],
    ) -> None:
        super().__init__(budget_sets, page_tokens, windows)
        self._memory = memory
        self._file = file
        self.window = max(windows)
        self._windowed = frozenset(block for block, window in enumerate(windows) if window)
        self._narrow: set[int] = set()  # present but for those blocks
        self._readers = ThreadPoolExecutor(NUM_IN_FLIGHT, "jitllm kv")

    # --- which sets are where ----------------------------------------------------------------

    def give(self, page_set: int) -> None:
        """See `Spilling`."""
        was_away = bool(self.parted)
        super().give(page_set)
        self._narrow.discard(page_set)
        if was_away and not self.parted:
            self._file.clear()
            self.has_failed = False

    @property
    def parted(self) -> Set[int]:
        """See `Spilling`."""
        return self._spilled | self._narrow

    @property
    def whole(self) -> Set[int]:
        """See `Spilling`."""
        return self._present.keys() - self._narrow

    def is_away(self, page_set: int, column: int) -> bool:
        """See `Spilling`."""
        is_narrow = page_set in self._narrow and column in self._windowed
        return is_narrow or super().is_away(page_set, column)

    def away_bytes(self, sets: Set[int], layout: Columns, columns: Collection[int]) -> int:
        """See `Spilling`."""
        num_narrow = len(self._narrow & sets)
        narrow_bytes = num_narrow * layout.num_bytes(self._windowed.intersection(columns))
        return narrow_bytes + super().away_bytes(sets, layout, columns)

    def _num_whole(self, columns: Collection[int]) -> float:
        return len(self._present) - len(self._narrow) * (1 - self._narrow_part(columns))

    def _part(self, page_set: int, columns: Collection[int]) -> float:
        return self._narrow_part(columns) if page_set in self._narrow else 1.0

    def _narrow_part(self, columns: Collection[int]) -> float:
        """What part of a set's memory blocks without a window have."""
        layout = self._memory.layout
        rest = frozenset(columns) - self._windowed
        return layout.num_bytes(rest) / max(layout.num_bytes(columns), 1)

    def narrow(self, sets: Iterable[int], columns: Collection[int]) -> None:
        """See `Spilling`."""
        windowed = self._windowed.intersection(columns)
        for page_set in sets:
            self._write((page_set, column) for column in windowed)
            self._memory.give(page_set, windowed)
            self._narrow.add(page_set)

    def put_away(self, sets: Iterable[int], columns: Collection[int]) -> None:
        """See `Spilling`. Raises `DiskFull` too."""
        for page_set in sets:
            here = [column for column in columns if not self.is_away(page_set, column)]
            self._write((page_set, column) for column in here)
            self._memory.give(page_set, here)
            self._narrow.discard(page_set)
            self._went(page_set)

    def reclaim(self) -> None:
        """See `Spilling`: room in the file is used again, and goes back once nothing is away."""
        self._file.keep_only(self.parted)

    def bring_back(self, sets: Iterable[int], columns: Collection[int]) -> None:
        """See `Spilling`."""
        for page_set in sets:
            away = (column for column in columns if self.is_away(page_set, column))
            self.bring(frozenset((page_set, column) for column in away))
            self._narrow.discard(page_set)
            if page_set in self._spilled:
                self._came(page_set)

    # --- single pages ------------------------------------------------------------------------

    def bring(self, pages: Pages) -> None:
        """See `Spilling`: they are in memory until `put`."""
        try:
            self._finish(self._begin(pages))
        except BaseException:
            self._release(pages)
            raise

    def put(self, pages: Pages, *, is_written: bool) -> None:
        """See `Spilling`."""
        try:
            if is_written:
                self._write(pages)
        finally:
            self._release(pages)

    def _begin(self, pages: Pages) -> list[Future[int]]:
        """Reads of pages, those of a column in neighbouring sets together."""
        reads: list[Future[int]] = []
        run: list[tuple[int, int]] = []
        for column, page_set in sorted((column, page_set) for page_set, column in pages):
            size = self._memory.layout.num_bytes((column,))
            is_next = run and run[-1] == (column, page_set - 1)
            if run and not (is_next and (len(run) + 1) * size <= READ_BYTES):
                reads.append(self._submit(run))
                run = []
            run.append((column, page_set))
        if run:
            reads.append(self._submit(run))
        return reads

    def _submit(self, run: list[tuple[int, int]]) -> Future[int]:
        column, first_set = run[0]
        addresses = [self._memory.address(page_set, column) for _, page_set in run]
        return self._readers.submit(self._file.read, first_set, column, addresses)

    def _finish(self, reads: Sequence[Future[int]]) -> None:
        wait(reads)
        try:
            for read in reads:
                self.bytes_read += read.result()
        except BaseException:
            self.has_failed = True
            raise

    def _write(self, pages: Iterable[tuple[int, int]]) -> None:
        for page_set, column in pages:
            address = self._memory.address(page_set, column)
            self.bytes_written += self._file.write(page_set, column, address)

    def _release(self, pages: Iterable[tuple[int, int]]) -> None:
        for page_set, column in pages:
            self._memory.give(page_set, (column,))

    # --- passes ------------------------------------------------------------------------------

    def passes(
        self, rows: Sequence[Row], blocks: Iterable[int], set_bytes: int
    ) -> Generator[Pass, None, None]:
        """See `Spilling`."""
        plans: dict[tuple[int, int], list[Stretch]] = {}
        passes: list[tuple[int, Stretch]] = []
        num_pages = {block: self._num_passing(block, set_bytes) for block in blocks}
        num_ahead = min(MAX_AHEAD, min(num_pages.values(), default=2) - 1)
        for block, count in num_pages.items():
            key = window, max_sets = self._windows[block], count // (num_ahead + 1)
            if key not in plans:
                plans[key] = stretches(
                    rows,
                    self.parted if window else self._spilled,
                    window=window,
                    page_tokens=self._page_tokens,
                    max_sets=max_sets,
                )
            if len(plans[key]) > 1:
                passes += ((block, stretch) for stretch in plans[key])
        return self._stream(passes, num_ahead)

    def _num_passing(self, block: int, set_bytes: int) -> int:
        """Pages of a block that may be in memory for a pass or on their way for those after it."""
        page_bytes = self._memory.layout.num_bytes((block,))
        passing_bytes = self.budget_sets // PASSING_PART * set_bytes
        return max(min(passing_bytes, MAX_PASSING_BYTES) // page_bytes, 2)

    def _stream(
        self, passes: list[tuple[int, Stretch]], num_ahead: int
    ) -> Generator[Pass, None, None]:
        """num_ahead: passes whose pages are on their way while one is computed, so that the disk
        always has something to do."""
        wanted = [frozenset((s, block) for s in stretch.sets) for block, stretch in passes]
        reads: list[list[Future[int]]] = []
        there: Pages = frozenset()  # or on their way
        try:
            for index, (block, stretch) in enumerate(passes):
                for pages in wanted[len(reads) : index + 1 + num_ahead]:
                    reads.append(self._begin(pages - there))
                    there |= pages
                self._finish(reads[index])
                yield Pass(block, stretch.ranges)
                gone = wanted[index].difference(*wanted[index + 1 : len(reads)])
                self._release(gone)
                there -= gone
        finally:
            wait(read for ones in reads for read in ones)  # or they would write into what is gone
            self._release(there)

    def close(self) -> None:
        """Give the file back; nothing is read any more."""
        self._readers.shutdown()
        self._file.close()
