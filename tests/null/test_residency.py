"""Eviction: the optimum of a cyclic scan, within the budget, whatever happens in between."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jitllm.memory.frames import Frames
from jitllm.memory.residency import Residency

BLOCK = 4096 * 10


def residency(sizes: list[int], budget_bytes: int, fixed_bytes: int = 0) -> Residency:
    frames = Frames(budget_bytes)
    frames.reserve("dense", fixed_bytes)
    return Residency(sizes, frames)


def scan(blocks: Residency, *, reads_ahead: bool, run: bool = True) -> int:
    """Use every block once, as a device does; how many were read."""
    start, num_reads, num_blocks = 0, 0, blocks.num_blocks
    while start < num_blocks:
        if blocks.is_absent(start):
            assert blocks.admit(start) is not None
            blocks.arrive(start)
            num_reads += 1
        stop = blocks.run_stop(start, num_blocks if run else start + 1)
        for block in range(start, stop):
            blocks.pin(block)
        blocks.use(start, stop)
        ahead = stop % num_blocks
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
    num_blocks = data.draw(st.integers(2, 24))
    num_frames = data.draw(st.integers(1, num_blocks))
    blocks = residency([BLOCK] * num_blocks, num_frames * BLOCK + 100, 50)
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
    """Reads, leases, reservations and budgets in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [7, 3, 9, 1, 5, 5, 8, 2]
        self.blocks = residency(self.sizes, 30, 5)
        self.reading: set[int] = set()
        self.pins: list[int] = []
        self.is_settled = True

    block = st.integers(0, 7)

    def begin(self, block: int, how: Callable[[int], tuple[int, ...] | None]) -> None:
        if self.blocks.is_absent(block):
            victims = how(block)
            if victims is not None:
                self.reading.add(block)
                assert not set(victims) & (set(self.pins) | self.reading)

    @rule(block=block)
    def admit(self, block: int) -> None:
        self.begin(block, self.blocks.admit)

    @rule(block=block)
    def lend(self, block: int) -> None:
        within = self.blocks.frames.fits(0)
        self.begin(block, self.blocks.lend)
        assert not within or self.blocks.frames.fits(0)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), fails=st.booleans())
    def end_read(self, data: st.DataObject, fails: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.reading)))
        self.reading.remove(block)
        if fails:
            self.pins = [pin for pin in self.pins if pin != block or self.blocks.unpin(block)]
            self.blocks.fail(block)
        else:
            self.blocks.arrive(block)

    @rule(block=block)
    def pin(self, block: int) -> None:
        if not self.blocks.is_absent(block):
            self.blocks.pin(block)
            self.pins.append(block)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.pins))
        self.pins.remove(block)
        self.blocks.unpin(block)

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
        assert all(not self.blocks.is_absent(pin) for pin in self.pins)
        resident = {b for b in range(8) if self.blocks.is_resident(b)}
        if not self.blocks.frames.fits(0) and self.blocks.num_held > 1:
            assert resident <= set(self.pins)


TestAnything = Anything.TestCase


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
