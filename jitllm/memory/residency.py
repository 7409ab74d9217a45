"""Which blocks of a model are in memory, and which one goes when another must come.

Knows the order in which blocks are used, which are placed here and what each one takes. Knows no
memory, no file and no clock; nothing here waits. A forward pass is a cyclic scan of the placed
blocks, so what was used last is needed last: evicting the most recently used block is the optimum,
N(N-F)/(N-1) page-ins a scan of N blocks under F frames. The least recently used one would be worth
nothing: N a scan.

Runs of blocks are pinned and used as runs, and looked at block by block only when one must go: a
scan of blocks that are all there costs the same however many they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from jitllm.memory.frames import Frames


class Residency:
    """The blocks of one model that are placed here, under one budget; all of them by default.

    A block is absent, being read, or resident; the latter two hold a frame. A pinned block keeps
    its frame, also while it is read, and also when it is placed no more: then it is leaving. What
    does not fit is None, not an exception.
    """

    def __init__(
        self, block_bytes: Sequence[int], frames: Frames, placed: Iterable[int] | None = None
    ) -> None:
        self.block_bytes = tuple(block_bytes)
        self.frames = frames
        self._reading: set[int] = set()
        self._resident: OrderedDict[int, None] = OrderedDict()  # the most recently used one last
        self._uses: dict[range, None] = {}  # since then, the latest one last
        self._unused: set[int] = set()  # what was fetched, and not used since
        self._leaving: set[int] = set()
        self._pins: Counter[range] = Counter()
        self._kept: Counter[range] = Counter()
        self.place(range(self.num_blocks) if placed is None else placed)

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return len(self.block_bytes)

    @property
    def num_placed(self) -> int:
        """Blocks that are placed here."""
        return len(self._placed)

    @property
    def num_resident(self) -> int:
        """Blocks that can be computed with right now."""
        return len(self._resident)

    @property
    def num_held(self) -> int:
        """Blocks that hold a frame: resident or being read."""
        return len(self._resident) + len(self._reading)

    @property
    def num_frames(self) -> int:
        """Placed blocks that can be held at once, whichever they are; one is always admitted."""
        room = self.frames.room_bytes
        if self.placed_bytes <= room:
            return self.num_placed
        return max(room // self._largest_bytes, 1)

    @property
    def over_budget_bytes(self) -> int:
        """What is held beyond the budget, or will be once the largest placed block is."""
        frames = self.frames
        needed = max(frames.frame_bytes, self._largest_bytes)
        return max(frames.fixed_bytes + needed - frames.budget_bytes, 0)

    @property
    def spare_bytes(self) -> int:
        """What is left when everything has what it needs: reservations and every block."""
        return max(self.frames.room_bytes - self._needed_bytes, 0)

    @property
    def has_room(self) -> bool:
        """Whether every placed block can be held at once, beside those that are leaving."""
        return self._needed_bytes <= self.frames.room_bytes

    @property
    def is_whole(self) -> bool:
        """Whether every placed block is resident."""
        num_leaving = sum(block in self._resident for block in self._leaving)
        return len(self._resident) - num_leaving == self.num_placed

    def is_placed(self, block: int) -> bool:
        """Whether `block` is one that may be needed here."""
        return self._stops[block] > block

    def is_run(self, start: int, stop: int) -> bool:
        """Whether `[start, stop)` are placed blocks with none before and none behind them."""
        begins = start == 0 or not self.is_placed(start - 1)
        return begins and start < stop == self._stops[start]

    def is_resident(self, block: int) -> bool:
        """Whether `block` can be computed with right now."""
        return block in self._resident

    def is_absent(self, block: int) -> bool:
        """Whether `block` is neither resident nor being read."""
        return block not in self._resident and block not in self._reading

    def run_stop(self, start: int, stop: int) -> int:
        """The end of the longest run `[start, end)` of blocks within `[start, stop)`.

        All of them are placed and resident.
        """
        stop = min(stop, self._stops[start])
        if self.is_whole:
            return stop
        return next((block for block in range(start, stop) if block not in self._resident), stop)

    def next_placed(self, block: int) -> int:
        """The first placed block from `block` on, after the last block the first of all."""
        return self._placed[bisect_left(self._placed, block) % len(self._placed)]

    def place(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """`blocks` are placed here from now on, and no others; what went at once.

        The rest of what is placed no more is leaving: `trim` evicts it once it may.
        """
        self._placed = tuple(sorted(set(blocks)))
        self._stops = _run_stops(self._placed, self.num_blocks)
        self.placed_bytes = sum(self.block_bytes[block] for block in self._placed)
        """What the placed blocks take."""
        self._largest_bytes = max((self.block_bytes[block] for block in self._placed), default=0)
        held = (*self._reading, *self._resident)
        self._leaving = {block for block in held if not self.is_placed(block)}
        return tuple(self._dismiss())

    def admit(self, block: int) -> tuple[int, ...] | None:
        """Give absent `block` a frame, to be read into; the blocks that were evicted for it.

        A single block beside what is kept is admitted whatever the budget. None: what is read or
        in use leaves no room now.
        """
        victims = self._victims(block)
        if victims is None and not self._reading and not self._is_any_in_use():
            victims = tuple(self._unpinned())
        return self._begin(block, victims)

    def lend(self, block: int) -> tuple[int, ...] | None:
        """`admit` absent `block` ahead of its use: never beyond the budget."""
        return self._begin(block, self._victims(block))

    def fetch(self, block: int) -> tuple[int, ...] | None:
        """`admit` absent `block` long before its use: nothing goes for it.

        Until it is used it is the first to go.
        """
        if not self.frames.fits(self.block_bytes[block]):
            return None
        self._unused.add(block)
        return self._begin(block, ())

    def arrive(self, block: int) -> None:
        """The read of `block` is done. The scan comes to it next, so it is the last to go."""
        self._reading.remove(block)
        self._resident[block] = None
        self._resident.move_to_end(block, last=False)

    def fail(self, block: int) -> None:
        """The read of `block` failed: it is absent again. Pins stay until they are taken off."""
        self._reading.remove(block)
        self._free(block)

    def use(self, start: int, stop: int) -> None:
        """Resident blocks `[start, stop)` are used, in this order."""
        run = range(start, stop)
        self._uses.pop(run, None)
        self._uses[run] = None
        if self._unused:
            self._unused.difference_update(run)

    def pin(self, start: int, stop: int | None = None, *, kept: bool = False) -> None:
        """Keep block `start`, or `[start, stop)`, until as many `unpin` of the same.

        Each of them is resident or being read. kept: it may last, so a single block is admitted
        besides.
        """
        pins = self._kept if kept else self._pins
        pins[_run(start, stop)] += 1

    def unpin(self, start: int, stop: int | None = None, *, kept: bool = False) -> None:
        """Take one `pin` of block `start`, or of `[start, stop)`, off."""
        run, pins = _run(start, stop), self._kept if kept else self._pins
        if not pins[run]:
            raise ValueError(f"block {start} is not pinned")
        pins[run] -= 1
        if not pins[run]:
            del pins[run]

    def trim(self) -> tuple[int, ...]:
        """Evict what is leaving, then until the budget holds or one block is left; what went."""
        victims = self._dismiss()
        if self.frames.fits(0):
            return tuple(victims)
        for block in tuple(self._unpinned()):
            if self.frames.fits(0) or self.num_held == 1:
                break
            self._evict(block)
            victims.append(block)
        return tuple(victims)

    def check(self) -> None:
        """What must hold at every moment."""
        self.frames.check()
        assert not self._reading & self._resident.keys(), (self._reading, self._resident)
        blocks = self._reading | self._resident.keys()
        held = sum(self.block_bytes[block] for block in blocks)
        assert held == self.frames.frame_bytes, (held, self.frames.frame_bytes)
        assert all(pins > 0 for pins in self._pins.values()), self._pins
        assert all(pins > 0 for pins in self._kept.values()), self._kept
        assert self._leaving == blocks - set(self._placed), (self._leaving, self._placed)
        assert self._unused <= blocks, (self._unused, blocks)

    @property
    def _needed_bytes(self) -> int:
        return self.placed_bytes + sum(self.block_bytes[block] for block in self._leaving)

    def _unpinned(self) -> Iterator[int]:
        """Resident blocks that may go, in the order in which they do."""
        for run in self._uses:
            for block in run:
                self._resident.move_to_end(block)
        self._uses.clear()
        for block in self._unused & self._resident.keys():
            self._resident.move_to_end(block)
        return (block for block in reversed(self._resident) if not self._is_pinned(block))

    def _is_pinned(self, block: int) -> bool:
        return any(block in run for pins in (self._pins, self._kept) for run in pins)

    def _is_any_in_use(self) -> bool:
        return any(block in run for run in self._pins for block in self._resident)

    def _victims(self, block: int) -> tuple[int, ...] | None:
        """What must go before `block` fits, or None when it does not even then."""
        needed = self.block_bytes[block] + self.frames.frame_bytes - self.frames.room_bytes
        victims = []
        unpinned = self._unpinned()
        while needed > 0:
            victim = next(unpinned, None)
            if victim is None:
                return None
            victims.append(victim)
            needed -= self.block_bytes[victim]
        return tuple(victims)

    def _begin(self, block: int, victims: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if victims is None:
            return None
        for victim in victims:
            self._evict(victim)
        self.frames.charge(block, self.block_bytes[block])
        self._reading.add(block)
        return victims

    def _dismiss(self) -> list[int]:
        """Evict what is leaving and not held; what went."""
        if not self._leaving:
            return []
        victims = [block for block in self._unpinned() if block in self._leaving]
        for block in victims:
            self._evict(block)
        return victims

    def _evict(self, block: int) -> None:
        del self._resident[block]
        self._free(block)

    def _free(self, block: int) -> None:
        self.frames.free(block)
        self._leaving.discard(block)
        self._unused.discard(block)


def _run(start: int, stop: int | None) -> range:
    return range(start, start + 1 if stop is None else stop)


def _run_stops(placed: Sequence[int], num_blocks: int) -> tuple[int, ...]:
    """For each block the end of the run of placed blocks that it is in; itself when in none."""
    stops = list(range(num_blocks + 1))
    for block in reversed(placed):
        stops[block] = stops[block + 1]
    return tuple(stops)
