"""Keys and values larger than their budget: which page sets are in memory, and which are away.

The sets that came first go first. As every step looks at all of a history, what stays in memory
stays, and a step brings what is not there once, in passes (`jitllm.memory.passes`): pages of one
block come, are looked at and go. Where sets go to is for `spill.py` (a file) and `host_spill.py`
(memory of the host, for a device that has its own) to say; without a budget nothing ever goes.
Knows sets and columns. Knows no tokens. What moves bytes is for the thread that computes.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence, Set
from typing import ClassVar

from jitllm.devices.host import Pass
from jitllm.memory.columns import Columns
from jitllm.memory.passes import Row

PASSING_PART = 4
"""One part in so many of a budget that does not hold everything is for pages that pass through."""

Pages = frozenset[tuple[int, int]]
"""Pages of single blocks: (set, column)."""


UNBOUNDED = 1 << 62
"""More sets than there can be."""


class Spilling:
    """The sets that are in use; here all of them are in memory, in what derives from it some are
    away. budget_sets: most of them that are in memory. windows: of each block, 0 for all keys.
    has_failed: something could not be brought, so what is away is good for nobody who can do
    without."""

    keeps_idle: ClassVar[bool] = True
    """Whether sets that are only kept for sequences to come may be away."""

    def __init__(
        self, budget_sets: int = UNBOUNDED, page_tokens: int = 0, windows: Sequence[int] = ()
    ) -> None:
        self.budget_sets = budget_sets
        self._page_tokens = page_tokens
        self._windows = tuple(windows)
        self.has_failed = False
        self._present: dict[int, None] = {}  # the one that came first is the first one
        self._spilled: set[int] = set()
        self.window = 0
        """Most positions that blocks with a window show, where what they do not show goes first."""
        self.bytes_read = 0
        self.bytes_written = 0

    @property
    def spilled(self) -> Collection[int]:
        """The sets that are away."""
        return self._spilled

    @property
    def parted(self) -> Set[int]:
        """The sets of which anything is away."""
        return self._spilled

    @property
    def whole(self) -> Set[int]:
        """The sets of which nothing is away."""
        return self._present.keys()

    def is_away(self, page_set: int, column: int) -> bool:
        """Whether a page is."""
        return page_set in self._spilled

    def away_bytes(self, sets: Set[int], layout: Columns, columns: Collection[int]) -> int:
        """What of sets is away. columns: that are held of each set."""
        return len(self._spilled & sets) * layout.num_bytes(columns)

    @property
    def kept_sets(self) -> int:
        """How many stay in memory where the budget does not hold all."""
        return self.budget_sets - max(self.budget_sets // PASSING_PART, 1)

    def take(self, page_set: int) -> None:
        """A set is in use from now on, and in memory."""
        self._present[page_set] = None

    def give(self, page_set: int) -> None:
        """A set is not in use any more."""
        self._present.pop(page_set, None)
        self._spilled.discard(page_set)

    def has_room(self, columns: Collection[int]) -> bool:
        """Whether everything is in memory, and may be."""
        return not self.parted and self._num_whole(columns) <= self.budget_sets

    def surplus(self, wanted: Collection[int], columns: Collection[int]) -> list[int]:
        """Sets that have to go, so that what is in memory fits; none of those that are `wanted`.

        columns: that are held of each set.
        """
        if self.has_room(columns):
            return []
        excess = self._num_whole(columns) - self.kept_sets
        gone: list[int] = []
        for page_set in self._present:
            if excess <= 0:
                break
            if page_set not in wanted:
                gone.append(page_set)
                excess -= self._part(page_set, columns)
        return gone

    def _num_whole(self, columns: Collection[int]) -> float:
        """Whole sets that take as much as what is in memory."""
        return len(self._present)

    def _part(self, page_set: int, columns: Collection[int]) -> float:
        """What part of a set that is present is in memory."""
        return 1.0

    def narrow(self, sets: Iterable[int], columns: Collection[int]) -> None:
        """Put away what of sets only blocks with a window look at. Raises as `put_away` does."""

    def check(self, sets: Collection[int]) -> None:
        """What must hold at every moment; sets: those that are in use."""
        assert self._spilled.isdisjoint(self._present)
        assert self._spilled.union(self._present) == set(sets)

    def _went(self, page_set: int) -> None:
        del self._present[page_set]
        self._spilled.add(page_set)

    def _came(self, page_set: int) -> None:
        self._spilled.remove(page_set)
        self._present[page_set] = None

    def put_away(self, sets: Iterable[int], columns: Collection[int]) -> None:
        """Put sets away, and give their memory back. Raises `JitllmError`: those that could not go
        stay."""

    def reclaim(self) -> None:
        """Give back what sets take that are not away any more, where that was left for later."""

    def bring_back(self, sets: Iterable[int], columns: Collection[int]) -> None:
        """Bring sets, to stay in memory. Raises `JitllmError`."""

    def bring(self, pages: Pages) -> None:
        """Have pages of spilled sets at hand until `put`, where `KvPages.page` says. Raises
        `JitllmError`: then none is."""

    def put(self, pages: Pages, *, is_written: bool) -> None:
        """Let them go; is_written: what they hold now is what they shall hold."""

    def passes(
        self, rows: Sequence[Row], blocks: Iterable[int], set_bytes: int
    ) -> Generator[Pass, None, None]:
        """The passes of a step's blocks, in order; of blocks that need one only there is none.

        Each is asked for when the one before it is computed; close the iterator. set_bytes: what a
        set takes of memory here. Raises `JitllmError`.
        """
        yield from ()
