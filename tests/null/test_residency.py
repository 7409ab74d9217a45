"""Eviction: the optimum of a cyclic scan, within the budget, whatever happens in between."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jitllm.memory.frames import Frames
from jitllm.memory.residency import Residency

BLOCK = 4096 * 10


def residency(
    sizes: list[int], budget_bytes: int, fixed_bytes: int = 0, placed: Iterable[int] | None = None
) -> Residency:
    frames = Frames(budget_bytes)
    frames.reserve("dense", fixed_bytes)
    return Residency(sizes, frames, placed)


def come(blocks: Residency, *which: int) -> None:
    """Read some blocks, and use them."""
    for block in which:
        assert blocks.admit(block) is not None
        blocks.arrive(block)
        blocks.use(block, block + 1)


def resident(blocks: Residency) -> set[int]:
    return {block for block in range(blocks.num_blocks) if blocks.is_resident(block)}


def scan(blocks: Residency, *, reads_ahead: bool, run: bool = True) -> int:
    """Use every placed block once, as a device does; how many were read."""
    start, num_reads, num_blocks = 0, 0, blocks.num_blocks
    while start < num_blocks:
        if not blocks.is_placed(start):
            start += 1
            continue
        if blocks.is_absent(start):
            assert blocks.admit(start) is not None
            blocks.arrive(start)
            num_reads += 1
        stop = blocks.run_stop(start, num_blocks if run else start + 1)
        for block in range(start, stop):
            assert blocks.is_placed(block)
            blocks.pin(block)
        blocks.use(start, stop)
        ahead = blocks.next_placed(stop)
        if reads_ahead and blocks.is_absent(ahead) and blocks.lend(ahead) is not None:
            blocks.arrive(ahead)
            num_reads += 1
        blocks.check()
        assert blocks.num_held == 1 or not blocks.frames.over_budget_bytes
        for block in range(start, stop):
            blocks.unpin(block)
        start = stop
    return num_reads


@pytest.mark.parametrize("run", [True, False])
@pytest.mark.parametrize("reads_ahead", [True, False])
@given(data=st.data())
def test_a_cyclic_scan_reads_the_optimum(data: st.DataObject, reads_ahead: bool, run: bool) -> None:
    placed = data.draw(st.sets(st.integers(0, 24), min_size=2) | st.just(set(range(25))))
    num_blocks = len(placed)
    num_frames = data.draw(st.integers(1, num_blocks))
    blocks = residency([BLOCK] * 25, num_frames * BLOCK + 100, 50, placed)
    assert blocks.num_placed == num_blocks
    assert blocks.num_frames == num_frames
    for _ in range(3):
        scan(blocks, reads_ahead=reads_ahead, run=run)

    num_scans = 2 * (num_blocks - 1)
    num_reads = sum(scan(blocks, reads_ahead=reads_ahead, run=run) for _ in range(num_scans))

    kept = num_frames - 1 if reads_ahead else num_frames
    allowed = num_scans * num_blocks * (num_blocks - kept) // (num_blocks - 1)
    if num_frames == num_blocks:
        assert num_reads == 0
    elif num_frames == 1:
        assert num_reads == num_scans * num_blocks  # no frame to lend
    else:
        assert num_reads <= allowed
        assert reads_ahead or num_reads == allowed


def test_the_least_recently_used_one_would_be_worth_nothing() -> None:
    """The bound can fail: the same scan with the other order of eviction reads every block."""

    class LeastRecent(Residency):
        def _unpinned(self) -> Iterator[int]:
            return iter(reversed(list(super()._unpinned())))

    frames = Frames(6 * BLOCK)
    blocks = LeastRecent([BLOCK] * 12, frames)
    scan(blocks, reads_ahead=False)
    assert scan(blocks, reads_ahead=False) == 12


@given(
    sizes=st.lists(st.integers(1, 20), min_size=2, max_size=20),
    budget=st.integers(0, 400),
    reads_ahead=st.booleans(),
)
def test_blocks_of_different_sizes_never_exceed_the_budget(
    sizes: list[int], budget: int, reads_ahead: bool
) -> None:
    blocks = residency(sizes, budget)
    for _ in range(4):
        num_reads = scan(blocks, reads_ahead=reads_ahead)
    if sum(sizes) <= budget:
        assert num_reads == 0
    num_frames = blocks.num_frames
    assert sum(sorted(sizes)[-num_frames:]) <= budget or num_frames == 1


def test_what_comes_next_is_the_last_to_go() -> None:
    blocks = residency([BLOCK] * 6, 3 * BLOCK)
    for block in (0, 1, 2):
        blocks.admit(block)
        blocks.arrive(block)
        blocks.use(block, block + 1)
    blocks.pin(2)
    assert blocks.lend(3) == (1,)
    blocks.arrive(3)
    assert blocks.lend(4) == (0,)


def test_one_block_is_always_admitted() -> None:
    blocks = residency([BLOCK] * 3, 10, fixed_bytes=5)
    assert blocks.num_frames == 1
    assert blocks.over_budget_bytes == BLOCK - 5
    assert blocks.lend(0) is None
    assert blocks.admit(0) == ()
    assert blocks.admit(1) is None  # while the first is read
    blocks.arrive(0)
    blocks.pin(0)
    assert blocks.admit(1) is None  # and while it is used
    blocks.unpin(0)
    assert blocks.admit(1) == (0,)


def test_a_read_that_fails_leaves_no_trace() -> None:
    blocks = residency([BLOCK] * 3, 3 * BLOCK)
    blocks.admit(1)
    blocks.pin(1)
    blocks.fail(1)
    blocks.unpin(1)
    blocks.check()
    assert blocks.is_absent(1)
    assert blocks.frames.frame_bytes == 0


def test_taking_off_a_pin_too_many_is_an_error() -> None:
    with pytest.raises(ValueError, match="not pinned"):
        residency([BLOCK], BLOCK).unpin(0)


class Anything(RuleBasedStateMachine):
    """Reads, leases, placements, reservations and budgets in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [7, 3, 9, 1, 5, 5, 8, 2]
        self.blocks = residency(self.sizes, 30, 5)
        self.reading: set[int] = set()
        self.pins: list[tuple[int, bool]] = []
        self.placed = set(range(8))

    block = st.integers(0, 7)

    def begin(self, block: int, how: Callable[[int], tuple[int, ...] | None]) -> None:
        if block in self.placed and self.blocks.is_absent(block):
            victims = how(block)
            if victims is not None:
                self.reading.add(block)
                assert not set(victims) & (self.pinned | self.reading)

    @property
    def pinned(self) -> set[int]:
        return {block for block, _ in self.pins}

    @rule(block=block)
    def admit(self, block: int) -> None:
        self.begin(block, self.blocks.admit)

    @rule(block=block)
    def lend(self, block: int) -> None:
        within = self.blocks.frames.fits(0)
        self.begin(block, self.blocks.lend)
        assert not within or self.blocks.frames.fits(0)

    @rule(block=block)
    def fetch(self, block: int) -> None:
        before = resident(self.blocks)
        held = self.blocks.num_held
        self.begin(block, self.blocks.fetch)
        assert resident(self.blocks) == before
        assert self.blocks.num_held == held or self.blocks.frames.fits(0)

    @rule(placed=st.sets(block))
    def place(self, placed: set[int]) -> None:
        victims = set(self.blocks.place(placed))
        self.placed = placed
        assert not victims & (placed | self.pinned | self.reading)
        assert resident(self.blocks) <= placed | self.pinned

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), fails=st.booleans())
    def end_read(self, data: st.DataObject, fails: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.reading)))
        self.reading.remove(block)
        if fails:
            for pin in [pin for pin in self.pins if pin[0] == block]:
                self.take_off(pin)
            self.blocks.fail(block)
        else:
            self.blocks.arrive(block)

    @rule(block=block, kept=st.booleans())
    def pin(self, block: int, kept: bool) -> None:
        if not self.blocks.is_absent(block):
            self.blocks.pin(block, kept=kept)
            self.pins.append((block, kept))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.take_off(data.draw(st.sampled_from(self.pins)))

    def take_off(self, pin: tuple[int, bool]) -> None:
        self.pins.remove(pin)
        self.blocks.unpin(pin[0], kept=pin[1])

    @rule(start=block)
    def use(self, start: int) -> None:
        self.blocks.use(start, self.blocks.run_stop(start, 8))

    @rule(budget=st.integers(0, 60), name=st.sampled_from("ab"), num_bytes=st.integers(0, 20))
    def change(self, budget: int, name: str, num_bytes: int) -> None:
        self.blocks.frames.budget_bytes = budget
        self.blocks.frames.reserve(name, num_bytes)

    @invariant()
    def within_budget_unless_held(self) -> None:
        self.blocks.trim()
        self.blocks.check()
        assert all(not self.blocks.is_absent(block) for block in self.pinned)
        there = resident(self.blocks)
        assert there <= self.placed | self.pinned
        assert self.blocks.is_whole == (self.placed <= there)
        if not self.blocks.frames.fits(0) and self.blocks.num_held > 1:
            assert there <= self.pinned

    @invariant()
    def counts_are_those_of_the_placed_blocks(self) -> None:
        blocks, room = self.blocks, self.blocks.frames.room_bytes
        sizes = sorted((self.sizes[block] for block in self.placed), reverse=True)
        leaving = (resident(blocks) | self.reading) - self.placed
        needed = sum(sizes) + sum(self.sizes[block] for block in leaving)
        assert blocks.num_placed == len(sizes)
        assert blocks.has_room == (needed <= room)
        assert blocks.spare_bytes == max(room - needed, 0)
        num_frames = blocks.num_frames
        assert sum(sizes[:num_frames]) <= room or num_frames == 1
        assert (num_frames == len(sizes)) or sum(sizes) > room

    @rule(start=block, count=st.integers(1, 8))
    def runs_end_before_holes(self, start: int, count: int) -> None:
        there, stop = resident(self.blocks) & self.placed, min(start + count, 8)
        expected = start
        while expected < stop and expected in there:
            expected += 1
        assert self.blocks.run_stop(start, stop) == expected
        is_run = set(range(start, stop)) <= self.placed and not {start - 1, stop} & self.placed
        assert self.blocks.is_run(start, stop) == is_run
        if self.placed:
            later = [block for block in self.placed if block >= start]
            assert self.blocks.next_placed(start) == min(later or self.placed)


TestAnything = Anything.TestCase


def test_blocks_placed_elsewhere_go_at_once_or_when_they_are_let_go() -> None:
    blocks = residency([BLOCK] * 8, 8 * BLOCK)
    come(blocks, 0, 1, 2, 3)
    assert blocks.admit(4) == ()
    blocks.pin(1, 3)
    blocks.pin(3, kept=True)
    assert blocks.place([0, 6, 7]) == ()
    assert resident(blocks) == {0, 1, 2, 3}
    assert not blocks.has_room or blocks.spare_bytes == BLOCK
    blocks.arrive(4)
    assert blocks.trim() == (4,)
    blocks.unpin(1, 3)
    assert set(blocks.trim()) == {1, 2}
    blocks.unpin(3, kept=True)
    assert blocks.trim() == (3,)
    assert resident(blocks) == {0}
    assert blocks.place([]) == (0,)
    assert (blocks.num_frames, blocks.spare_bytes, blocks.is_whole) == (0, 8 * BLOCK, True)
    blocks.check()


def test_a_block_that_comes_back_in_time_stays() -> None:
    blocks = residency([BLOCK] * 3, 3 * BLOCK)
    come(blocks, 0, 1, 2)
    blocks.pin(1)
    assert set(blocks.place([0])) == {2}
    blocks.place([0, 1])
    blocks.unpin(1)
    assert blocks.trim() == ()
    assert blocks.is_whole


def test_what_was_fetched_goes_before_what_is_used() -> None:
    blocks = residency([BLOCK] * 6, 4 * BLOCK)
    come(blocks, 0, 1)
    for block in (4, 5):
        assert blocks.fetch(block) == ()
        blocks.arrive(block)
    assert blocks.fetch(3) is None
    blocks.use(0, 2)
    blocks.use(5, 6)
    blocks.frames.budget_bytes = 3 * BLOCK
    assert blocks.trim() == (4,)
    blocks.frames.budget_bytes = 2 * BLOCK
    assert blocks.trim() == (5,)  # used last
    blocks.check()


def test_a_block_is_admitted_beside_what_is_kept_but_not_beside_what_is_used() -> None:
    blocks = residency([BLOCK] * 4, 2 * BLOCK)
    come(blocks, 0, 1)
    blocks.pin(0, 2, kept=True)
    assert blocks.lend(2) is None
    assert blocks.admit(2) == ()
    assert blocks.admit(3) is None
    blocks.arrive(2)
    blocks.pin(2)
    assert blocks.admit(3) is None
    blocks.unpin(2)
    assert blocks.trim() == (2,)


def test_the_ledger() -> None:
    frames = Frames(100)
    frames.reserve("kv", 30)
    frames.reserve("kv", 20)
    frames.reserve("scratch", 10)
    assert dict(frames.reservations) == {"kv": 20, "scratch": 10}
    assert (frames.fixed_bytes, frames.room_bytes) == (30, 70)
    frames.charge(3, 70)
    assert frames.fits(0)
    assert not frames.fits(1)
    frames.reserve("kv", 200)
    assert (frames.room_bytes, frames.over_budget_bytes) == (0, 180)
    frames.free(3)
    frames.reserve("kv", 0)
    frames.check()
    assert (frames.fixed_bytes, frames.frame_bytes, frames.over_budget_bytes) == (10, 0, 0)
    with pytest.raises(ValueError, match="-1"):
        frames.reserve("kv", -1)
    frames.charge(3, 1)
    with pytest.raises(ValueError, match="has a frame"):
        frames.charge(3, 1)


def test_the_victims_are_the_most_recently_used_ones() -> None:
    blocks = residency([BLOCK] * 8, 5 * BLOCK)
    for block in range(5):
        blocks.admit(block)
        blocks.arrive(block)
        blocks.use(block, block + 1)
    blocks.frames.budget_bytes = 2 * BLOCK
    victims = blocks.trim()
    assert victims == (4, 3, 2)
    assert all(earlier > later for earlier, later in pairwise(victims))


RUNS = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8)), max_size=12)


@given(runs=RUNS, pinned=RUNS, budget=st.integers(0, 8))
def test_a_run_counts_as_its_blocks_one_by_one(
    runs: list[tuple[int, int]], pinned: list[tuple[int, int]], budget: int
) -> None:
    def victims(*, one_by_one: bool) -> tuple[int, ...]:
        blocks = residency([BLOCK] * 8, 8 * BLOCK)
        for block in range(8):
            blocks.admit(block)
            blocks.arrive(block)
        for ranges, do in ((runs, blocks.use), (pinned, blocks.pin)):
            for start, count in ranges:
                stop = min(start + count, 8)
                for at in range(start, stop) if one_by_one else (start,):
                    do(at, at + 1 if one_by_one else stop)
        blocks.frames.budget_bytes = budget * BLOCK
        return blocks.trim()

    assert victims(one_by_one=True) == victims(one_by_one=False)
