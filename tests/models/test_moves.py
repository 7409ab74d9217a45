"""Blocks change devices in the middle of a reply, and nothing else changes: not a bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from jitllm.compose import Loaded
from jitllm.engine import Engine, Moved, Request, Sampling
from jitllm.errors import PlacementError
from tests.conftest import TinyModel
from tests.models.native import Reply, opened, reply

PROMPT = (1, 259, 75, 260, 269, 270, 271, 300, 12, 13)
REQUESTS = (
    Request(PROMPT, max_tokens=180),
    Request(PROMPT[:4], max_tokens=200, sampling=Sampling(temperature=0.8, seed=3)),
    Request(PROMPT[3:], max_tokens=160, sampling=Sampling(repeat_penalty=1.3)),
    Request((*PROMPT, *PROMPT, *PROMPT), max_tokens=150, chunk_tokens=5),
)
DEVICES = ("cpu:0", "cpu:1")
PAGE_SIZES = (("cpu:0", 16), ("cpu:1", 4))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Path:
    return tiny_model(request.param, "q8_0")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is given back is overwritten, so that a read after it would show."""
    monkeypatch.setenv("JITLLM_POISON", "1")


@asynccontextmanager
async def two_devices(model: Path, **choices: Any) -> AsyncIterator[Loaded]:
    choices = {
        "page_sizes": PAGE_SIZES,
        "threads": 2,
        "strict": True,
        "move_share": 0.99,
        **choices,
    }
    async with opened(model, devices=",".join(DEVICES), **choices) as loaded:
        yield loaded


async def quiet(model: Path, requests: Sequence[Request] = REQUESTS, **choices: Any) -> list[Reply]:
    """Each alone, on one device."""
    async with opened(model, threads=1, page_size_tokens=16, **choices) as loaded:
        return [await reply(loaded.engine, request) for request in requests]


async def num_blocks(engine: Engine) -> int:
    return (await engine.stats()).placement.num_blocks


async def following(engine: Engine, request: Request, seen: asyncio.Event) -> Reply:
    """A reply; `seen` is set once it has begun."""
    whole = Reply()
    async for delta in engine.generate(replace(request, logits=True)):
        whole.add(delta)
        seen.set()
    return whole


async def moving(
    engine: Engine, requests: Sequence[Request], moves: Iterable[tuple[Sequence[int], str, bool]]
) -> tuple[list[list[Reply]], list[Moved]]:
    """What `requests` are answered, each again and again for as long as there is something to move.

    moves: (blocks, where to, whether the head goes along), from when every reply has begun.
    """
    seen = [asyncio.Event() for _ in requests]
    is_over = asyncio.Event()

    async def asking(request: Request, event: asyncio.Event) -> list[Reply]:
        replies = [await following(engine, request, event)]
        while not is_over.is_set():
            replies.append(await following(engine, request, event))
        return replies

    async def in_turn() -> list[Moved]:
        try:
            await asyncio.gather(*(event.wait() for event in seen))
            return [await engine.move(blocks, to, head=head) for blocks, to, head in moves]
        finally:
            is_over.set()

    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(asking(request, event))
            for request, event in zip(requests, seen, strict=True)
        ]
        done = tasks.create_task(in_turn())
    return [task.result() for task in asked], done.result()


def random_moves(
    dice: random.Random, num_blocks: int, devices: Sequence[str]
) -> Iterator[tuple[list[int], str, bool]]:
    """Some blocks, maybe with the head, to where they are not; all begin at the first device."""
    placement = [devices[0]] * (num_blocks + 1)
    while True:
        to = dice.choice(devices)
        everything = range(num_blocks + 1)
        chosen = [b for b in everything if dice.random() < 0.5 and placement[b] != to]
        for block in chosen:
            placement[block] = to
        if chosen:
            yield [b for b in chosen if b < num_blocks], to, num_blocks in chosen


def bits(replies: Sequence[Sequence[Reply]]) -> list[set[Any]]:
    """The different answers to each request."""
    return [{reply.bits for reply in same} for same in replies]


def one_each(replies: Sequence[Reply]) -> list[set[Any]]:
    return bits([[reply] for reply in replies])


@pytest.mark.parametrize(
    "placement", ["0=cpu:0,1=cpu:1,*=cpu:0", "0=cpu:1,1=cpu:0,*=cpu:1", "*=cpu:0,head=cpu:1"]
)
async def test_a_route_through_two_devices_gives_the_same_answer(
    model: Path, placement: str
) -> None:
    expected = await quiet(model)
    async with two_devices(model, placement=placement) as loaded:
        replies = await asyncio.gather(*(reply(loaded.engine, request) for request in REQUESTS))
        assert [r.bits for r in replies] == [e.bits for e in expected]


async def test_all_blocks_go_there_and_back_again_and_again(model: Path) -> None:
    expected = await quiet(model)
    async with two_devices(model) as loaded:
        blocks = range(await num_blocks(loaded.engine))
        moves = [(blocks, to, True) for _ in range(3) for to in ("cpu:1", "cpu:0")]
        replies, done = await moving(loaded.engine, REQUESTS, moves)
        assert bits(replies) == one_each(expected)
        stats = await loaded.engine.stats()
        assert str(stats.placement) == f"0-{len(blocks) - 1}=cpu:0,head=cpu:0"
        assert stats.moves == 6
    assert all(moved.bytes_before + moved.bytes_paused > 0 for moved in done)


@pytest.mark.parametrize(("seed", "kv_type"), [*((n, "f16") for n in range(4)), (4, "q8_0")])
async def test_random_blocks_with_holes_go_anywhere(model: Path, seed: int, kv_type: str) -> None:
    expected = await quiet(model, kv_type=kv_type)
    dice = random.Random(seed)
    async with two_devices(model, kv_type=kv_type) as loaded:
        moves = random_moves(dice, await num_blocks(loaded.engine), DEVICES)
        replies, _ = await moving(loaded.engine, REQUESTS, islice(moves, 6))
        assert bits(replies) == one_each(expected)


async def test_nothing_is_computed_again(model: Path) -> None:
    request = Request(PROMPT, max_tokens=200)
    async with two_devices(model) as loaded:
        blocks = range(await num_blocks(loaded.engine))
        moves = [(blocks, to, True) for _ in range(3) for to in ("cpu:1", "cpu:0")]
        (replies,), _ = await moving(loaded.engine, [request], moves)
        stats = await loaded.engine.stats()
        assert {len(reply.ids) for reply in replies} == {200}
        assert stats.steps == 200 * len(replies)  # the first token comes with the prompt


async def test_what_is_left_behind_is_given_back(model: Path) -> None:
    async with two_devices(model) as loaded:
        engine = loaded.engine
        await reply(engine, REQUESTS[0])
        before = (await engine.stats()).pages
        blocks = range(before.blocks)
        for _ in range(3):
            await engine.move(blocks, "cpu:1", head=True)
            await engine.move(blocks, "cpu:0", head=True)
        await reply(engine, REQUESTS[0])
        after = await engine.stats()
        assert after.kv_bytes == 0
        assert after.pages.fixed_bytes == before.fixed_bytes
        assert after.pages.resident == before.resident


async def test_a_move_that_cannot_be_is_refused_and_changes_nothing(model: Path) -> None:
    async with two_devices(model, placement="0=cpu:0!,*=cpu:0") as loaded:
        engine = loaded.engine
        n = await num_blocks(engine)
        before = str((await engine.stats()).placement)
        for blocks, to, why in (
            ([0], "cpu:1", "pinned"),
            ([n], "cpu:1", f"blocks 0 to {n - 1}"),
            ([1], "cpu:7", "cpu:7 is not attached"),
            ([1], "cpu:0", "on cpu:0 already"),
        ):
            with pytest.raises(PlacementError, match=why):
                await engine.move(blocks, to)
        assert str((await engine.stats()).placement) == before
        assert (await reply(engine, REQUESTS[0])).ids


async def test_two_moves_of_the_same_blocks_do_not_meet(model: Path) -> None:
    async with two_devices(model) as loaded:
        engine = loaded.engine
        results = await asyncio.gather(
            *(engine.move([1], "cpu:1") for _ in range(3)), return_exceptions=True
        )
        assert sum(isinstance(result, Moved) for result in results) == 1
        refused = [result for result in results if isinstance(result, PlacementError)]
        assert len(refused) == 2
        assert all("being moved already" in str(error) for error in refused)


async def test_others_have_their_turn_while_what_moved_away_is_given_back(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device that a block left answers before all of its pages are gone."""
    from actors.device import Device
    from actors.messages.device import DeviceStatsRequest, Drop
    from jitllm.memory.pages import KvPages

    log: list[str] = []
    receive, clear = Device.receive, KvPages.clear

    asked: list[asyncio.Task[Any]] = []

    async def noting(self: Any, message: Any) -> object:
        if self.context.me.name == "device cpu:0":
            log.append(type(message).__name__)
        if isinstance(message, Drop):
            asked.append(asyncio.create_task(self.context.me.ask(DeviceStatsRequest())))
        return await receive(self, message)

    def counting(self: Any, *most_bytes: int) -> bool:
        log.append("clear" if self._dropped else "")
        return clear(self, *most_bytes)

    monkeypatch.setattr(Device, "receive", noting)
    monkeypatch.setattr(KvPages, "clear", counting)
    monkeypatch.setattr("actors.device.CLEAR_BYTES", 1)
    request = Request(PROMPT * 20, max_tokens=40)
    [expected] = await quiet(model, [request])
    seen = asyncio.Event()
    async with two_devices(model, page_sizes=(("cpu:0", 1), ("cpu:1", 4))) as loaded:
        following_it = asyncio.create_task(following(loaded.engine, request, seen))
        await seen.wait()
        await loaded.engine.move([0], "cpu:1")
        assert (await following_it).bits == expected.bits
        stats = await loaded.engine.stats()
        await asyncio.gather(*asked)
    assert stats.moves == 1
    cleared = [index for index, what in enumerate(log) if what == "clear"]
    assert len(cleared) > 200  # a set at a time
    first, last = cleared[0], cleared[-1]
    assert log[first - 1] == "Drop"
    assert "DeviceStatsRequest" in log[first:last]


async def test_a_corrupted_page_shows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: one wrong byte of a history that moves is another answer."""
    import ctypes

    from actors.device import Device

    expected = await quiet(model)
    unpack = Device._unpack

    async def corrupted(self: Any, parcel: Any) -> Any:
        if parcel.num_bytes:
            middle = parcel.data.handle.address + parcel.data.offset + parcel.num_bytes // 2
            ctypes.memset(middle // 64 * 64, 0x3C, 64)
        return await unpack(self, parcel)

    monkeypatch.setattr(Device, "_unpack", corrupted)
    async with two_devices(model) as loaded:
        blocks = range(await num_blocks(loaded.engine))
        moves = [(blocks, to, False) for to in ("cpu:1", "cpu:0")]
        replies, _ = await moving(loaded.engine, REQUESTS, moves)
        assert bits(replies) != one_each(expected)
