"""Which blocks of a model are in memory, and which one goes when another must come.

Knows the order in which blocks are used and what each one takes. Knows no memory, no file and no
clock; nothing here waits. A forward pass is a cyclic scan of the blocks, so what was used last is
needed last: evicting the most recently used block is the optimum, N(N-F)/(N-1) page-ins a scan of
N blocks under F frames. The least recently used one would be worth nothing: N a scan.

Runs of blocks are pinned and used as runs, and looked at block by block only when one must go: a
scan of blocks that are all there costs the same however many they are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from jitllm.memory.frames import Frames


class Residency:
    """The blocks of one model under one budget.

    A block is absent, being read, or resident; the latter two hold a frame. A pinned block keeps
    its frame, also while it is read. What does not fit is None, not an exception.
    """

    def __init__(self, block_bytes: Sequence[int], frames: Frames) -> None:
        self.block_bytes = tuple(block_bytes)
        self.frames = frames
        self._reading: set[int] = set()
        self._resident: OrderedDict[int, None] = OrderedDict()  # the most recently used one last
        self._uses: dict[range, None] = {}  # since then, the latest one last
        self._pins: Counter[range] = Counter()

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return len(self.block_bytes)

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
        """Blocks that can be held at once, whichever they are; one is always admitted."""
        room = self.frames.room_bytes
        if sum(self.block_bytes) <= room:
            return self.num_blocks
        return max(room // max(self.block_bytes), 1)

    @property
    def over_budget_bytes(self) -> int:
        """What is held beyond the budget, or will be once the largest block is."""
        frames = self.frames
        needed = max(frames.frame_bytes, max(self.block_bytes, default=0))
        return max(frames.fixed_bytes + needed - frames.budget_bytes, 0)

    @property
    def spare_bytes(self) -> int:
        """What is left when everything has what it needs: reservations and every block."""
        return max(self.frames.room_bytes - sum(self.block_bytes), 0)

    def is_resident(self, block: int) -> bool:
        """Whether `block` can be computed with right now."""
        return block in self._resident

    def is_absent(self, block: int) -> bool:
        """Whether `block` is neither resident nor being read."""
        return block not in self._resident and block not in self._reading

    def run_stop(self, start: int, stop: int) -> int:
        """The end of the longest run of resident blocks `[start, end)` within `[start, stop)`."""
        if len(self._resident) == len(self.block_bytes):
            return stop
        return next((block for block in range(start, stop) if block not in self._resident), stop)

    def admit(self, block: int) -> tuple[int, ...] | None:
        """Give absent `block` a frame, to be read into; the blocks that were evicted for it.

        A single block is admitted whatever the budget. None: what is pinned leaves no room now.
        """
        victims = self._victims(block)
        if victims is None and not any(map(self._is_pinned, self._resident)):
            victims = tuple(self._unpinned()) if not self._reading else None
        return self._begin(block, victims)

    def lend(self, block: int) -> tuple[int, ...] | None:
        """`admit` absent `block` ahead of its use: never beyond the budget."""
        return self._begin(block, self._victims(block))

    def arrive(self, block: int) -> None:
        """The read of `block` is done. The scan comes to it next, so it is the last to go."""
        self._reading.remove(block)
        self._resident[block] = None
        self._resident.move_to_end(block, last=False)

    def fail(self, block: int) -> None:
        """The read of `block` failed: it is absent again. Pins stay until they are taken off."""
        self._reading.remove(block)
        self.frames.free(block)

    def use(self, start: int, stop: int) -> None:
        """Resident blocks `[start, stop)` are used, in this order."""
        run = range(start, stop)
        self._uses.pop(run, None)
        self._uses[run] = None

    def pin(self, start: int, stop: int | None = None) -> None:
        """Keep block `start`, or `[start, stop)`, until as many `unpin` of the same.

        Each of them is resident or being read.
        """
        self._pins[_run(start, stop)] += 1

    def unpin(self, start: int, stop: int | None = None) -> None:
        """Take one `pin` of block `start`, or of `[start, stop)`, off."""
        run = _run(start, stop)
        if not self._pins[run]:
            raise ValueError(f"block {start} is not pinned")
        self._pins[run] -= 1
        if not self._pins[run]:
            del self._pins[run]

    def trim(self) -> tuple[int, ...]:
        """Evict until the budget holds or one block is left; what went."""
        if self.frames.fits(0):
            return ()
        victims = []
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
        held = sum(self.block_bytes[block] for block in (*self._reading, *self._resident))
        assert held == self.frames.frame_bytes, (held, self.frames.frame_bytes)
        assert all(pins > 0 for pins in self._pins.values()), self._pins

    def _unpinned(self) -> Iterator[int]:
        """Resident blocks that may go, in the order in which they do."""
        for run in self._uses:
            for block in run:
                self._resident.move_to_end(block)
        self._uses.clear()
        return (block for block in reversed(self._resident) if not self._is_pinned(block))

    def _is_pinned(self, block: int) -> bool:
        return any(block in run for run in self._pins)

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

    def _evict(self, block: int) -> None:
        del self._resident[block]
        self.frames.free(block)


def _run(start: int, stop: int | None) -> range:
    return range(start, start + 1 if stop is None else stop)
