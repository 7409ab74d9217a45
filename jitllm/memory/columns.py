"""Where the page of each block lies inside a page set, and what some blocks' pages take.

Every page begins at a system page, so that the memory of one block can be given back alone. Knows
offsets and sizes. Knows no addresses and no sets.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from jitllm.devices.memory import round_up


class Columns:
    """The pages of all blocks, one after the other. page_bytes: bytes of one page of each."""

    def __init__(self, page_bytes: Sequence[int]) -> None:
        self._bytes = [round_up(size) for size in page_bytes]
        *offsets, self.stride_bytes = accumulate(self._bytes, initial=0)
        """Bytes of address space from one set to the next."""
        self.offsets = array("Q", offsets)

    def __len__(self) -> int:
        return len(self.offsets)

    def checked(self, columns: Iterable[int]) -> frozenset[int]:
        """The same columns; raises `ValueError` for one that no block has."""
        chosen = frozenset(columns)
        if not chosen.issubset(range(len(self))):
            raise ValueError(f"columns {sorted(chosen)} of {len(self)} blocks")
        return chosen

    def num_bytes(self, columns: Iterable[int]) -> int:
        """Memory that these columns take in a set."""
        return sum(self._bytes[column] for column in columns)

    def runs(self, columns: Iterable[int]) -> Iterator[tuple[int, int]]:
        """(offset, length) of the memory of columns, neighbours together."""
        start = stop = 0
        for column in sorted(columns):
            if self.offsets[column] != stop:
                if start < stop:
                    yield start, stop - start
                start = self.offsets[column]
            stop = self.offsets[column] + self._bytes[column]
        if start < stop:
            yield start, stop - start
