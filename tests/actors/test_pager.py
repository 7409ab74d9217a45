"""The pager on real files: leases, page-ins, memory, errors, and everybody at once."""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from actors.actor import Actor
from actors.local import LocalRef, Runtime
from actors.mailbox import Stopped
from actors.messages.device import Recall
from actors.messages.pager import (
    Acquire,
    Forget,
    Lease,
    Locate,
    PagerStats,
    PagerStatsRequest,
    Release,
    Reserve,
    SetBudget,
)
from actors.pager import Pager
from jitllm.devices.memory import HostMemory, Span, round_up
from jitllm.errors import JitllmError, PageError
from jitllm.formats.reader import Reader
from jitllm.memory.use import Phase
from tests.actors import containers
from tests.actors.containers import FakeContainer
from tests.null.test_memory import resident_bytes
from tests.null.test_reader import cached_pages, read_bytes

MIB = 1 << 20
BLOCK = 300_000  # not a whole number of pages
FRAME = round_up(BLOCK)
DENSE = round_up(5000)


@pytest.fixture
def container(tmp_path: Path) -> FakeContainer:
    return containers.write(tmp_path / "model.jlm", [BLOCK] * 12)


def budget(num_frames: int) -> int:
    return DENSE + num_frames * BLOCK


@asynccontextmanager
async def paging(
    container: FakeContainer, *args: Any, strict: bool = True, **kwargs: Any
) -> AsyncIterator[LocalRef]:
    pager = Pager(container, HostMemory(), *args, **kwargs)  # type: ignore[arg-type]
    async with Runtime(strict=strict) as runtime:
        yield await runtime.spawn(pager, "pager")
        if pager._residency is not None:
            pager._residency.check()


class Where(NamedTuple):
    """Addresses of the dense region and of every block."""

    dense: int
    blocks: tuple[int, ...]


async def located(pager: LocalRef) -> Where:
    found = await pager.ask(Locate())
    blocks = tuple(found.blocks.address + offset for offset in found.offsets)
    return Where(found.dense.address, blocks)


def at(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


async def stats(pager: LocalRef) -> PagerStats:
    return await pager.ask(PagerStatsRequest())


async def scan(pager: LocalRef, num_blocks: int = 12, first: int = 0) -> list[tuple[int, int]]:
    """One forward pass of blocks `[first, num_blocks)`; the leases it took."""
    start, leases = first, []
    while start < num_blocks:
        lease = await pager.ask(Acquire(start, num_blocks))
        assert start == lease.start < lease.stop <= num_blocks
        await asyncio.sleep(0)
        await pager.tell(Release(lease))
        leases.append((lease.start, lease.stop))
        start = lease.stop
    return leases


async def test_weights_are_where_the_pager_says(container: FakeContainer) -> None:
    async with paging(container, budget(2), "on") as pager:
        where = await located(pager)
        header = container.header
        assert at(where.dense, header.dense.length) == container.payload(header.dense)
        for _ in range(3):
            start = 0
            while start < 12:
                lease = await pager.ask(Acquire(start, 12))
                for block in range(lease.start, lease.stop):
                    assert where.blocks[block] % 4096 == 0
                    assert at(where.blocks[block], BLOCK) == container.payload(header.blocks[block])
                await pager.tell(Release(lease))
                start = lease.stop
        assert await located(pager) == where


async def test_opening_reads_the_dense_region_and_nothing_else(container: FakeContainer) -> None:
    before = read_bytes()
    async with paging(container, budget(2)) as pager:
        now = await stats(pager)
        assert (now.resident, now.page_ins, now.bytes_read) == (0, 0, DENSE)
        assert not now.is_direct or read_bytes() - before == DENSE


@pytest.mark.parametrize("num_frames", [1, 2, 6, 11, 12])
@pytest.mark.parametrize("read_ahead", ["off", "on"])
async def test_a_scan_reads_the_optimum(
    container: FakeContainer, num_frames: int, read_ahead: str
) -> None:
    async with paging(container, budget(num_frames), read_ahead) as pager:
        for _ in range(2):
            await scan(pager)
        before = await stats(pager)
        for _ in range(22):
            leases = await scan(pager)
        after = await stats(pager)
        per_scan = (after.page_ins - before.page_ins) / 22
        kept = num_frames - 1 if read_ahead == "on" else num_frames
        if num_frames == 12:
            assert (per_scan, leases) == (0, [(0, 12)])
        else:
            assert per_scan <= max(12 * (12 - kept) / 11, 12 * (num_frames == 1)) + 1 / 22
        assert after.frames == num_frames
        assert after.resident <= num_frames
        assert after.over_budget_bytes == 0
        assert after.page_ins - after.evictions <= num_frames
        assert after.fixed_bytes == DENSE


async def test_bytes_read_is_what_the_kernel_counts(container: FakeContainer) -> None:
    before = read_bytes()
    async with paging(container, budget(3), "off") as pager:
        for _ in range(4):
            await scan(pager)
        now = await stats(pager)
    assert now.bytes_read == DENSE + now.page_ins * FRAME
    if now.is_direct:
        assert read_bytes() - before == pytest.approx(now.bytes_read, rel=0.001)
    assert cached_pages(container.path) == 0


async def test_memory_is_what_the_budget_says(tmp_path: Path) -> None:
    """Of blocks with huge pages and a rest of small ones."""
    size = 3 * MIB + 5000
    container = containers.write(tmp_path / "model.jlm", [size] * 16)
    before = resident_bytes()
    async with paging(container, DENSE + 16 * round_up(size), "off") as pager:
        await scan(pager, 16)
        full = resident_bytes() - before
        assert full == pytest.approx(16 * size, abs=2 * MIB)
        now = await pager.ask(SetBudget(DENSE + 4 * round_up(size)))
        assert (now.resident, now.frames, now.over_budget_bytes) == (4, 4, 0)
        assert resident_bytes() - before == pytest.approx(4 * size, abs=2 * MIB)
        for _ in range(3):
            await scan(pager, 16)
            assert resident_bytes() - before == pytest.approx(4 * size, abs=2 * MIB)
    assert resident_bytes() - before < 2 * MIB


async def test_a_run_of_resident_blocks_is_one_lease(container: FakeContainer) -> None:
    async with paging(container, budget(12), "off") as pager:
        assert await scan(pager) == [(block, block + 1) for block in range(12)]
        lease = await pager.ask(Acquire(2, 9))
        assert (lease.start, lease.stop) == (2, 9)
        await pager.tell(Release(lease))


async def test_pinned_blocks_stay(container: FakeContainer) -> None:
    async with paging(container, budget(4), "off") as pager:
        where = await located(pager)
        held = await pager.ask(Acquire(5, 6))
        for _ in range(2):
            await scan(pager)
        now = await pager.ask(SetBudget(0))
        assert now.resident >= 1
        block = container.header.blocks[5]
        assert at(where.blocks[5], BLOCK) == container.payload(block)
        await pager.tell(Release(held))
        await pager.tell(Release(held))  # twice is as good as once
        assert (await stats(pager)).resident == 1


async def test_below_one_block_it_runs_and_says_so(container: FakeContainer) -> None:
    async with paging(container, 100, "on") as pager:
        for _ in range(2):
            assert len(await scan(pager)) == 12
        now = await stats(pager)
        assert (now.frames, now.resident, now.page_ins) == (1, 1, 24)
        assert now.over_budget_bytes == DENSE + BLOCK - 100


async def test_a_reservation_makes_blocks_give_way(container: FakeContainer) -> None:
    async with paging(container, budget(12), "off") as pager:
        await scan(pager)
        left = await pager.ask(Reserve("kv", 5 * BLOCK))
        assert (left.room_bytes, left.frames, left.over_budget_bytes) == (7 * BLOCK, 7, 0)
        assert (await stats(pager)).resident == 7
        assert (await pager.ask(Reserve("kv", 4 * BLOCK))).frames == 8  # set, not added
        assert (await pager.ask(Reserve("scratch", 12 * BLOCK))).over_budget_bytes == 5 * BLOCK
        await pager.ask(Reserve("scratch", 0))
        assert (await pager.ask(Reserve("kv", 0))).frames == 12
        with pytest.raises(JitllmError, match="kv cannot reserve"):
            await pager.ask(Reserve("kv", -1))


@dataclass
class Keeper(Actor):
    """A device that keeps a lease until it is recalled."""

    pager: LocalRef
    lease: Lease | None = None

    async def receive(self, message: Recall) -> None:
        assert self.lease is not None
        await self.pager.tell(Release(self.lease))


@asynccontextmanager
async def keeping(pager: LocalRef, name: str) -> AsyncIterator[Keeper]:
    """A device that has begun."""
    async with Runtime() as runtime:
        keeper = Keeper(pager)
        await pager.ask(Forget(await runtime.spawn(keeper, name)))
        yield keeper


async def test_a_device_that_begins_holds_nothing(container: FakeContainer) -> None:
    async with paging(container, budget(4), "off", strict=False) as pager:
        await pager.ask(Reserve("kv", BLOCK, "dead"))
        await pager.ask(Acquire(0, 1, "dead"))
        other = await pager.ask(Acquire(1, 2, "alive"))
        await pager.ask(Reserve("kv", BLOCK, "alive"))
        async with keeping(pager, "dead"):
            now = await stats(pager)
            assert now.fixed_bytes == DENSE + BLOCK
            assert (await pager.ask(SetBudget(0))).resident == 1  # the other one's
        await pager.tell(Release(other))


async def test_a_lease_stands_while_all_fits_and_is_recalled_when_it_does_not(
    container: FakeContainer,
) -> None:
    async with paging(container, budget(12), "off", strict=False) as pager:
        await scan(pager)
        brief = await pager.ask(Acquire(0, 12))
        assert not brief.is_standing  # there is nobody to recall it from
        await pager.tell(Release(brief))
        async with keeping(pager, "device") as keeper:
            part = await pager.ask(Acquire(0, 6, "device"))
            assert not part.is_standing
            await pager.tell(Release(part))
            keeper.lease = await pager.ask(Acquire(0, 12, "device"))
            assert keeper.lease.is_standing
            assert (await pager.ask(SetBudget(budget(5)))).resident == 5
            assert len(await scan(pager)) > 1


async def test_the_lease_of_a_dead_device_is_taken_back(container: FakeContainer) -> None:
    async with paging(container, budget(12), "off", strict=False) as pager:
        await scan(pager)
        async with keeping(pager, "device") as keeper:
            keeper.lease = await pager.ask(Acquire(0, 12, "device"))
        assert (await pager.ask(Reserve("kv", 7 * BLOCK))).frames == 5
        assert (await stats(pager)).resident == 5


async def test_a_smaller_budget_waits_for_a_read_in_flight(container: FakeContainer) -> None:
    async with paging(container, budget(3), "on") as pager:
        lease = await pager.ask(Acquire(0, 12))
        now = await pager.ask(SetBudget(budget(1)))  # block 0 is pinned, and 1 is being read
        assert (now.resident, now.page_ins, now.over_budget_bytes) == (1, 2, 0)
        await pager.tell(Release(lease))


async def test_many_who_want_a_block_join_one_read(container: FakeContainer) -> None:
    async with paging(container, budget(1), "off") as pager:
        leases = await asyncio.gather(*(pager.ask(Acquire(3, 4)) for _ in range(20)))
        assert len({lease.lease_id for lease in leases}) == 20
        assert (await stats(pager)).page_ins == 1
        for lease in leases:
            await pager.tell(Release(lease))


async def test_who_finds_no_room_waits_for_a_release(container: FakeContainer) -> None:
    async with paging(container, budget(1), "on") as pager:
        first = await pager.ask(Acquire(0, 1))
        second = asyncio.create_task(pager.ask(Acquire(1, 2)))
        await stats(pager)
        assert not second.done()
        await pager.tell(Release(first))
        await pager.tell(Release(await second))


async def test_who_gives_up_holds_nothing(container: FakeContainer) -> None:
    rng = random.Random(5)
    async with paging(container, budget(1), "off") as pager:
        for turn in range(60):
            asking = asyncio.create_task(pager.ask(Acquire(turn % 12, 12)))
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(rng.choice([0, 0, 0.001]))
            asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled():
                await pager.tell(Release(asking.result()))
        assert len(await scan(pager)) == 12  # with one frame: nothing is pinned


async def test_devices_at_once_and_changing_budgets(container: FakeContainer) -> None:
    async with paging(container, budget(4), "on") as pager:
        where = await located(pager)

        async def device(start: int, stop: int) -> None:
            for _ in range(6):
                block = start
                while block < stop:
                    lease = await pager.ask(Acquire(block, stop))
                    for held in range(lease.start, lease.stop):
                        expected = container.payload(container.header.blocks[held])
                        assert at(where.blocks[held], BLOCK) == expected
                        await asyncio.sleep(0)
                    await pager.tell(Release(lease))
                    block = lease.stop

        async def change() -> None:
            for num_frames in (1, 7, 2, 0, 12, 3, 1, 5):
                reached = await pager.ask(SetBudget(budget(num_frames)))
                assert reached.budget_bytes == budget(num_frames)
                await asyncio.sleep(0.002)

        async with asyncio.TaskGroup() as group:
            for legs in ((0, 12), (0, 12), (0, 5), (5, 12)):
                group.create_task(device(*legs))
            group.create_task(change())
        now = await pager.ask(SetBudget(budget(2)))
        assert now.resident <= 2


@pytest.mark.parametrize("read_ahead", ["off", "on"])
async def test_a_wrong_checksum_ends_one_request(container: FakeContainer, read_ahead: str) -> None:
    extent = container.header.blocks[4]
    good = container.payload(extent)
    _overwrite(container, extent.offset + 99, bytes([good[99] ^ 4]))
    before = resident_bytes()
    async with paging(container, budget(12), read_ahead) as pager:
        with pytest.raises(PageError, match="checksum") as caught:
            await scan(pager)
        assert (caught.value.path, caught.value.offset) == (str(container.path), extent.offset)
        results = await asyncio.gather(
            *(pager.ask(Acquire(4, 5)) for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(result, PageError) for result in results)
        lease = await pager.ask(Acquire(5, 12))
        await pager.tell(Release(lease))
        assert resident_bytes() - before < 12 * FRAME + 4 * MIB

        _overwrite(container, extent.offset + 99, good[99:100])
        assert len(await scan(pager)) >= 1
        _overwrite(container, extent.offset + 99, bytes([good[99] ^ 4]))
        await pager.ask(SetBudget(budget(1)))
        await scan(pager)  # compared at the first page-in only


async def test_a_short_file_ends_one_request(container: FakeContainer) -> None:
    extent = container.header.blocks[11]
    with container.path.open("r+b") as file:
        file.truncate(extent.offset + 5000)
    async with paging(container, budget(2), "on") as pager:
        with pytest.raises(PageError, match="short read"):
            await scan(pager)
        assert len(await scan(pager, 11)) >= 1


async def test_a_damaged_dense_region_does_not_start(container: FakeContainer) -> None:
    _overwrite(container, container.header.dense.offset, b"\xff\x00\xff")
    with pytest.raises(PageError, match="checksum"):
        async with paging(container, budget(2)):
            pass


async def test_stopping_in_the_middle_is_clean(container: FakeContainer) -> None:
    before = resident_bytes()
    async with paging(container, budget(2), "on") as pager:
        first = await pager.ask(Acquire(0, 12))
        asking = [asyncio.create_task(pager.ask(Acquire(block, 12))) for block in range(1, 9)]
        await stats(pager)
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(outcome, Lease | Stopped) for outcome in outcomes)
    assert any(isinstance(outcome, Stopped) for outcome in outcomes)
    with pytest.raises(Stopped):
        await pager.tell(Release(first))
    assert resident_bytes() - before < 2 * MIB


async def test_no_such_block(container: FakeContainer) -> None:
    async with paging(container, budget(2)) as pager:
        for start, stop in [(-1, 3), (3, 3), (4, 13)]:
            with pytest.raises(JitllmError, match="no blocks"):
                await pager.ask(Acquire(start, stop))
        with pytest.raises(JitllmError, match="no budget"):
            await pager.ask(SetBudget(-1))


@pytest.mark.parametrize(
    ("compute_s", "read_s", "expected"), [(0.002, 0.002, True), (0.0, 0.02, False)]
)
async def test_auto_follows_the_times(
    container: FakeContainer,
    monkeypatch: pytest.MonkeyPatch,
    compute_s: float,
    read_s: float,
    expected: bool,
) -> None:
    clock = _Clock()
    for module in ("pager", "leases", "reads"):
        monkeypatch.setattr(f"actors.{module}.perf_counter", clock)
    real = Reader.read

    def read(self: Reader, *args: Any) -> None:
        real(self, *args)
        clock.now_s += read_s

    monkeypatch.setattr(Reader, "read", read)
    async with paging(container, budget(6), "auto") as pager:
        assert not (await stats(pager)).reads_ahead
        for _ in range(4):
            start = 0
            while start < 12:
                lease = await pager.ask(Acquire(start, 12))
                clock.now_s += compute_s * (lease.stop - lease.start)
                await pager.ask(Release(lease))
                start = lease.stop
        assert (await stats(pager)).reads_ahead is expected


async def test_it_reads_from_memory_filesystems_too(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"jitllm-test-{tmp_path.name}.jlm"
    try:
        container = containers.write(path, [BLOCK] * 4)
        async with paging(container, budget(2), "on") as pager:
            for _ in range(3):
                await scan(pager, 4)
            assert (await stats(pager)).page_ins > 4
    finally:
        path.unlink()


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _overwrite(container: FakeContainer, offset: int, data: bytes) -> None:
    with container.path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    containers.drop_from_page_cache(container.path)


async def test_what_no_step_waits_for_is_not_of_its_phase(container: FakeContainer) -> None:
    """Blocks that a device has copied to its own memory as it is opened, and during replies."""
    steps: tuple[Phase | None, ...] = (None, None, "prompt", None, "decode", "decode", None)
    async with paging(container, budget(12)) as pager:
        for block, phase in enumerate(steps):
            await pager.ask(Release(await pager.ask(Acquire(block, block + 1, "device", phase))))
        phases = (await stats(pager)).phases
    assert {phase: (use.requests, use.faults) for phase, use in phases.items()} == {
        "load": (3, 0),  # with the dense region
        "prompt": (2, 1),
        "decode": (3, 2),
    }


async def test_without_room_for_a_model_it_says_so_and_ends(
    container: FakeContainer, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(HostMemory):
        def reserve(self, num_bytes: int, **how: Any) -> Span:
            raise JitllmError("no address space")

    pager = Pager(container, Full(), budget(12))  # type: ignore[arg-type]
    async with Runtime() as runtime:
        with pytest.raises(JitllmError, match="no address space"):
            await runtime.spawn(pager, "pager")
    assert caplog.messages == []
