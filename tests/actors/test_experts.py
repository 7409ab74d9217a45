"""Experts one by one, on real files: leases, reads, memory, errors."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from actors.local import LocalRef
from actors.messages.pager import (
    Acquire,
    AcquireExperts,
    ExpertLease,
    Forget,
    Lend,
    Place,
    Release,
    Reserve,
    SetBudget,
    Unreadable,
)
from jitllm.devices.memory import round_up
from jitllm.errors import JitllmError, PageError
from tests.actors import containers
from tests.actors.containers import FakeContainer
from tests.actors.test_pager import DENSE, at, located, paging, stats
from tests.null.test_memory import resident_bytes

OWN, EXPERT = 30_000, 100_000
NUM_BLOCKS, COUNT = 3, 8
FRAME = round_up(EXPERT)
USED = 2


@pytest.fixture
def container(tmp_path: Path) -> FakeContainer:
    path = tmp_path / "model.jlm"
    return containers.write(path, [OWN] * NUM_BLOCKS, expert_bytes=[EXPERT] * COUNT)


def budget(num_experts: int) -> int:
    """Room for all blocks and so many experts."""
    return DENSE + NUM_BLOCKS * OWN + num_experts * FRAME


async def compute(pager: LocalRef, container: FakeContainer, block: int, *experts: int) -> None:
    """What a step does with the experts that it needs: each is as in the file."""
    where, left = (await located(pager)).blocks[block], set(experts)
    extents = {e.expert: e.extent for e in container.header.experts if e.block == block}
    begin = container.header.blocks[block].offset
    while left:
        lease = await pager.ask(AcquireExperts(block, tuple(left)))
        if isinstance(lease, Unreadable):
            assert lease.expert in left
            raise lease.error
        assert set(lease.experts) <= left
        for expert, place in zip(lease.experts, lease.places, strict=True):
            data = at(where + extents[place].offset - begin, EXPERT)
            assert data == container.payload(extents[expert]), (block, expert)
        await asyncio.sleep(0)
        await pager.tell(Release(lease))
        left.difference_update(lease.experts)


async def test_what_is_leased_is_what_the_file_holds(
    container: FakeContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITLLM_POISON", "1")
    dice = random.Random(3)
    async with paging(container, budget(4), "off", experts_used=USED) as pager:
        for _ in range(40):
            for block in range(NUM_BLOCKS):
                lease = await pager.ask(Acquire(block, block + 1))
                await compute(
                    pager, container, block, *dice.sample(range(COUNT), dice.choice([2, 2, 7]))
                )
                await pager.tell(Release(lease))
            if dice.random() < 0.2:
                await pager.ask(SetBudget(max(budget(dice.randrange(-1, 9)), 0)))
        now = await stats(pager)
        assert now.experts is not None
        assert now.experts.reads > 40
        assert now.experts.bytes_read == now.experts.reads * FRAME
        assert now.bytes_read == DENSE + now.page_ins * round_up(OWN) + now.experts.bytes_read


async def test_experts_take_what_the_budget_leaves(container: FakeContainer) -> None:
    before = resident_bytes()
    async with paging(container, budget(5), "off", experts_used=USED) as pager:
        for block in range(NUM_BLOCKS):
            lease = await pager.ask(Acquire(block, block + 1))
            await compute(pager, container, block, *range(COUNT))
            await pager.tell(Release(lease))
        now = await stats(pager)
        assert now.experts is not None
        assert (now.experts.resident, now.experts.room_bytes) == (5, 5 * FRAME)
        assert now.fixed_bytes == DENSE
        assert not now.over_budget_bytes
        assert resident_bytes() - before < budget(5) + (1 << 20)

        await pager.ask(Reserve("kv", 2 * FRAME))  # experts give way
        now = await stats(pager)
        assert now.experts is not None
        assert (now.experts.resident, now.fixed_bytes) == (3, DENSE + 2 * FRAME)
        await pager.ask(SetBudget(0))  # one at the least
        await compute(pager, container, 1, 2, 3, 4)
        now = await stats(pager)
        assert now.experts is not None
        assert now.experts.room_bytes == FRAME >= now.experts.held_bytes
        assert now.over_budget_bytes == DENSE + 2 * FRAME + OWN + FRAME


async def test_experts_of_a_block_that_is_placed_no_more_go(container: FakeContainer) -> None:
    async with paging(container, budget(8), "off", experts_used=USED) as pager:
        for block in range(NUM_BLOCKS):
            await compute(pager, container, block, 0, 1)
        lease = await pager.ask(AcquireExperts(1, (0,)))
        await pager.ask(Place((0,)))
        now = await stats(pager)
        assert now.experts is not None
        assert now.experts.resident == 3  # those of block 0, and the leased one
        await pager.tell(Release(lease))
        now = await stats(pager)
        assert now.experts is not None
        assert now.experts.resident == 2
        with pytest.raises(JitllmError, match="not placed"):
            await pager.ask(AcquireExperts(1, (0,)))


async def test_what_cannot_be_meant_is_refused(container: FakeContainer) -> None:
    async with paging(container, budget(8), "off", experts_used=USED) as pager:
        for experts in ((), (COUNT,), (0, -1)):
            with pytest.raises(JitllmError, match="which has 8"):
                await pager.ask(AcquireExperts(0, experts))
        lease = await pager.ask(Acquire(0, 1))
        assert await pager.ask(Lend(0)) is None  # a frame would be without the experts
        await pager.tell(Release(lease))
    async with paging(container, 1 << 30, "off") as pager:
        with pytest.raises(JitllmError, match="which has 0"):
            await pager.ask(AcquireExperts(0, (0,)))


async def test_an_expert_that_cannot_be_read_keeps_nothing(container: FakeContainer) -> None:
    extent = container.header.experts[3].extent
    with container.path.open("r+b") as file:
        file.seek(extent.offset)
        file.write(b"damaged")
    containers.drop_from_page_cache(container.path)
    async with paging(container, budget(6), "off", experts_used=USED) as pager:
        for _ in range(2):
            with pytest.raises(PageError, match="checksum") as caught:
                await compute(pager, container, 0, 1, 3, 5)
            assert (caught.value.offset, caught.value.rows) == (extent.offset, ())
        await compute(pager, container, 0, 1, 5)
        await compute(pager, container, 1, *range(COUNT))


async def test_a_device_that_begins_again_holds_nothing(container: FakeContainer) -> None:
    async with paging(container, budget(3), "off", experts_used=USED) as pager:
        await pager.ask(Forget(pager))
        for _ in range(3):
            lease = await pager.ask(AcquireExperts(0, (0, 1, 2), pager.name))
            assert isinstance(lease, ExpertLease)
            await pager.ask(Forget(pager))
            await pager.tell(Release(lease))  # late
            await compute(pager, container, 1, 5, 6, 7)
