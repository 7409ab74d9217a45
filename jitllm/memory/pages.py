"""KV pages of one device: which sequences hold which, and the tables that kernels read.

A page set holds one page of every block of the device for the same positions of a sequence; it is
the unit that is taken and given back. A set that is full is never written again, so sequences that
begin alike share it, and it is kept for those to come (`jitllm.memory.prefix`) until its room is
needed. Pages are virtual until they are written, so a set costs what it holds. Knows addresses and
counts. Knows no tensors, no sequences' tokens, no budget.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jitllm.memory.prefix import PrefixIndex

_ALIGN = 64

# every set is one of
#   free    nobody holds it, its memory is given back
#   held    in the tables of one sequence or more; in the index too, once it is full
#   idle    in the index only


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
        self._holders: Counter[int] = Counter()
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Sets that a sequence can take: free ones, and those that would be given up for it."""
        return len(self._free) + self._index.num_idle

    @property
    def held_bytes(self) -> int:
        """Bytes of the sets that sequences hold; a set that several hold counts once."""
        return len(self._holders) * self.set_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of the sets that are kept for sequences to come."""
        return self._index.num_idle * self.set_bytes

    def open(self, sequence: int, max_tokens: int, digests: Sequence[bytes] = ()) -> int:
        """Give a sequence a table for up to `max_tokens` positions.

        It begins with the sets of the longest prefix of `digests` that exists; returns how many
        positions those hold.
        """
        if sequence in self._tables:
            raise ValueError(f"sequence {sequence} has a page table already")
        slots = self.num_sets(max_tokens) * len(self._offsets)
        table = self._tables[sequence] = Table(array("Q", bytes(8 * slots)))
        for page_set in self._index.find(digests):
            if page_set not in self._holders:
                self._index.hold(page_set)
            self._append(table, page_set)
        return len(table.sets) * self.page_tokens

    def grow(self, sequence: int, num_tokens: int) -> bool:
        """Take the sets that `num_tokens` positions need; False, and nothing taken, if too few
        are free."""
        table = self._tables[sequence]
        need = self.num_sets(num_tokens) - len(table.sets)
        if need > self.num_free:
            return False
        for _ in range(need):
            if not self._free:
                self._reclaim()
            self._append(table, self._free.pop())
        return True

    def publish(self, sequence: int, index: int, digest: bytes) -> None:
        """The set at `index` of a sequence's table is full; `digest` names what it holds."""
        self._index.publish(digest, self._tables[sequence].sets[index])

    def num_sets(self, num_tokens: int) -> int:
        """Sets that so many positions need."""
        return -(-num_tokens // self.page_tokens)

    def num_taken(self, sequence: int) -> int:
        """Sets in a sequence's table."""
        return len(self._tables[sequence].sets)

    def table_address(self, sequence: int) -> int:
        """Address of a sequence's entries."""
        return self._tables[sequence].address

    def close(self, sequence: int) -> None:
        """Give a sequence's sets back. Unknown sequences hold nothing."""
        table = self._tables.pop(sequence, None)
        if table is None:
            return
        # Backwards, so that what builds on a set is given up before it.
        for page_set in reversed(table.sets):
            self._holders[page_set] -= 1
            if self._holders[page_set]:
                continue
            del self._holders[page_set]
            if page_set in self._index:
                self._index.leave(page_set)
            else:
                self._give_back(page_set)

    def shrink(self, max_idle_bytes: int) -> None:
        """Give up idle sets until they take no more than that."""
        while self.idle_bytes > max_idle_bytes:
            self._reclaim()

    def _append(self, table: Table, page_set: int) -> None:
        start = self._base + page_set * self.set_bytes
        at = len(table.sets) * len(self._offsets)
        entries = array("Q", [start + offset for offset in self._offsets])
        table.entries[at : at + len(entries)] = entries
        table.sets.append(page_set)
        self._holders[page_set] += 1

    def _reclaim(self) -> None:
        page_set = self._index.reclaim()
        assert page_set is not None, "nothing is idle"
        self._give_back(page_set)

    def _give_back(self, page_set: int) -> None:
        self._release(page_set * self.set_bytes, self.set_bytes)
        self._free.append(page_set)

    def check(self) -> None:
        """Every set is free, held or idle; tables, counts and index agree."""
        self._index.check()
        held = Counter(s for table in self._tables.values() for s in table.sets)
        assert held == self._holders, (held, self._holders)
        idle = self._index.idle()
        assert sorted([*held, *idle, *self._free]) == list(range(self.capacity))
        assert all(s in held or s in idle or s not in self._index for s in range(self.capacity))


def set_bytes(page_bytes: Sequence[int]) -> int:
    """Bytes of one page set: every block's page, aligned; whole system pages in all."""
    total = sum(-(-size // _ALIGN) * _ALIGN for size in page_bytes)
    return -(-total // 4096) * 4096
