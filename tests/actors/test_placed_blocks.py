"""A pager that serves a part of the blocks: which ones, their page-ins, and what goes with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from actors.actor import Actor
from actors.local import LocalRef, Runtime
from actors.messages.device import Recall
from actors.messages.pager import Acquire, Forget, Lease, Lend, Place, Release, Reserve, SetBudget
from jitllm.errors import JitllmError, PageError
from tests.actors import containers
from tests.actors.containers import FakeContainer
from tests.actors.test_pager import BLOCK, DENSE, at, budget, located, paging, scan, stats
from tests.null.test_memory import resident_bytes
from tests.null.test_reader import read_bytes

MIB = 1 << 20
RUNS = [(0, 3), (5, 6), (7, 10), (11, 12)]


def blocks_of(runs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(block for start, stop in runs for block in range(start, stop))


@pytest.fixture
def container(tmp_path: Path) -> FakeContainer:
    return containers.write(tmp_path / "model.jlm", [BLOCK] * 12)


async def scan_runs(pager: LocalRef) -> list[tuple[int, int]]:
    return [lease for start, stop in RUNS for lease in await scan(pager, stop, start)]


# --- what is served ----------------------------------------------------------------------------


async def test_an_empty_pager_reads_nothing_and_takes_nothing(container: FakeContainer) -> None:
    before = read_bytes(), resident_bytes()
    async with paging(container, budget(12), is_empty=True) as pager:
        now = await stats(pager)
        assert (now.blocks, now.placed, now.frames, now.resident) == (12, 0, 0, 0)
        assert (now.bytes_read, now.fixed_bytes, now.over_budget_bytes) == (0, 0, 0)
        assert not now.is_direct or read_bytes() == before[0]
        assert resident_bytes() - before[1] < 2 * MIB
        with pytest.raises(JitllmError, match="block 0 is not placed in pager"):
            await pager.ask(Acquire(0, 12))


async def test_only_what_is_placed_is_served(container: FakeContainer) -> None:
    async with paging(container, budget(12), is_empty=True) as pager:
        await pager.ask(Place(blocks_of(RUNS), dense=False))
        where = await located(pager)
        for start, stop in RUNS:
            for block in range(start, stop):
                lease = await pager.ask(Acquire(block, 12))
                assert lease.stop == block + 1
                expected = container.payload(container.header.blocks[block])
                assert at(where.blocks[block], BLOCK) == expected
                await pager.tell(Release(lease))
        assert await scan_runs(pager) == RUNS
        lease = await pager.ask(Acquire(7, 12))
        assert (lease.start, lease.stop) == (7, 10)  # as far as the hole
        await pager.tell(Release(lease))
        for block in (3, 4, 6, 10):
            with pytest.raises(JitllmError, match=f"block {block} is not placed"):
                await pager.ask(Acquire(block, 12))
        now = await stats(pager)
        assert (now.blocks, now.placed, now.resident, now.frames) == (12, 8, 8, 8)


@pytest.mark.parametrize("block", [-1, 12])
async def test_there_is_no_such_block(container: FakeContainer, block: int) -> None:
    async with paging(container, budget(12)) as pager:
        with pytest.raises(JitllmError, match=f"no block {block} in 12"):
            await pager.ask(Place((0, block), dense=True))
        with pytest.raises(JitllmError, match=f"no block {block} in 12"):
            await pager.ask(Lend(block))
        assert (await stats(pager)).placed == 12


@pytest.mark.parametrize("num_frames", [1, 2, 5, 7, 8])
@pytest.mark.parametrize("read_ahead", ["off", "on"])
async def test_a_scan_with_holes_reads_the_optimum(
    container: FakeContainer, num_frames: int, read_ahead: str
) -> None:
    async with paging(container, budget(num_frames), read_ahead, is_empty=True) as pager:
        await pager.ask(Place(blocks_of(RUNS), dense=True))
        for _ in range(2):
            await scan_runs(pager)
        before = await stats(pager)
        for _ in range(14):
            leases = await scan_runs(pager)
        after = await stats(pager)
        per_scan = (after.page_ins - before.page_ins) / 14
        kept = num_frames - 1 if read_ahead == "on" else num_frames
        if num_frames == 8:
            assert (per_scan, leases) == (0, RUNS)
        else:
            assert per_scan <= max(8 * (8 - kept) / 7, 8 * (num_frames == 1)) + 1 / 14
        assert after.frames == num_frames
        assert after.resident <= num_frames
        assert after.over_budget_bytes == 0


# --- what goes ---------------------------------------------------------------------------------


async def test_blocks_that_are_moved_out_free_their_frames(tmp_path: Path) -> None:
    size = 3 * MIB + 5000
    container = containers.write(tmp_path / "model.jlm", [size] * 12)
    before = resident_bytes()
    async with paging(container, DENSE + 12 * size, "off") as pager:
        await scan(pager)
        await pager.ask(Place((0, 1, 2), dense=True))
        now = await stats(pager)
        assert (now.placed, now.resident, now.frames, now.evictions) == (3, 3, 3, 9)
        assert now.spare_bytes == now.budget_bytes // 8
        assert resident_bytes() - before == pytest.approx(3 * size, abs=2 * MIB)
        await pager.ask(Place((2, 3), dense=True))
        assert await scan(pager, 4, 2) == [(2, 3), (3, 4)]
        assert await scan(pager, 4, 2) == [(2, 4)]
        assert (await stats(pager)).page_ins == 13
        assert resident_bytes() - before == pytest.approx(2 * size, abs=2 * MIB)


async def test_a_leased_block_goes_when_it_is_released(container: FakeContainer) -> None:
    async with paging(container, budget(12), "off") as pager:
        where = await located(pager)
        await scan(pager)
        one, other = await pager.ask(Acquire(2, 5)), await pager.ask(Acquire(4, 5))
        await pager.ask(Place((0,), dense=True))
        assert (await stats(pager)).resident == 4
        for block in range(2, 5):
            expected = container.payload(container.header.blocks[block])
            assert at(where.blocks[block], BLOCK) == expected
        with pytest.raises(JitllmError, match="block 2 is not placed"):
            await pager.ask(Acquire(2, 5))
        assert await pager.ask(Lend(2)) is None
        await pager.tell(Release(one))
        assert (await stats(pager)).resident == 2
        await pager.tell(Release(other))
        assert (await stats(pager)).resident == 1


async def test_a_block_that_is_read_goes_when_it_has_come(container: FakeContainer) -> None:
    async with paging(container, budget(12), "off") as pager:
        asking = asyncio.create_task(pager.ask(Acquire(4, 5)))
        await stats(pager)
        await pager.ask(Place((0,), dense=True))
        with pytest.raises(JitllmError, match="block 4 is not placed"):
            await asking
        assert (await stats(pager)).resident == 0


async def test_who_waits_for_a_block_that_moves_out_is_told(container: FakeContainer) -> None:
    async with paging(container, budget(1), "off") as pager:
        lease = await pager.ask(Acquire(0, 1))
        asking = asyncio.create_task(pager.ask(Acquire(4, 5)))
        await stats(pager)
        await pager.ask(Place((0, 1), dense=True))
        with pytest.raises(JitllmError, match="block 4 is not placed"):
            await asking
        await pager.tell(Release(lease))
        assert await scan(pager, 2) == [(0, 1), (1, 2)]


# --- the dense region --------------------------------------------------------------------------


async def test_the_dense_region_comes_and_goes_with_its_charge(tmp_path: Path) -> None:
    container = containers.write(tmp_path / "model.jlm", [BLOCK] * 4, dense_bytes=8 * MIB)
    expected = container.payload(container.header.dense)[-5000:]
    before = resident_bytes()
    async with paging(container, 12 * MIB, "off", is_empty=True) as pager:
        where = await located(pager)
        for _ in range(2):
            await pager.ask(Place((0, 1), dense=True))
            await pager.ask(Place((1, 2), dense=True))
            now = await stats(pager)
            assert now.fixed_bytes == 8 * MIB
            assert resident_bytes() - before == pytest.approx(8 * MIB, abs=2 * MIB)
            assert at(where.dense + 8 * MIB - 5000, 5000) == expected
            await pager.ask(Place((1, 2), dense=False))
            assert (await stats(pager)).fixed_bytes == 0
            assert resident_bytes() - before < 2 * MIB
        assert (await stats(pager)).bytes_read == 16 * MIB
        assert await located(pager) == where


async def test_blocks_give_way_to_the_dense_region(container: FakeContainer) -> None:
    async with paging(container, 4 * BLOCK + DENSE // 2, "off", is_empty=True) as pager:
        await pager.ask(Place(tuple(range(12)), dense=False))
        await scan(pager)
        assert (await stats(pager)).resident == 4
        await pager.ask(Place(tuple(range(12)), dense=True))
        now = await stats(pager)
        assert (now.resident, now.fixed_bytes, now.over_budget_bytes) == (3, DENSE, 0)


async def test_a_dense_region_that_cannot_be_read_charges_nothing(
    container: FakeContainer,
) -> None:
    extent = container.header.dense
    good = container.payload(extent)
    async with paging(container, budget(12), is_empty=True) as pager:
        container.path.write_bytes(_damaged(container, extent.offset))
        with pytest.raises(PageError, match="checksum"):
            await pager.ask(Place((0, 1), dense=True))
        now = await stats(pager)
        assert (now.placed, now.fixed_bytes) == (2, 0)
        container.path.write_bytes(_damaged(container, extent.offset))
        await pager.ask(Place((0, 1), dense=True))
        assert at((await located(pager)).dense, extent.length) == good


async def test_whoever_changes_his_mind_gets_the_last_one(container: FakeContainer) -> None:
    async with paging(container, budget(12), is_empty=True) as pager:
        for wanted in (True, False):
            wishes = [not wanted, wanted, not wanted, wanted]
            await asyncio.gather(*(pager.ask(Place((0,), dense=wish)) for wish in wishes))
            await pager.ask(Place((0,), dense=wanted))
            assert (await stats(pager)).fixed_bytes == DENSE * wanted


# --- standing leases ---------------------------------------------------------------------------


@dataclass
class Keeper(Actor):
    """A device that keeps leases until they are recalled."""

    pager: LocalRef
    leases: list[Lease] = field(default_factory=list)
    num_recalls: int = 0

    async def receive(self, message: Recall) -> None:
        self.num_recalls += 1
        for lease in self.leases:
            await self.pager.tell(Release(lease))
        self.leases = []

    async def keep(self, *runs: tuple[int, int]) -> list[bool]:
        """Acquire runs; which of them stand."""
        leases = [await self.pager.ask(Acquire(*run, "device")) for run in runs]
        for lease in leases:
            if not lease.is_standing:
                await self.pager.tell(Release(lease))
        self.leases += [lease for lease in leases if lease.is_standing]
        return [lease.is_standing for lease in leases]


@asynccontextmanager
async def kept(container: FakeContainer, num_frames: int) -> AsyncIterator[Keeper]:
    """A pager with the blocks of `RUNS`, and its device, which was there."""
    async with paging(container, budget(num_frames), "off", strict=False, is_empty=True) as pager:
        await pager.ask(Place(blocks_of(RUNS), dense=True))
        await scan_runs(pager)
        async with Runtime() as runtime:
            keeper = Keeper(pager)
            await pager.ask(Forget(await runtime.spawn(keeper, "device")))
            yield keeper


async def test_a_lease_stands_for_each_run_when_all_runs_are_there(
    container: FakeContainer,
) -> None:
    async with kept(container, 8) as keeper:
        assert await keeper.keep(*RUNS) == [True] * 4
        assert await keeper.keep((0, 2), (1, 3), (8, 10)) == [False] * 3
        await keeper.pager.ask(SetBudget(budget(3)))
        assert keeper.leases == []
        assert keeper.num_recalls == 1
        assert (await stats(keeper.pager)).resident == 3
        assert await keeper.keep((0, 3)) == [False]


async def test_no_lease_stands_while_a_placed_block_is_absent(container: FakeContainer) -> None:
    async with kept(container, 12) as keeper:
        await keeper.pager.ask(Place(tuple(range(12)), dense=True))
        assert await keeper.keep((0, 12)) == [False]
        await scan(keeper.pager)
        assert await keeper.keep((0, 12)) == [True]


async def test_a_move_takes_back_the_leases_that_it_needs(container: FakeContainer) -> None:
    async with kept(container, 12) as keeper:
        await keeper.keep(*RUNS)
        await keeper.pager.ask(Place((*blocks_of(RUNS), 10), dense=True))
        await stats(keeper.pager)
        assert keeper.num_recalls == 0  # there is room for what comes
        await keeper.pager.ask(Place((0, 1, 2, 5), dense=True))
        async with asyncio.timeout(60):
            while (await stats(keeper.pager)).resident > 4:
                pass
        assert keeper.num_recalls == 1
        assert await keeper.keep((0, 3), (5, 6)) == [True, True]


@pytest.mark.parametrize("how", ["place", "reserve", "budget"])
async def test_no_lease_stands_where_not_everything_has_room(
    container: FakeContainer, how: str
) -> None:
    """Even if all that is there does: the next block would find none."""
    async with kept(container, 10) as keeper:
        pager = keeper.pager
        if how == "place":
            await keeper.keep(*RUNS)
            await pager.ask(Place(tuple(range(12)), dense=True))
        else:
            await keeper.keep(*RUNS)
            await pager.ask(Place((*blocks_of(RUNS), 3), dense=True))
            assert keeper.num_recalls == 0
            await pager.ask(Reserve("kv", 2 * BLOCK) if how == "reserve" else SetBudget(budget(8)))
        async with asyncio.timeout(60):
            while keeper.leases:
                await stats(pager)
            await scan(pager, 4, 0)
        assert (await stats(pager)).over_budget_bytes == 0


async def test_a_busy_device_is_not_kept_waiting_by_its_own_leases(
    container: FakeContainer,
) -> None:
    """It cannot heed a recall before the step ends in which it asks for more."""
    async with kept(container, 8) as keeper:
        await keeper.keep((0, 3), (5, 6), (7, 10))
        held, keeper.leases = keeper.leases, []
        smaller = asyncio.create_task(keeper.pager.ask(SetBudget(budget(4))))
        async with asyncio.timeout(60):
            while keeper.num_recalls == 0:
                await stats(keeper.pager)
            lease = await keeper.pager.ask(Acquire(11, 12, "device"))
            assert (await stats(keeper.pager)).resident == 8
            await keeper.pager.tell(Release(lease))
            assert (await stats(keeper.pager)).resident == 7
            for lease in held:
                await keeper.pager.tell(Release(lease))
            assert (await smaller).resident == 4


def _damaged(container: FakeContainer, offset: int) -> bytes:
    """The file with one bit the other way round."""
    data = bytearray(container.path.read_bytes())
    data[offset] ^= 1
    return bytes(data)
