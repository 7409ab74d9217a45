"""Maps that a model goes to, what is left of those that cannot be, and devices that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from actors.mailbox import Stopped
from actors.relocate import Mover
from jitllm.compose import Loaded
from jitllm.engine import Engine, MoveTotals, Request
from jitllm.errors import PlacementError
from tests.conftest import TinyModel
from tests.models.native import opened, reply

PROMPT = (1, 259, 75, 260)
REQUEST = Request(PROMPT, max_tokens=120)
BASE = "0=cpu:0,1=cpu:1!,2=cpu:0,head=cpu:0"


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", "q8_0")


def two_devices(
    model: Path, placement: str = BASE, *, strict: bool = True
) -> AbstractAsyncContextManager[Loaded]:
    devices = {"devices": "cpu:0,cpu:1", "placement": placement}
    return opened(model, strict=strict, threads=2, move_share=0.99, **devices)


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with two_devices(model, BASE) as loaded:
        yield loaded.engine


async def where(engine: Engine) -> str:
    return str((await engine.stats()).placement)


def refuse(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Of the moves to come, have those with these numbers find no room."""
    prepare, count = Mover._prepare, 0

    async def refusing(self: Mover, move: Any) -> None:
        nonlocal count
        count += 1
        if count in numbers:
            raise PlacementError("no room", "raise -maxmem")
        await prepare(self, move)

    monkeypatch.setattr(Mover, "_prepare", refusing)


async def test_a_map_may_exchange_blocks_during_a_reply(engine: Engine, model: Path) -> None:
    async with opened(model, threads=1) as alone:
        expected = await reply(alone.engine, REQUEST)
    following = asyncio.create_task(reply(engine, REQUEST))
    moved = await engine.place("0=cpu:1,1=cpu:0,head=cpu:1!")
    assert (await following).bits == expected.bits
    assert {m.blocks for m in moved} == {"block 0 and the head", "block 1"}
    stats = await engine.stats()
    assert str(stats.placement) == "0=cpu:1,1-2=cpu:0,head=cpu:1!"
    assert (stats.moves, stats.moved_blocks) == (2, 3)
    assert stats.move_totals == MoveTotals().plus(moved[0]).plus(moved[1])


async def test_marks_alone_move_nothing(engine: Engine) -> None:
    before = (await engine.stats()).placement.epoch
    assert await engine.place("*=host,1=cpu:1") == ()
    assert await where(engine) == BASE.replace("!", "")
    assert await engine.place("*=host,1=cpu:1") == ()
    assert (await engine.stats()).placement.epoch == before + 1


async def test_what_finds_no_room_is_declined_until_it_is_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, 2)
    [moved] = await engine.place("0=cpu:1!,1=cpu:0")
    stats = await engine.stats()
    assert (moved.blocks, moved.to) == ("block 0", "cpu:1")
    assert str(stats.placement) == "0-1=cpu:1!,2=cpu:0,head=cpu:0"  # 1 keeps the pin that it had
    assert [str(decline) for decline in stats.declines] == ["block 1 to cpu:0: no room"]
    assert await engine.place("1=cpu:1") == ()
    assert (await engine.stats()).declines == ()


async def test_a_refused_move_is_no_decline_any_more_once_somebody_made_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, 1)
    assert await engine.place("2=cpu:1") == ()
    assert len((await engine.stats()).declines) == 1
    await engine.move([2], "cpu:1")
    assert (await engine.stats()).declines == ()


async def test_strictly_it_is_all_or_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, 2)
    with pytest.raises(PlacementError, match="no room"):
        await engine.place("0=cpu:1!,1=cpu:0", strict=True)
    assert await where(engine) == BASE
    assert (await engine.stats()).declines == ()
    assert (await reply(engine, REQUEST)).ids


async def test_what_cannot_go_back_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, 2, 3)
    with pytest.raises(PlacementError, match="could not go back: no room") as refused:
        await engine.place("0=cpu:1,1=cpu:0", strict=True)
    assert await where(engine) in str(refused.value)


async def test_declines_of_the_first_map_are_kept(model: Path) -> None:
    placement = "0=cpu:1,7-9=cpu:1"
    async with two_devices(model, placement) as loaded:
        [decline] = (await loaded.engine.stats()).declines
        assert (decline.what, decline.reason) == ("7-9=cpu:1", "the model has blocks 0 to 2")


async def test_what_a_map_moves_nobody_else_moves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, has_begun, may_go_on = Mover._prepare, asyncio.Event(), asyncio.Event()

    async def waiting(self: Mover, move: Any) -> None:
        has_begun.set()
        await may_go_on.wait()
        await prepare(self, move)

    monkeypatch.setattr(Mover, "_prepare", waiting)
    place = asyncio.create_task(engine.place("0=cpu:1,head=cpu:1"))
    await has_begun.wait()
    for blocks, head, why in (
        ([], True, "the head is being moved already"),
        ([0], False, "block 0 is being moved already"),
        ([0], True, "block 0 and the head are being moved already"),
    ):
        with pytest.raises(PlacementError, match=why):
            await engine.move(blocks, "cpu:1", head=head)
    with pytest.raises(PlacementError, match="being moved already"):
        await engine.place("0=cpu:1")
    may_go_on.set()
    await place
    assert await where(engine) == "0=cpu:1,1=cpu:1!,2=cpu:0,head=cpu:1"


async def stop(engine: Any, *names: str) -> None:
    """Devices go and do not come back."""
    for name in names:
        device = engine._sites[name].device
        await device._cell.runtime.stop(device.name)


async def test_a_device_that_is_gone_is_told_before_anybody_needs_it(engine: Engine) -> None:
    await stop(engine, "cpu:1")
    stats = await engine.stats()
    assert stats.lost == ("cpu:1",)
    assert [use.name for use in stats.devices] == ["cpu:0"]
    assert (await engine.set_budget(1 << 30)).budget_bytes <= 1 << 30


async def test_blocks_of_a_lost_device_are_elsewhere(model: Path) -> None:
    async with opened(model, threads=1) as alone:
        expected = await reply(alone.engine, REQUEST)
    async with two_devices(model, strict=False) as loaded:
        engine = loaded.engine
        await stop(engine, "cpu:1")
        assert (await reply(engine, REQUEST)).bits == expected.bits
        stats = await engine.stats()
        assert (stats.lost, stats.losses) == (("cpu:1",), 1)
        assert stats.placement.devices == ("cpu:0",)
        [use] = stats.devices
        assert (use.name, use.blocks, use.has_head) == ("cpu:0", 3, True)
        with pytest.raises(PlacementError, match="cpu:1 is not attached"):
            await engine.place("0=cpu:1")
        assert (await engine.set_budget(1 << 30)).frames == 3


async def test_without_any_device_there_is_nothing_to_tell(engine: Engine) -> None:
    await stop(engine, "cpu:1", "cpu:0")
    with pytest.raises(Stopped):
        await engine.stats()
