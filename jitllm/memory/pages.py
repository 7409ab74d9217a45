"""KV pages of one device: which sequences hold which, and the tables that kernels read.

A page set has a page of every block of the model for the same positions of a sequence; it is the
unit that is taken and given back. A set that is full is never written again, so sequences that
begin alike share it, and it is kept for those to come (`jitllm.memory.prefix`) until its room is
needed. A block's pages in all sets are its *column*; only the columns of some blocks are held here,
and a set costs what those take. When a block comes, its column is held while its history comes in
(`jitllm.memory.arrivals`); when it goes, the column is dropped. Where pages lie is for
`jitllm.memory.page_memory` to say. Knows addresses and counts. Knows no tensors, no sequences'
tokens, no budget.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from jitllm.errors import OverBudget
from jitllm.memory.arrivals import Arrivals
from jitllm.memory.page_memory import Entries, PageMemory
from jitllm.memory.prefix import PrefixIndex
from jitllm.memory.spilling import Spilling

# every set is one of
#   free    nobody holds it, its memory is given back
#   held    in the tables of one sequence or more; in the index too, once it is full
#   idle    in the index only
# a held set may lack positions of columns that are on their way; then it is not in the index
# with a budget, what a held or an idle set contains may be in a file (`jitllm.memory.spilling`)


@dataclass(slots=True)
class Table:
    """A sequence's ordered page sets. `entries` is what kernels read: u64 [sets][blocks].

    It has an entry for every block, also for those whose column is not held.
    """

    entries: Entries
    sets: list[int] = field(default_factory=list)


class KvPages:
    """The page sets of a device: at most `capacity`.

    columns: the blocks whose columns are held, by default all. spill: where sets go that a budget
    has no room for. set_bytes: what a set takes of memory.
    """

    def __init__(
        self,
        memory: PageMemory,
        page_tokens: int,
        capacity: int,
        columns: Iterable[int] | None = None,
        spill: Spilling | None = None,
    ) -> None:
        self.spill = Spilling() if spill is None else spill
        self.page_tokens = page_tokens
        self.capacity = capacity
        self._memory = memory
        self._all = memory.layout
        self._hold_only(range(len(self._all)) if columns is None else columns)
        self._free = list(range(capacity - 1, -1, -1))
        self._tables: dict[int, Table] = {}
        self._holders: Counter[int] = Counter()
        self._index = PrefixIndex()
        self._arrivals = Arrivals(page_tokens)
        self._dropped: deque[tuple[int, frozenset[int]]] = deque()  # memory that is still to go

    @property
    def columns(self) -> frozenset[int]:
        """The blocks whose columns are held."""
        return self._columns

    @property
    def num_free(self) -> int:
        """Sets that a sequence can take: free ones, and those that would be given up for it."""
        return len(self._free) + self._index.num_idle

    @property
    def num_held(self) -> int:
        """Pages, of all columns, that sequences hold; one that several hold counts once."""
        return len(self._holders) * len(self._columns)

    @property
    def num_sets_held(self) -> int:
        """Sets that sequences hold."""
        return len(self._holders)

    def column_bytes(self, columns: Iterable[int]) -> int:
        """What these columns take in a set."""
        return self._all.num_bytes(columns)

    @property
    def held_bytes(self) -> int:
        """Memory of the sets that sequences hold; a set that several hold counts once."""
        return self._memory_of(self._holders.keys())

    @property
    def idle_bytes(self) -> int:
        """Memory of the sets that are kept for sequences to come."""
        return self._memory_of(self._index.idle())

    @property
    def spilled_bytes(self) -> int:
        """What is in a file in place of memory."""
        return self.spill.away_bytes(self.spill.parted, self._all, self._columns)

    def _memory_of(self, sets: Set[int]) -> int:
        away_bytes = self.spill.away_bytes(sets, self._all, self._columns)
        return len(sets) * self.set_bytes - away_bytes

    def promised_bytes(self, num_more: int) -> int:
        """Memory that sequences take once they hold so many sets more: a budget at the most, or the
        set of each that it writes to."""
        most = max(self.spill.budget_sets, len(self._tables))
        return min(len(self._holders) + num_more, most) * self.set_bytes

    def beyond_bytes(self, num_more: int) -> int:
        """What is away then, because a budget does not hold it."""
        num_sets = len(self._holders) + num_more
        if num_sets <= self.spill.budget_sets:
            return self.spilled_bytes
        return max((num_sets - self.spill.kept_sets) * self.set_bytes, self.spilled_bytes)

    def open(self, sequence: int, max_tokens: int, digests: Sequence[bytes] = ()) -> int:
        """Give a sequence a table for up to `max_tokens` positions.

        It begins with the sets of the longest prefix of `digests` that exists; returns how many
        positions those hold. Raises `OverBudget` where there is no memory for the table.
        """
        if sequence in self._tables:
            raise ValueError(f"sequence {sequence} has a page table already")
        slots = self.num_sets(max_tokens) * len(self._all)
        if (entries := self._memory.entries(slots)) is None:
            raise OverBudget(f"page table of {max_tokens} positions", 8 * slots, 0)
        table = self._tables[sequence] = Table(entries)
        for page_set in self._index.find(digests):
            if self.spill.has_failed and page_set in self.spill.parted:
                break  # it is computed again
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
        taken: list[int] = []
        while len(taken) < need:
            if (page_set := self._take()) is None:
                for one in taken:
                    self._give_back(one)
                return False
            taken.append(page_set)
        for page_set in taken:
            self._arrivals.take(page_set)
            self._append(table, page_set)
        return True

    def publish(self, sequence: int, index: int, digest: bytes) -> None:
        """The set at `index` of a sequence's table is full; `digest` names what it holds.

        Nothing happens while it lacks something, nor when it was published before.
        """
        page_set = self._tables[sequence].sets[index]
        if page_set not in self._arrivals:
            self._index.publish(digest, page_set)

    def num_sets(self, num_tokens: int) -> int:
        """Sets that so many positions need."""
        return -(-num_tokens // self.page_tokens)

    def num_taken(self, sequence: int) -> int:
        """Sets in a sequence's table."""
        return len(self._tables[sequence].sets)

    def sets(self, sequence: int, start: int = 0, stop: int | None = None) -> list[int]:
        """The sets of a sequence's table that have positions of [start, stop), in order; by default
        all of them."""
        last = None if stop is None else self.num_sets(stop)
        return self._tables[sequence].sets[start // self.page_tokens : last]

    def seen(self, window: int, starts: Mapping[int, int]) -> set[int]:
        """The sets that some sequence looks at through a window.

        starts: the first position that is computed next of sequences that are computed; of others
        it is one in their last set.
        """
        found: set[int] = set()
        for sequence, table in self._tables.items():
            last = max(len(table.sets) - 1, 0) * self.page_tokens
            first = max(starts.get(sequence, last) + 1 - window, 0)
            found.update(table.sets[first // self.page_tokens :])
        return found

    def table_address(self, sequence: int) -> int:
        """Address of a sequence's entries."""
        return self._tables[sequence].entries.address

    def page(self, sequence: int, index: int, column: int) -> int:
        """Address of a block's page at `index` of a sequence's table. Raises `ValueError` where
        there is none."""
        table = self._tables[sequence]
        if column not in self._columns or not 0 <= index < len(table.sets):
            raise ValueError(f"sequence {sequence} has no page {index} of block {column}")
        return self._memory.address(table.sets[index], column)

    def close(self, sequence: int) -> None:
        """Give a sequence's sets back. Unknown sequences hold nothing."""
        table = self._tables.pop(sequence, None)
        if table is None:
            return
        table.entries.close()
        # Backwards, so that what builds on a set is given up before it.
        for page_set in reversed(table.sets):
            self._holders[page_set] -= 1
            if self._holders[page_set]:
                continue
            del self._holders[page_set]
            if page_set in self._index and self._may_idle(page_set):
                self._index.leave(page_set)
            else:
                self._index.forget(page_set)
                self._give_back(page_set)

    def _may_idle(self, page_set: int) -> bool:
        return self.spill.keeps_idle or page_set not in self.spill.spilled

    def shrink(self, max_idle_bytes: int) -> None:
        """Give up idle sets until they take no more than that."""
        while self.idle_bytes > max_idle_bytes:
            self._reclaim()

    def give_up_idle(self) -> bool:
        """Give up idle sets, also those that are in a file; whether there were any."""
        had_some = self._index.num_idle > 0
        while self._index.num_idle:
            self._reclaim()
        return had_some

    # --- columns that come and go ------------------------------------------------------------
    #
    # A column on its way is computed elsewhere, and sequences go on meanwhile. Of each of them
    #   [0, missing)           is there
    #   [missing, computed)    has to be filled in, at the latest between two steps
    #   [computed, ...)        is computed elsewhere until `adopt`, and here from then on

    def hold(self, columns: Iterable[int]) -> bool:
        """Hold these columns too; False, and nothing held, where there is no memory for them.

        They are on their way from now on.

        Every set lacks them, those that are taken later as well, until their positions are filled
        in or the columns adopted. Sets that sequences shared, or that were kept for others, are
        not found any more. Columns that are held already stay as they are.
        """
        added = self._all.checked(columns) - self._columns
        if not added:
            return True
        self.clear()
        for page_set in self._index.clear():
            self._give_back(page_set)
        taken: list[int] = []
        for page_set in self._holders:
            if not self._memory.take(page_set, added):
                for one in taken:
                    self._memory.give(one, added)
                return False
            taken.append(page_set)
        self._hold_only(self._columns | added)
        self._arrivals.expect(added, self._holders)
        for table in self._tables.values():
            for index, page_set in enumerate(table.sets):
                self._write(table, index, page_set)
        return True

    def missing(self, sequence: int) -> int:
        """The first position of a sequence that columns on their way lack.

        Where nothing is lacking it is the first one beyond the table.
        """
        return self._arrivals.missing(self._tables[sequence].sets)

    def fill(self, sequence: int, stop: int) -> None:
        """Positions of a sequence below `stop` are filled in, in all columns on their way."""
        self._arrivals.fill(self._tables[sequence].sets, stop)

    def adopt(self, columns: Iterable[int]) -> None:
        """These columns are computed here from now on.

        All positions that exist have to be filled in before: what is still to come of a set is
        written by steps of this device. Columns that were not on their way stay as they are.
        """
        self._arrivals.end(columns)

    def drop(self, columns: Iterable[int]) -> None:
        """Hold these columns no more, also when they are still on their way.

        Their memory goes with `clear`. What is shared or kept stays good for the columns that
        remain. Columns that are not held are passed over.
        """
        dropped = self._columns.intersection(columns)
        if dropped:
            sets = (*self._holders, *self._index.idle())
            self._dropped += ((page_set, dropped) for page_set in sets)
        self._arrivals.end(dropped)
        self._hold_only(self._columns - dropped)

    def clear(self, most_bytes: int = 1 << 62) -> bool:
        """Give the memory of columns that were dropped back: so many bytes of it, or a set's;
        whether there is more. A long history takes milliseconds, for which others may wait."""
        num_bytes = 0
        while self._dropped and num_bytes < most_bytes:
            page_set, columns = self._dropped.popleft()
            self._memory.give(page_set, columns)
            num_bytes += self._all.num_bytes(columns)
        return bool(self._dropped)

    def _hold_only(self, columns: Iterable[int]) -> None:
        self._columns = self._all.checked(columns)
        self.set_bytes = self._all.num_bytes(self._columns)

    # --- sets ----------------------------------------------------------------------------------

    def _append(self, table: Table, page_set: int) -> None:
        self._write(table, len(table.sets), page_set)
        table.sets.append(page_set)
        self._holders[page_set] += 1

    def _write(self, table: Table, index: int, page_set: int) -> None:
        table.entries.write(index * len(self._all), self._memory.places(page_set, index))

    def rewrite(self, sets: Collection[int]) -> None:
        """These sets have gone, or have come back: tables say where kernels find them now."""
        for table in self._tables.values():
            for index, page_set in enumerate(table.sets):
                if page_set in sets:
                    self._write(table, index, page_set)

    def _take(self) -> int | None:
        """A free set with memory for its columns; what is idle goes for it."""
        while self.num_free:
            if not self._free:
                self._reclaim()
            page_set = self._free.pop()
            if self._memory.take(page_set, self._columns):
                self.spill.take(page_set)
                return page_set
            self._free.append(page_set)
            if not self._index.num_idle:
                break
            self._reclaim()
        return None

    def _reclaim(self) -> None:
        page_set = self._index.reclaim()
        assert page_set is not None, "nothing is idle"
        self._give_back(page_set)

    def _give_back(self, page_set: int) -> None:
        self.spill.give(page_set)
        self._memory.give(page_set, self._columns)
        self._arrivals.forget(page_set)
        self._free.append(page_set)

    def check(self) -> None:
        """Every set is free, held or idle; tables, counts, index and arrivals agree."""
        self._index.check()
        held = Counter(s for table in self._tables.values() for s in table.sets)
        assert held == self._holders, (held, self._holders)
        idle = self._index.idle()
        assert sorted([*held, *idle, *self._free]) == list(range(self.capacity))
        assert all(s in held or s in idle or s not in self._index for s in range(self.capacity))
        self.spill.check({*held, *idle})
        assert all(columns.isdisjoint(self._columns) for _, columns in self._dropped)
        self._arrivals.check()
        assert self._arrivals.columns <= self._columns
        assert self._arrivals.sets <= held.keys()
        assert not any(s in self._index for s in self._arrivals.sets), "others would find it"
