"""Blocks that come ahead of their use, from the container or from another pager's frames."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.actor import Message
from actors.local import LocalRef, Runtime
from actors.messages.pager import (
    Acquire,
    Fetch,
    Fetched,
    Forget,
    Frame,
    Lend,
    Lent,
    Place,
    Release,
    Reserve,
    SetBudget,
)
from actors.pager import Pager
from jitllm.devices.memory import Handle, HostMemory, Memory, SharedMemory
from jitllm.errors import JitllmError, PageError
from jitllm.memory.throttle import PIECE_BYTES
from tests.actors import containers
from tests.actors.containers import FakeContainer
from tests.actors.test_pager import BLOCK, DENSE, at, budget, located, paging, scan, stats
from tests.null.test_memory import resident_bytes

MIB = 1 << 20
FOREVER = 1e-9
"""A share of the time in which a block comes in after days."""


@pytest.fixture
def container(tmp_path: Path) -> FakeContainer:
    return containers.write(tmp_path / "model.jlm", [BLOCK] * 12)


@asynccontextmanager
async def two_pagers(
    container: FakeContainer, memory: Memory, *num_frames: int
) -> AsyncIterator[tuple[LocalRef, LocalRef]]:
    """One that has everything, and one to which everything may come."""
    async with Runtime(strict=True) as runtime:
        pagers = [
            Pager(container, memory, budget(num), "off")  # type: ignore[arg-type]
            for num in num_frames
        ]
        first, second = [
            await runtime.spawn(pager, f"pager {index}") for index, pager in enumerate(pagers)
        ]
        await scan(first)
        yield first, second
        for pager in pagers:
            pager._residency.check()


async def lend(pager: LocalRef, block: int) -> Lent:
    lent: Lent | None = await pager.ask(Lend(block))
    assert lent is not None
    return lent


async def begun(pager: LocalRef, message: Message[Fetched]) -> asyncio.Task[Fetched]:
    """A fetch that is under way."""
    task: asyncio.Task[Fetched] = asyncio.create_task(pager.ask(message))
    actor = actor_of(pager)
    async with asyncio.timeout(60):
        while (fetching := actor._fetches._fetching) is None or not fetching.throttle.busy_s:
            await stats(pager)
    return task


def actor_of(pager: LocalRef) -> Any:
    return pager._cell._actor


async def check_nothing_is_held(pager: LocalRef) -> None:
    await stats(pager)  # after all that it was told
    actor = actor_of(pager)
    assert actor._block_reads == {}
    assert actor._fetches._fetching is None
    assert len(actor._leases) == 0
    assert not actor._residency._pins
    assert not actor._residency._kept
    actor._residency.check()


async def bytes_of(pager: LocalRef, block: int) -> bytes:
    """What a device computes with."""
    lease = await pager.ask(Acquire(block, block + 1))
    found = at((await located(pager)).blocks[block], BLOCK)
    await pager.tell(Release(lease))
    return found


# --- where from --------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [HostMemory(), SharedMemory()], ids=["private", "shared"])
@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_both_origins_give_the_same_bytes(
    container: FakeContainer, memory: Memory, share: float
) -> None:
    async with two_pagers(container, memory, 12, 12) as (source, pager):
        for block in range(12):
            lent = await lend(source, block) if block % 2 else None
            before = (await stats(pager)).bytes_read
            fetched = await pager.ask(Fetch(block, lent.frame if lent else None, share))
            assert (fetched.origin, fetched.num_bytes) == ("frames" if lent else "container", BLOCK)
            assert fetched.seconds > 0
            assert ((await stats(pager)).bytes_read == before) == (lent is not None)
            if lent is not None:
                await source.tell(Release(lent.lease))
            expected = container.payload(container.header.blocks[block])
            assert await bytes_of(pager, block) == expected
            again = await pager.ask(Fetch(block))
            assert (again.origin, again.num_bytes) == ("here", 0)
        now = await stats(pager)
        assert (now.page_ins, now.evictions, now.resident) == (12, 0, 12)
        assert now.read_s > 0
        for each in (source, pager):
            await check_nothing_is_held(each)


_OWNER = """
import sys
from jitllm.devices.memory import SharedMemory
path, offset, num_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with open(path, "rb") as file, SharedMemory().reserve(2 * num_bytes + 4096) as span:
    file.seek(offset)
    span.view(4096, num_bytes)[:] = file.read(num_bytes)
    handle = span.handle()
    print(handle.pid, handle.address, handle.num_bytes, handle.fd, flush=True)
    sys.stdin.read()
"""


async def test_a_block_comes_from_another_process(container: FakeContainer) -> None:
    extent = container.header.blocks[3]
    arguments = [str(container.path), str(extent.offset), str(extent.length)]
    child = subprocess.Popen(  # noqa: ASYNC220 - it only waits
        [sys.executable, "-c", _OWNER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        handle = Handle(*map(int, child.stdout.readline().split()))
        async with paging(container, budget(12)) as pager:
            fetched = await pager.ask(Fetch(3, Frame(handle, 4096, BLOCK)))
            assert fetched.origin == "frames"
            assert await bytes_of(pager, 3) == container.payload(extent)
        assert child.stdin is not None
        child.stdin.close()
    async with paging(container, budget(12)) as pager:
        with pytest.raises(JitllmError, match="no view of"):
            await pager.ask(Fetch(3, Frame(handle, 4096, BLOCK)))
        await check_nothing_is_held(pager)
        assert (await stats(pager)).resident == 0


# --- only into free room -----------------------------------------------------------------------


@pytest.mark.parametrize("num_frames", [1, 4])
async def test_a_fetch_never_evicts(container: FakeContainer, num_frames: int) -> None:
    async with paging(container, budget(num_frames), "off") as pager:
        fetched = [await pager.ask(Fetch(block)) for block in range(12)]
        assert [each.origin for each in fetched] == ["container"] * num_frames + ["none"] * (
            12 - num_frames
        )
        assert fetched[-1].num_bytes == 0
        now = await stats(pager)
        assert (now.resident, now.page_ins, now.evictions) == (num_frames, num_frames, 0)
        assert now.over_budget_bytes == 0


async def test_a_budget_below_one_block_has_no_room_for_a_fetch(container: FakeContainer) -> None:
    async with paging(container, DENSE + BLOCK - 1) as pager:
        assert (await pager.ask(Fetch(0))).origin == "none"
        assert (await stats(pager)).resident == 0


async def test_room_that_somebody_waits_for_is_not_free(tmp_path: Path) -> None:
    container = containers.write(tmp_path / "model.jlm", [BLOCK, BLOCK, 5000])
    async with paging(container, DENSE + BLOCK + 8000, "off") as pager:
        held = await pager.ask(Acquire(0, 1))
        asking = asyncio.create_task(pager.ask(Acquire(1, 2)))
        await stats(pager)
        assert (await pager.ask(Fetch(2))).origin == "none"
        await pager.tell(Release(held))
        await pager.tell(Release(await asking))
        assert (await pager.ask(Fetch(2))).origin == "container"


async def test_what_was_fetched_goes_before_what_is_used(container: FakeContainer) -> None:
    async with paging(container, budget(6), "off") as pager:
        await pager.ask(Place((0, 1, 2, 9, 10, 11), dense=True))
        await scan(pager, 3)
        for block in (9, 10, 11):
            assert (await pager.ask(Fetch(block))).origin == "container"
        for num_frames in (5, 4, 3):
            await pager.ask(Reserve("kv", (6 - num_frames) * BLOCK))
            assert await scan(pager, 3) == [(0, 3)]
        now = await stats(pager)
        assert (now.page_ins, now.resident) == (6, 3)


# --- replies come first ------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["container", "frames"])
@pytest.mark.parametrize("what", ["acquire", "reserve", "budget", "place", "dense"])
async def test_a_fetch_gives_way(container: FakeContainer, source: str, what: str) -> None:
    async with two_pagers(container, HostMemory(), 12, 3) as (first, pager):
        await pager.ask(Place((0, 1, 5), dense=what != "dense"))
        await scan(pager, 2)
        if what == "dense":
            await pager.ask(SetBudget(3 * BLOCK))
        lent = await lend(first, 5)
        frame = lent.frame if source == "frames" else None
        fetching = await begun(pager, Fetch(5, frame, FOREVER))
        assert (await stats(pager)).resident == 2
        async with asyncio.timeout(60):
            if what == "acquire":
                await pager.ask(Place((0, 1, 5, 8), dense=True))
                lease = await pager.ask(Acquire(8, 9))
                await pager.tell(Release(lease))
            elif what == "reserve":
                assert (await pager.ask(Reserve("kv", BLOCK))).over_budget_bytes == 0
            elif what == "budget":
                assert (await pager.ask(SetBudget(budget(2)))).resident == 2
            elif what == "place":
                await pager.ask(Place((0, 1), dense=True))
            else:
                await pager.ask(Place((0, 1, 5), dense=True))
            fetched = await fetching
        assert (fetched.origin, fetched.num_bytes) == ("none", 0)
        assert await scan(pager, 2) == [(0, 2)]
        now = await stats(pager)
        assert (now.page_ins, now.evictions) == ((3, 0) if what == "acquire" else (2, 0))
        await first.tell(Release(lent.lease))
        for each in (first, pager):
            await check_nothing_is_held(each)


async def test_who_needs_a_block_hurries_its_fetch(container: FakeContainer) -> None:
    async with paging(container, budget(12), "off") as pager:
        fetching = await begun(pager, Fetch(5, None, FOREVER))
        waiting = asyncio.create_task(pager.ask(Fetch(6)))
        async with asyncio.timeout(60):
            assert await bytes_of(pager, 5) == container.payload(container.header.blocks[5])
            assert (await fetching).origin == "container"
            assert (await waiting).origin == "container"
        assert (await stats(pager)).page_ins == 2


async def test_who_needs_a_block_reads_it_when_its_fetch_fails(container: FakeContainer) -> None:
    async with two_pagers(container, HostMemory(), 12, 12) as (first, pager):
        lent = await lend(first, 5)
        fetching = await begun(pager, Fetch(5, lent.frame, FOREVER))
        await first.tell(Release(lent.lease))
        await first.ask(SetBudget(0))
        async with asyncio.timeout(60):
            assert await bytes_of(pager, 5) == container.payload(container.header.blocks[5])
            with pytest.raises(JitllmError, match="block 5 changed while it was copied"):
                await fetching
        await check_nothing_is_held(pager)


async def test_stopping_does_not_wait_for_a_fetch(container: FakeContainer) -> None:
    before = resident_bytes()
    async with asyncio.timeout(60), paging(container, budget(12)) as pager:
        fetching = await begun(pager, Fetch(5, None, FOREVER))
        queued = asyncio.create_task(pager.ask(Fetch(6, None, FOREVER)))
        await stats(pager)
    outcomes = await asyncio.gather(fetching, queued, return_exceptions=True)
    assert all(isinstance(outcome, JitllmError) for outcome in outcomes)
    assert resident_bytes() - before < 2 * MIB


async def test_a_source_that_stops_is_an_error_and_not_a_crash(container: FakeContainer) -> None:
    async with paging(container, budget(12), "off") as pager:
        async with Runtime() as runtime:
            source = await runtime.spawn(
                Pager(container, HostMemory(), budget(12), "off"),  # type: ignore[arg-type]
                "source",
            )
            await scan(source)
            lent = await lend(source, 5)
            fetching = await begun(pager, Fetch(5, lent.frame, FOREVER))
        actor_of(pager)._fetches._fetching.throttle.hurry()
        with pytest.raises(JitllmError, match="changed while it was copied"):
            await fetching
        with pytest.raises(JitllmError, match="no view of"):
            await pager.ask(Fetch(5, lent.frame))
        await check_nothing_is_held(pager)


async def test_fetches_take_turns(container: FakeContainer) -> None:
    async with paging(container, budget(12), "off") as pager:
        fetches = [pager.ask(Fetch(block % 5, None, 0.5)) for block in range(10)]
        origins = [fetched.origin for fetched in await asyncio.gather(*fetches)]
        assert origins == ["container"] * 5 + ["here"] * 5
        assert (await stats(pager)).page_ins == 5


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_a_block_that_cannot_be_read(container: FakeContainer, share: float) -> None:
    extent = container.header.blocks[4]
    good = container.payload(extent)
    _overwrite(container, extent.offset + PIECE_BYTES + 9, b"\x00\xff")
    before = resident_bytes()
    async with paging(container, budget(12)) as pager:
        for _ in range(3):
            with pytest.raises(PageError, match="checksum"):
                await pager.ask(Fetch(4, None, share))
        await check_nothing_is_held(pager)
        now = await stats(pager)
        assert (now.resident, now.page_ins) == (0, 0)
        assert resident_bytes() - before < 2 * MIB
        _overwrite(container, extent.offset, good)
        assert (await pager.ask(Fetch(4, None, share))).origin == "container"
        assert await bytes_of(pager, 4) == good


async def test_what_is_refused(container: FakeContainer) -> None:
    async with two_pagers(container, HostMemory(), 12, 12) as (first, pager):
        await pager.ask(Place((0, 1), dense=True))
        with pytest.raises(JitllmError, match="block 5 is not placed in pager 1"):
            await pager.ask(Fetch(5))
        with pytest.raises(JitllmError, match="no block 12 in 12"):
            await pager.ask(Fetch(12))
        for share in (0.0, -1.0, 1.1, float("nan")):
            with pytest.raises(JitllmError, match="a share of"):
                await pager.ask(Fetch(0, None, share))
        lent = await lend(first, 0)
        handle, offset = lent.frame.handle, lent.frame.offset
        for frame in (
            Frame(handle, offset, BLOCK - 1),
            Frame(handle, -1, BLOCK),
            Frame(handle, handle.num_bytes - BLOCK + 1, BLOCK),
        ):
            with pytest.raises(JitllmError, match="no frame of block 0"):
                await pager.ask(Fetch(0, frame))
        with pytest.raises(JitllmError, match="block 1 changed"):
            await pager.ask(Fetch(1, lent.frame))  # another block's
        await first.tell(Release(lent.lease))
        await check_nothing_is_held(pager)


# --- lending -----------------------------------------------------------------------------------


async def test_what_is_lent_stays_and_nothing_comes_for_it(container: FakeContainer) -> None:
    async with paging(container, budget(4), "off") as pager:
        await pager.ask(Place(tuple(range(8)), dense=True))
        assert await pager.ask(Lend(0)) is None
        assert (await stats(pager)).page_ins == 0
        await scan(pager, 8)
        assert await pager.ask(Lend(9)) is None
        where = await located(pager)
        lent = await lend(pager, 1)
        assert lent.frame.handle.address + lent.frame.offset == where.blocks[1]
        assert lent.frame.num_bytes == BLOCK
        for _ in range(2):
            await scan(pager, 8)
        await pager.ask(SetBudget(0))
        assert len(await scan(pager, 8)) > 1  # a block at a time beside it
        assert at(where.blocks[1], BLOCK) == container.payload(container.header.blocks[1])
        assert (await stats(pager)).resident == 1
        await pager.ask(Place((0,), dense=True))
        assert (await stats(pager)).resident == 1
        await pager.tell(Release(lent.lease))
        assert (await stats(pager)).resident == 0
        await check_nothing_is_held(pager)


async def test_what_is_lent_to_who_begins_again_is_given_back(container: FakeContainer) -> None:
    async with paging(container, budget(4), "off", strict=False) as pager:
        await scan(pager)
        assert await pager.ask(Lend(0, "device")) is not None
        async with paging(container, budget(1)) as other:
            other._cell.name = "device"
            await pager.ask(Forget(other))
        await check_nothing_is_held(pager)


# --- all at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [HostMemory(), SharedMemory()], ids=["private", "shared"])
@pytest.mark.parametrize("seed", range(6))
async def test_everything_at_once(container: FakeContainer, memory: Memory, seed: int) -> None:
    """Two pagers between which blocks come and go, and devices that compute with them."""
    rng = random.Random(seed)
    payloads = [container.payload(extent) for extent in container.header.blocks]
    origins: set[str] = set()
    refusals: list[str] = []
    async with two_pagers(container, memory, 6, 6) as pagers:
        placed = [set(range(12)), set(range(12))]
        addresses = [(await located(pager)).blocks for pager in pagers]

        async def pause() -> None:
            await asyncio.sleep(rng.choice([0, 0, 0.001]))

        async def device(at_pager: int) -> None:
            for _ in range(40):
                start = rng.randrange(12)
                try:
                    lease = await pagers[at_pager].ask(Acquire(start, 12))
                except JitllmError as error:
                    refusals.append(error.problem.partition(f"block {start} ")[2])
                    continue
                for block in range(lease.start, lease.stop):
                    assert at(addresses[at_pager][block], BLOCK) == payloads[block]
                    await pause()
                await pagers[at_pager].tell(Release(lease))

        async def fetch(to: int) -> None:
            for _ in range(40):
                block = rng.randrange(12)
                lent = await pagers[1 - to].ask(Lend(block)) if rng.random() < 0.7 else None
                share = rng.choice([0.1, 0.5, 1.0])
                asking = pagers[to].ask(Fetch(block, lent.frame if lent else None, share))
                try:
                    origins.add((await asking).origin)
                except JitllmError as error:
                    refusals.append(error.problem.partition(f"block {block} ")[2])
                if lent is not None:
                    await pagers[1 - to].tell(Release(lent.lease))
                await pause()

        async def change(at_pager: int) -> None:
            for _ in range(30):
                await pause()
                pager, what = pagers[at_pager], rng.randrange(4)
                if what == 0:
                    now = await pager.ask(SetBudget(budget(rng.randrange(13))))
                    assert now.placed == len(placed[at_pager])
                elif what == 1:
                    await pager.ask(Reserve("kv", rng.randrange(3) * BLOCK))
                else:
                    blocks = [block for block in range(12) if rng.random() < 0.7]
                    placed[at_pager] = set(blocks)
                    await pager.ask(Place(tuple(blocks), dense=rng.random() < 0.5))

        async with asyncio.timeout(200), asyncio.TaskGroup() as group:
            for index in (0, 1):
                for work in (device, device, fetch, change):
                    group.create_task(work(index))
        for pager in pagers:
            await pager.ask(Reserve("kv", 0))
            now = await pager.ask(SetBudget(budget(2)))
            assert now.over_budget_bytes == 0
            assert now.resident <= 2
            await check_nothing_is_held(pager)
            await pager.ask(Place((), dense=False))
            now = await stats(pager)
            assert (now.resident, now.fixed_bytes) == (0, 0)
            assert now.page_ins == now.evictions
    assert origins & {"container", "frames"}
    assert set(refusals) <= {"is not placed in pager 0", "is not placed in pager 1"}


def _overwrite(container: FakeContainer, offset: int, data: bytes) -> None:
    with container.path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    containers.drop_from_page_cache(container.path)
