"""Columns of KV pages that are on their way, and how far each page set is filled in with them.

While a block moves, another device computes it; its keys and values come in pieces, and what holds
the pages here has to know how much of them is there. Every set counts its leading positions, for
all columns on their way together. Knows numbers of sets and of columns. Knows no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Arrivals:
    """The columns on their way, and the sets that lack some of them."""

    def __init__(self, page_tokens: int) -> None:
        self.columns: frozenset[int] = frozenset()
        self._page_tokens = page_tokens
        self._filled: dict[int, int] = {}  # leading positions of each set that lacks something

    @property
    def sets(self) -> frozenset[int]:
        """The sets that lack something."""
        return frozenset(self._filled)

    def __contains__(self, page_set: int) -> bool:
        return page_set in self._filled

    def expect(self, columns: Iterable[int], sets: Iterable[int]) -> None:
        """More columns come, which all of these sets lack.

        One count is kept for all columns, so what came before of others comes once more.
        """
        self.columns = self.columns.union(columns)
        self._filled = dict.fromkeys(sets, 0)

    def take(self, page_set: int) -> None:
        """A set was taken, and nothing is in it."""
        if self.columns:
            self._filled[page_set] = 0

    def forget(self, page_set: int) -> None:
        """A set was given back."""
        self._filled.pop(page_set, None)

    def fill(self, sets: Sequence[int], stop: int) -> None:
        """Positions below `stop` of a table of sets are there."""
        for index, page_set in enumerate(sets):
            if page_set in self._filled:
                num_filled = min(stop - index * self._page_tokens, self._page_tokens)
                self._filled[page_set] = max(self._filled[page_set], num_filled)
                if num_filled == self._page_tokens:
                    del self._filled[page_set]

    def missing(self, sets: Sequence[int]) -> int:
        """The first position of a table of sets that is not there."""
        for index, page_set in enumerate(sets):
            if page_set in self._filled:
                return index * self._page_tokens + self._filled[page_set]
        return len(sets) * self._page_tokens

    def end(self, columns: Iterable[int]) -> None:
        """These columns do not come any more: they are there, or are not wanted."""
        self.columns = self.columns.difference(columns)
        if not self.columns:
            self._filled.clear()

    def check(self) -> None:
        """What must hold at every moment."""
        assert self.columns or not self._filled
        assert all(0 <= n < self._page_tokens for n in self._filled.values()), self._filled
