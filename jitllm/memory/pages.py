"""KV pages of one device: which sequence holds which, and the tables that kernels read.

A page set holds one page of every block of the device for the same positions of a sequence; it is
the unit that is taken and given back. Pages are virtual until they are written, so a set costs
what it holds. Knows addresses and counts. Knows no tensors, no sequences' tokens, no budget.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_ALIGN = 64


@dataclass(slots=True)
class Table:
    """A sequence's ordered page sets. `entries` is what kernels read: u64 [sets][blocks]."""

    entries: array[int]
    sets: list[int] = field(default_factory=list)

    @property
    def address(self) -> int:
        """Address of the first entry."""
        return self.entries.buffer_info()[0]


class KvPages:
    """The page sets of a device.

    page_bytes: bytes of one page of each block. base: address of `capacity` sets of virtual
    memory. release(offset, length) gives memory under freed sets back to the system.
    """

    def __init__(
        self,
        base: int,
        page_bytes: Sequence[int],
        page_tokens: int,
        capacity: int,
        release: Callable[[int, int], None],
    ) -> None:
        self.page_tokens = page_tokens
        self.capacity = capacity
        self._base = base
        self._release = release
        self._offsets = array("Q")
        offset = 0
        for size in page_bytes:
            self._offsets.append(offset)
            offset += -(-size // _ALIGN) * _ALIGN
        self.set_bytes = set_bytes(page_bytes)
        self._free = list(range(capacity - 1, -1, -1))
        self._tables: dict[int, Table] = {}

    @property
    def num_free(self) -> int:
        """Sets that nobody holds."""
        return len(self._free)

    @property
    def held_bytes(self) -> int:
        """Bytes of the sets that sequences hold."""
        return (self.capacity - len(self._free)) * self.set_bytes

    def open(self, sequence: int, max_tokens: int) -> None:
        """Give a sequence an empty table for up to `max_tokens` positions."""
        if sequence in self._tables:
            raise ValueError(f"sequence {sequence} has a page table already")
        slots = -(-max_tokens // self.page_tokens) * len(self._offsets)
        self._tables[sequence] = Table(array("Q", bytes(8 * slots)))

    def grow(self, sequence: int, num_tokens: int) -> bool:
        """Take the sets that `num_tokens` positions need; False, and nothing taken, if too few
        are free."""
        table = self._tables[sequence]
        need = -(-num_tokens // self.page_tokens) - len(table.sets)
        if need > len(self._free):
            return False
        for _ in range(need):
            self._append(table, self._free.pop())
        return True

    def _append(self, table: Table, page_set: int) -> None:
        start = self._base + page_set * self.set_bytes
        at = len(table.sets) * len(self._offsets)
        entries = array("Q", [start + offset for offset in self._offsets])
        table.entries[at : at + len(entries)] = entries
        table.sets.append(page_set)

    def table_address(self, sequence: int) -> int:
        """Address of a sequence's entries."""
        return self._tables[sequence].address

    def close(self, sequence: int) -> None:
        """Give a sequence's sets back. Unknown sequences hold nothing."""
        table = self._tables.pop(sequence, None)
        if table is None:
            return
        for page_set in table.sets:
            self._release(page_set * self.set_bytes, self.set_bytes)
        self._free.extend(reversed(table.sets))

    def check(self) -> None:
        """Every set is free or held, once."""
        held = [s for table in self._tables.values() for s in table.sets]
        assert sorted([*held, *self._free]) == list(range(self.capacity))


def set_bytes(page_bytes: Sequence[int]) -> int:
    """Bytes of one page set: every block's page, aligned; whole system pages in all."""
    total = sum(-(-size // _ALIGN) * _ALIGN for size in page_bytes)
    return -(-total // 4096) * 4096
