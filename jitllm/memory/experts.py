"""Which experts of a model are in memory, and which go when a step needs others.

Knows counts, bytes and the order of use. Knows no memory, no file and no clock; nothing here waits.
A step goes through the blocks in order, so of all experts those used longest ago are the ones of
the blocks that come next: evicting the least recently used of all would be worth nothing. Every
block has the same quota of experts and evicts its own; what others leave unused it may borrow, and
whoever is below its quota takes it back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Expert(NamedTuple):
    """One expert of one block."""

    block: int
    expert: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """What becomes of the experts that a step needs in a block. All but `left` are pinned.

    present: to be computed with at once. coming: being read already. reads: have a frame now, to be
    read into. left: there is no room before others are released. evicted: whose memory is to be
    given back before anything is read.
    """

    present: tuple[int, ...]
    coming: tuple[int, ...]
    reads: tuple[int, ...]
    left: tuple[int, ...]
    evicted: tuple[Expert, ...]


class ExpertResidency:
    """The experts of one model within so many bytes.

    An expert is absent, being read, or resident; the latter two hold a frame. A pinned one keeps
    it. A single expert is admitted whatever the room.
    """

    def __init__(self, expert_bytes: Mapping[int, int], room_bytes: int, used: int = 1) -> None:
        """expert_bytes: of one expert of each block that has some. used: experts that a token needs
        in a block."""
        self.expert_bytes = dict(expert_bytes)
        self.room_bytes = room_bytes
        self.held_bytes = 0
        self._used = used
        self.place(expert_bytes)
        self.num_hits = 0
        """Experts that were needed and there."""
        self.num_reads = 0
        """Experts that were needed and had to be read."""
        # Of each block, the most recently used one last.
        self._resident: dict[int, OrderedDict[int, None]] = {b: OrderedDict() for b in expert_bytes}
        self._reading: dict[int, set[int]] = {b: set() for b in expert_bytes}
        self._pinned: dict[int, set[int]] = {b: set() for b in expert_bytes}

    @property
    def quota(self) -> int:
        """Experts that each block may hold whatever the others do."""
        return self.room_bytes // max(self._row_bytes, 1)

    def place(self, blocks: Iterable[int]) -> tuple[Expert, ...]:
        """Experts of `blocks` are needed here, and no others; what went. What is pinned stays."""
        self._placed = frozenset(blocks) & self.expert_bytes.keys()
        self._row_bytes = sum(self.expert_bytes[block] for block in self._placed)
        return self._dismiss()

    def is_placed(self, block: int) -> bool:
        """Whether experts of `block` are needed here."""
        return block in self._placed

    @property
    def num_resident(self) -> int:
        """Experts that can be computed with right now."""
        return sum(map(len, self._resident.values()))

    def num_held(self, block: int) -> int:
        """Experts of `block` that hold a frame."""
        return len(self._resident[block]) + len(self._reading[block])

    def is_resident(self, block: int, expert: int) -> bool:
        """Whether an expert can be computed with right now."""
        return expert in self._resident[block]

    def admit(self, block: int, experts: Iterable[int]) -> Admitted:
        """Pin the different `experts` that a step needs in `block`, and give absent ones a frame.

        Those that are there come first. What is left is admitted again once others are released:
        so each expert is read once a step, however small the room.
        """
        needed = tuple(dict.fromkeys(experts))
        resident, reading = self._resident[block], self._reading[block]
        pinned = self._pinned[block]
        counted = set(pinned)  # by whoever asked for them before
        present = tuple(e for e in needed if e in resident)
        coming = tuple(e for e in needed if e in reading)
        absent = [e for e in needed if e not in resident and e not in reading]
        pinned.update(present, coming)
        for expert in present:
            resident.move_to_end(expert)

        reads: list[int] = []
        evicted: list[Expert] = []
        for expert in absent:
            victims = self._victims(block)
            if victims is None:
                break
            for victim in victims:
                self._evict(victim)
            evicted += victims
            reading.add(expert)
            pinned.add(expert)
            self.held_bytes += self.expert_bytes[block]
            reads.append(expert)
        self.num_hits += sum(expert not in counted for expert in present + coming)
        self.num_reads += len(reads)
        left = tuple(absent[len(reads) :])
        return Admitted(present, coming, tuple(reads), left, tuple(evicted))

    def arrive(self, block: int, expert: int) -> None:
        """The read of an expert is done."""
        self._reading[block].remove(expert)
        self._resident[block][expert] = None

    def fail(self, block: int, expert: int) -> None:
        """The read of an expert failed: it is absent again, and no longer pinned."""
        self._reading[block].remove(expert)
        self._pinned[block].discard(expert)
        self.held_bytes -= self.expert_bytes[block]

    def release(self, block: int, experts: Iterable[int]) -> None:
        """A step is done with `experts` of `block`; they may go again."""
        self._pinned[block].difference_update(experts)

    def resize(self, room_bytes: int) -> tuple[Expert, ...]:
        """Change the room, and evict what it does not hold any more; what is pinned stays."""
        self.room_bytes = room_bytes
        evicted = list(self._dismiss())
        while self.held_bytes > room_bytes and (victim := self._fullest()):
            self._evict(victim)
            evicted.append(victim)
        return tuple(evicted)

    def check(self) -> None:
        """What must hold at every moment."""
        held = 0
        for block, num_bytes in self.expert_bytes.items():
            resident, reading = self._resident[block].keys(), self._reading[block]
            assert not resident & reading, (block, resident, reading)
            assert self._pinned[block] <= resident | reading, (block, self._pinned[block])
            held += self.num_held(block) * num_bytes
        assert held == self.held_bytes, (held, self.held_bytes)

    # --- who goes -----------------------------------------------------------------------------

    def _dismiss(self) -> tuple[Expert, ...]:
        """Evict experts of blocks that are placed no more."""
        gone = tuple(
            Expert(block, expert)
            for block in self.expert_bytes.keys() - self._placed
            for expert in self._resident[block]
            if expert not in self._pinned[block]
        )
        for victim in gone:
            self._evict(victim)
        return gone

    def _victims(self, block: int) -> tuple[Expert, ...] | None:
        """Who must go before one more expert of `block` fits; None where it does not even then."""
        num_bytes = self.expert_bytes[block]
        missing = self.held_bytes + num_bytes - self.room_bytes
        victims: list[Expert] = []
        while missing > 0:
            victim = self._victim(block, victims)
            if victim is None:
                is_alone = self.held_bytes == sum(self.expert_bytes[v.block] for v in victims)
                return tuple(victims) if is_alone else None
            victims.append(victim)
            missing -= self.expert_bytes[victim.block]
        return tuple(victims)

    def _victim(self, block: int, gone: list[Expert]) -> Expert | None:
        """Its own least recently used one, unless it is below its quota and others are above.

        One whose own are all in use takes from others what a token needs, and no more: a prompt
        that needs all experts of a block takes turns with them.
        """
        num_held = self.num_held(block) - sum(victim.block == block for victim in gone)
        quota = self.quota
        others = self._fullest(gone, above=quota) if num_held < quota else None
        if found := others or self._oldest(block, gone):
            return found
        return self._fullest(gone) if num_held < max(quota, self._used) else None

    def _fullest(self, gone: Iterable[Expert] = (), above: int = 0) -> Expert | None:
        """The least recently used one of the block that holds most, of those above so many."""
        left = {block: self.num_held(block) for block in self.expert_bytes}
        for victim in gone:
            left[victim.block] -= 1
        for block in sorted(left, key=lambda b: -left[b]):
            if left[block] > above and (found := self._oldest(block, gone)):
                return found
        return None

    def _oldest(self, block: int, gone: Iterable[Expert]) -> Expert | None:
        """The least recently used one of a block that may go."""
        kept = self._pinned[block] | {victim.expert for victim in gone if victim.block == block}
        found = next((e for e in self._resident[block] if e not in kept), None)
        return None if found is None else Expert(block, found)

    def _evict(self, victim: Expert) -> None:
        del self._resident[victim.block][victim.expert]
        self.held_bytes -= self.expert_bytes[victim.block]
