"""Page sets between memory and a file: what a budget holds stays, every page keeps its bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jitllm.devices.memory import HostMemory, Span
from jitllm.errors import DiskFull, JitllmError
from jitllm.memory.page_file import PageFile
from jitllm.memory.page_memory import VirtualPages
from jitllm.memory.pages import KvPages
from jitllm.memory.passes import Row
from jitllm.memory.spill import Spill
from jitllm.memory.spilling import PASSING_PART

SIZES = (100, 9000, 4096)
STRIDE = 4096 * 5
CAPACITY = 24
BUDGET = 8
PAGE_TOKENS = 64
BLOCKS = range(len(SIZES))


@dataclass
class Rig:
    """Sets in memory that is poisoned where it was given back, and what each page shall hold."""

    span: Span
    memory: VirtualPages
    spill: Spill

    def fill(self, page_set: int) -> None:
        for column in BLOCKS:
            self.page(page_set, column)[:] = self.content(page_set, column)

    def page(self, page_set: int, column: int) -> memoryview:
        """The bytes behind a page's address."""
        address = self.memory.address(page_set, column)
        return self.span.view(address - self.span.address, SIZES[column])

    def content(self, page_set: int, column: int) -> bytes:
        return bytes([1 + page_set * len(SIZES) + column]) * SIZES[column]

    def is_there(self, page_set: int, column: int) -> bool:
        """Whether a page holds what it shall; else it must be poison."""
        held = bytes(self.page(page_set, column))
        if held == self.content(page_set, column):
            return True
        assert held == b"\xff" * SIZES[column]
        return False

    def takes_memory(self, page_set: int, column: int) -> bool:
        """Whether a page holds anything; what a thread reads into it may be there in part."""
        return set(bytes(self.page(page_set, column))) != {0xFF}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv("JITLLM_POISON", "1")
    with ExitStack() as owned:
        span = owned.enter_context(HostMemory().reserve(CAPACITY * STRIDE, huge_pages=False))
        memory = VirtualPages(span.address, SIZES, span.release)
        file = PageFile(tmp_path, memory.layout, CAPACITY)
        spill = Spill(memory, file, BUDGET, PAGE_TOKENS, windows=(0, 100, 0))
        owned.callback(spill.close)
        yield Rig(span, memory, spill)
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if _is_in(fd, tmp_path)]


def _is_in(link: Path, folder: Path) -> bool:
    try:
        return os.readlink(link).startswith(str(folder))
    except OSError:
        return False


def taken(rig: Rig, num_sets: int) -> None:
    """So many sets are in use and full; those that have no room are put away."""
    for page_set in range(num_sets):
        rig.spill.take(page_set)
        rig.fill(page_set)
        rig.spill.put_away(rig.spill.surplus({page_set}, BLOCKS), BLOCKS)


def test_what_has_room_stays(rig: Rig) -> None:
    taken(rig, BUDGET)
    assert not rig.spill.spilled
    assert all(rig.is_there(s, column) for s in range(BUDGET) for column in BLOCKS)


def test_the_oldest_go_and_leave_room_for_what_passes_through(rig: Rig) -> None:
    taken(rig, 20)
    num_present = BUDGET - BUDGET // PASSING_PART
    assert rig.spill.spilled == set(range(20 - num_present))
    for page_set in range(20):
        for column in BLOCKS:
            assert rig.is_there(page_set, column) == (page_set not in rig.spill.spilled)
    rig.spill.check(range(20))


def test_what_each_sequence_writes_to_is_promised_whatever_the_budget(rig: Rig) -> None:
    """A step has all of that in memory, and so it is charged."""
    pages = KvPages(rig.memory, PAGE_TOKENS, CAPACITY, spill=rig.spill)
    for sequence in range(BUDGET + 4):
        pages.open(sequence, 2 * PAGE_TOKENS)
        assert pages.grow(sequence, 1)
    assert pages.held_bytes == (BUDGET + 4) * pages.set_bytes
    assert pages.promised_bytes(0) == pages.promised_bytes(5) == pages.held_bytes


def test_what_is_wanted_does_not_go(rig: Rig) -> None:
    taken(rig, BUDGET)
    rig.spill.take(BUDGET)
    wanted = {0, 1, BUDGET}
    assert rig.spill.surplus(wanted, BLOCKS) == [2, 3, 4]
    assert rig.spill.surplus(range(BUDGET + 1), BLOCKS) == []


def test_sets_come_back_with_their_bytes(rig: Rig) -> None:
    taken(rig, 20)
    rig.spill.bring_back([3, 7], BLOCKS)
    assert all(rig.is_there(s, column) for s in (3, 7) for column in BLOCKS)
    assert not {3, 7} & set(rig.spill.spilled)
    assert rig.spill.surplus({3, 7}, BLOCKS) == [14, 15]  # those that are there for longest
    rig.spill.check(range(20))


def test_the_room_of_sets_that_went_for_good_can_be_had_at_once(rig: Rig) -> None:
    def disk_bytes() -> int:
        return 512 * os.fstat(rig.spill._file._fd).st_blocks

    taken(rig, 20)
    full = disk_bytes()
    for page_set in (0, 1, 2, 5):
        rig.spill.give(page_set)
    assert disk_bytes() == full  # whoever takes a set again writes there
    rig.spill.reclaim()
    assert disk_bytes() < full - 3 * STRIDE  # the filesystem has blocks of its own
    away = sorted(rig.spill.spilled)
    assert away[:3] == [3, 4, 6]
    rig.spill.bring_back(away, BLOCKS)
    assert all(rig.is_there(page_set, column) for page_set in away for column in BLOCKS)
    rig.spill.reclaim()
    assert disk_bytes() < STRIDE


def test_single_pages_come_and_go_and_may_be_changed(rig: Rig) -> None:
    taken(rig, 20)
    pages = frozenset({(2, 1), (3, 1), (9, 0)})
    rig.spill.bring(pages)
    assert [rig.is_there(s, column) for s, column in sorted(pages)] == [True] * 3
    assert not rig.is_there(2, 0)
    rig.page(3, 1)[:] = b"x" * SIZES[1]
    rig.spill.put(pages, is_written=True)
    assert not any(rig.is_there(s, column) for s, column in pages)
    rig.spill.bring(pages)
    assert bytes(rig.page(3, 1)) == b"x" * SIZES[1]
    assert rig.is_there(2, 1)
    rig.spill.put(pages, is_written=False)


def test_what_no_window_shows_goes_first_and_alone(rig: Rig) -> None:
    for page_set in range(12):
        rig.spill.take(page_set)
        rig.fill(page_set)
    assert rig.spill.surplus({11}, BLOCKS) == [0, 1, 2, 3, 4, 5]
    rig.spill.narrow(range(9), BLOCKS)
    assert rig.spill.whole == {9, 10, 11}
    assert rig.spill.parted == set(range(9))
    for page_set in range(12):
        for column in BLOCKS:
            is_away = column == 1 and page_set < 9
            assert rig.spill.is_away(page_set, column) == is_away
            assert rig.is_there(page_set, column) == (not is_away)
    assert rig.spill.away_bytes(rig.spill.parted, rig.memory.layout, BLOCKS) == 9 * 3 * 4096
    # Nine sets with two of five system pages, and three whole ones: 0.6 more than six.
    assert rig.spill.surplus({11}, BLOCKS) == [0, 1]
    assert rig.spill.surplus({11}, (0, 2)) == [0, 1, 2, 3, 4, 5]  # blocks without a window
    rig.spill.check(range(12))

    rig.spill.put_away([0, 1], BLOCKS)
    rig.spill.bring_back([0, 2], BLOCKS)
    assert rig.spill.parted == {1, *range(3, 9)}
    for page_set in (0, 2):
        assert all(rig.is_there(page_set, column) for column in BLOCKS)
    rig.spill.check(range(12))
    with closing(rig.spill.passes([Row(range(12), 11 * PAGE_TOKENS)], BLOCKS, STRIDE)) as passes:
        seen = [(one.block, one.ranges) for one in passes]
    assert {block for block, _ in seen} == {0, 2}  # of which set 1 is away
    for page_set in range(12):
        rig.spill.give(page_set)
    assert os.fstat(rig.spill._file._fd).st_blocks == 0


def test_the_disk_is_given_back_with_the_last_set(rig: Rig) -> None:
    taken(rig, 20)
    fd = rig.spill._file._fd
    assert os.fstat(fd).st_blocks > 0
    for page_set in range(20):
        rig.spill.give(page_set)
    assert os.fstat(fd).st_blocks == 0
    rig.spill.check(())


def test_passes_bring_what_they_look_at_and_no_more_than_has_room(rig: Rig) -> None:
    taken(rig, 20)
    row = Row(range(20), 19 * PAGE_TOKENS + 5)
    seen: dict[int, set[int]] = {block: set() for block in BLOCKS}
    before = rig.spill.bytes_read
    with closing(rig.spill.passes([row], BLOCKS, STRIDE)) as passes:
        for one in passes:
            start, stop = one.ranges[0]
            sets = range(start // PAGE_TOKENS, min(stop // PAGE_TOKENS, 20))
            assert all(rig.is_there(s, one.block) for s in sets)
            seen[one.block].update(sets)
            here = {(s, c) for s in rig.spill.spilled for c in BLOCKS if rig.takes_memory(s, c)}
            assert sum(4096 * -(-SIZES[c] // 4096) for _, c in here) <= 2 * STRIDE
    num_spilled = len(rig.spill.spilled)
    # The window of block 1 shows what is in memory only, so it needs no pass of its own.
    assert seen == {0: set(range(20)), 1: set(), 2: set(range(20))}
    assert rig.spill.bytes_read - before == num_spilled * 2 * 4096
    assert not any(rig.is_there(s, c) for s in rig.spill.spilled for c in BLOCKS)


def test_passes_that_are_left_leave_nothing_behind(rig: Rig) -> None:
    taken(rig, 20)
    with closing(rig.spill.passes([Row(range(20), 19 * PAGE_TOKENS)], BLOCKS, STRIDE)) as passes:
        next(passes)
    assert not any(rig.is_there(s, c) for s in rig.spill.spilled for c in BLOCKS)
    rig.spill.check(range(20))


def failing(code: int) -> Any:
    def call(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


def test_a_full_disk_is_said_and_what_was_not_written_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken(rig, BUDGET)
    rig.spill.take(BUDGET)
    rig.fill(BUDGET)
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(DiskFull):
        rig.spill.put_away(rig.spill.surplus({BUDGET}, BLOCKS), BLOCKS)
    assert not rig.spill.spilled
    assert all(rig.is_there(s, column) for s in range(BUDGET + 1) for column in BLOCKS)
    rig.spill.check(range(BUDGET + 1))


@pytest.mark.parametrize("preadv", [failing(errno.EIO), lambda *_: 0], ids=["error", "cut short"])
def test_what_cannot_be_read_is_said_and_leaves_nothing_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, preadv: Any
) -> None:
    taken(rig, 20)
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", preadv)
        with pytest.raises(JitllmError, match="keys and values beyond -kv-budget in"):
            rig.spill.bring_back([3], BLOCKS)
        row = Row(range(20), 19 * PAGE_TOKENS)
        with closing(rig.spill.passes([row], BLOCKS, STRIDE)) as passes, pytest.raises(JitllmError):
            next(passes)
    assert not any(rig.is_there(s, c) for s in rig.spill.spilled for c in BLOCKS)
    rig.spill.check(range(20))
    rig.spill.bring_back([3], BLOCKS)
    assert all(rig.is_there(3, column) for column in BLOCKS)


def test_reads_that_are_short_or_not_direct_go_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken(rig, 20)
    preadv = os.preadv
    calls: list[int] = []

    def short(fd: int, into: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "not aligned to what this disk wants")
        return preadv(fd, [into[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", short)
    rig.spill.bring_back([3, 4], BLOCKS)
    assert all(rig.is_there(s, column) for s in (3, 4) for column in BLOCKS)


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    layout = VirtualPages(0, SIZES, lambda *_: None).layout
    with pytest.raises(JitllmError, match="beyond -kv-budget cannot go to .*; name another folder"):
        PageFile(tmp_path / "file", layout, CAPACITY)
