"""Where KV pages lie: what a device's page sets are made of.

On the host all sets lie in one reservation, whose addresses cost nothing until they are written to.
A device without virtual memory of its own has pages only where some are held.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from jitllm.memory.columns import Columns


class Entries(Protocol):
    """A sequence's page table, u64 [sets][blocks], where kernels of the device read it."""

    @property
    def address(self) -> int:
        """Of the first entry."""
        ...

    def write(self, start: int, entries: array[int]) -> None:
        """Set the entries from `start` on."""
        ...

    def __getitem__(self, index: int) -> int: ...

    def close(self) -> None:
        """Nobody reads it any more."""
        ...


class PageMemory(Protocol):
    """The memory of page sets, by number. layout: what each column of a set takes."""

    layout: Columns

    def entries(self, count: int) -> Entries | None:
        """Room for a page table, or None where there is none."""
        ...

    def take(self, page_set: int, columns: Iterable[int]) -> bool:
        """Have memory for these columns of a set; False, and nothing taken, if there is none."""
        ...

    def address(self, page_set: int, column: int) -> int:
        """Of a page that is held."""
        ...

    def places(self, page_set: int, index: int) -> array[int]:
        """What a table says of a set at an index of it: where kernels find the page of every
        column; anything where there is none."""
        ...

    def give(self, page_set: int, columns: Iterable[int]) -> None:
        """Give the memory of these columns of a set back."""
        ...


class HostEntries:
    """A page table that the CPU reads where it is."""

    def __init__(self, count: int) -> None:
        self._entries = array("Q", bytes(8 * count))
        self.address = self._entries.buffer_info()[0]

    def write(self, start: int, entries: array[int]) -> None:
        """See `Entries`."""
        self._entries[start : start + len(entries)] = entries

    def __getitem__(self, index: int) -> int:
        return self._entries[index]

    def close(self) -> None:
        """See `Entries`."""


class VirtualPages:
    """Sets of address space at `base`, one after the other: their memory comes when it is written.

    page_bytes: bytes of one page of each block. release(offset, length) gives memory behind `base`
    back to the system.
    """

    def __init__(
        self, base: int, page_bytes: Sequence[int], release: Callable[[int, int], None]
    ) -> None:
        self.layout = Columns(page_bytes)
        self._base = base
        self._release = release
        self._runs: dict[frozenset[int], list[tuple[int, int]]] = {}

    def entries(self, count: int) -> HostEntries:
        """See `PageMemory`."""
        return HostEntries(count)

    def take(self, page_set: int, columns: Iterable[int]) -> bool:
        """See `PageMemory`."""
        return True

    def address(self, page_set: int, column: int) -> int:
        """See `PageMemory`."""
        return self._base + page_set * self.layout.stride_bytes + self.layout.offsets[column]

    def places(self, page_set: int, index: int) -> array[int]:
        """See `PageMemory`."""
        start = self._base + page_set * self.layout.stride_bytes
        return array("Q", [start + offset for offset in self.layout.offsets])

    def give(self, page_set: int, columns: Iterable[int]) -> None:
        """See `PageMemory`."""
        start = page_set * self.layout.stride_bytes
        for offset, length in self._layout_runs(frozenset(columns)):
            self._release(start + offset, length)

    def _layout_runs(self, columns: frozenset[int]) -> list[tuple[int, int]]:
        if columns not in self._runs:
            self._runs = {columns: list(self.layout.runs(columns))}  # mostly the same ones again
        return self._runs[columns]
