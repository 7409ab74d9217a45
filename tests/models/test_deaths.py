"""A device dies at a named point: its sequences catch up, and every reply stays the same, bit for
bit. Its blocks go to its successor, or, where none comes, to a device that lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.device import Device
from actors.mailbox import Lost, Stopped
from actors.messages.device import Adopt, Bring, Hand, Open, Own, Pack, Prepare, Step, Steps, Unpack
from jitllm.compose import Loaded
from jitllm.engine import Engine, Request, Sampling
from jitllm.errors import JitllmError
from tests.conftest import TinyModel
from tests.models.deaths import Holdings, Reaper, at
from tests.models.native import Reply, opened

PROMPT = (1, 259, 75, 260, 269, 270, 271, 300, 12, 13)
REQUESTS = (
    Request(PROMPT, max_tokens=220, logits=True),
    Request(PROMPT[:4], max_tokens=200, sampling=Sampling(temperature=0.8, seed=3), logits=True),
    Request((*PROMPT, *PROMPT, *PROMPT), max_tokens=180, chunk_tokens=5, logits=True),
    Request(PROMPT[2:], max_tokens=240),
)
FIRST, SECOND = "cpu:0", "cpu:1"
NAMES = (FIRST, SECOND)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("gemma3", "q8_0")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[Any, ...]]:
    """The bits of each reply, alone and in peace."""

    async def ask() -> list[tuple[Any, ...]]:
        async with opened(model, threads=1) as loaded:
            return [(await one_reply(loaded.engine, request)).bits for request in REQUESTS]

    return asyncio.run(ask())


@pytest.fixture
def reaper(monkeypatch: pytest.MonkeyPatch) -> Reaper:
    monkeypatch.setenv("JITLLM_POISON", "1")
    return Reaper.installed(monkeypatch)


@asynccontextmanager
async def two_devices(model: Path, **choices: Any) -> AsyncIterator[Loaded]:
    choices = {
        "devices": ",".join(NAMES),
        "page_sizes": ((FIRST, 16), (SECOND, 4)),
        "threads": 2,
        "strict": True,
        "move_share": 0.99,
        **choices,
    }
    async with asyncio.timeout(60), opened(model, **choices) as loaded:
        yield loaded


async def one_reply(engine: Engine, request: Request) -> Reply:
    """A reply whose pieces are put together; raises its error."""
    whole = Reply()
    async for delta in engine.generate(request):
        whole.add(delta)
    return whole


async def bits(engine: Engine, requests: Sequence[Request] = REQUESTS) -> list[tuple[Any, ...]]:
    """Of replies that run at once."""
    return [r.bits for r in await asyncio.gather(*(one_reply(engine, r) for r in requests))]


async def begun(engine: Engine) -> list[asyncio.Task[Reply]]:
    """Replies, once each has a token."""
    seen = [asyncio.Event() for _ in REQUESTS]

    async def follow(request: Request, event: asyncio.Event) -> Reply:
        whole = Reply()
        async for delta in engine.generate(request):
            whole.add(delta)
            event.set()
        return whole

    replies = [asyncio.create_task(follow(*pair)) for pair in zip(REQUESTS, seen, strict=True)]
    await asyncio.gather(*(event.wait() for event in seen))
    return replies


async def everything_works(engine: Engine, expected: list[tuple[Any, ...]]) -> None:
    """Replies, and a move of all blocks under them, to every device that there is."""
    stats = await engine.stats()
    assert (stats.running, stats.waiting, stats.kv_bytes) == (0, 0, 0)
    for to in (use.name for use in stats.devices):
        replies = await begun(engine)
        if set((await engine.stats()).placement.devices) != {to}:
            await engine.move(range(stats.placement.num_blocks), to, head=True)
        assert [(await reply).bits for reply in replies] == expected
    stats = await engine.stats()
    assert stats.kv_bytes == 0
    assert stats.pages.resident <= stats.pages.blocks
    held = [use for use in stats.devices if use.blocks]
    assert sum(use.blocks for use in held) == stats.pages.blocks
    assert all(use.resident == use.placed for use in stats.devices)


# --- with a successor --------------------------------------------------------------------------

POINTS = {
    "queued": ("0-2=cpu:0,*=cpu:1", Open, 4),
    "prompt": ("0-2=cpu:0,*=cpu:1", Step, 2),
    "decode": ("0-2=cpu:0,*=cpu:1", Step, 30),
    "decode-ahead": ("*=cpu:0", Steps, 1),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize("point", POINTS)
async def test_a_death_changes_no_reply(
    model: Path,
    expected: list[tuple[Any, ...]],
    reaper: Reaper,
    point: str,
    device: str,
    late: bool,
) -> None:
    placement, kind, number = POINTS[point]
    if point == "decode-ahead":
        placement = f"*={device},head={device}"
    before = Holdings.now()
    rows = 2 if point == "queued" else 8  # where two run, two are queued
    async with two_devices(model, placement=placement, max_batch=rows) as loaded:
        reaper.dies, reaper.late = at(device, kind, number), late
        if point == "decode-ahead":  # which is for those who want no logits
            assert (await bits(loaded.engine, REQUESTS[3:])) == expected[3:]
        assert await bits(loaded.engine) == expected
        assert reaper.num_deaths == 1
        stats = await loaded.engine.stats()
        assert stats.losses == 1
        assert stats.recovery_s > 0
        assert not stats.lost
        await everything_works(loaded.engine, expected)
    await before.are_back()


async def test_hidden_states_of_who_died_meanwhile_are_not_gone_on_with(
    model: Path, expected: list[tuple[Any, ...]], reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first device dies when it has answered, and before the second one reads."""
    receive, count = Device.receive, 0

    async def waiting(device: Device, message: Any) -> object:
        nonlocal count
        if isinstance(message, Step) and message.hidden is not None:
            count += 1
            if count == 12:
                assert reaper.runtime is not None
                await reaper.runtime.kill(f"device {FIRST}")
        return await receive(device, message)

    async with two_devices(model, placement="0-2=cpu:0,*=cpu:1") as loaded:
        monkeypatch.setattr(Device, "receive", waiting)
        assert await bits(loaded.engine) == expected
        assert (await loaded.engine.stats()).losses == 1
        await everything_works(loaded.engine, expected)


MOVE_POINTS = {
    "prepare": [(SECOND, Prepare), (SECOND, Bring), (FIRST, Pack), (SECOND, Unpack)],
    "hand-over": [(FIRST, Hand), (SECOND, Adopt)],
}
MOVE_CASES = [
    pytest.param(device, kind, id=f"{point}-{kind.__name__}")
    for point, cases in MOVE_POINTS.items()
    for device, kind in cases
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("device", "kind"), MOVE_CASES)
async def test_a_death_in_the_middle_of_a_move_changes_no_reply(
    model: Path,
    expected: list[tuple[Any, ...]],
    reaper: Reaper,
    device: str,
    kind: type,
    late: bool,
) -> None:
    before = Holdings.now()
    async with two_devices(model) as loaded:
        engine = loaded.engine
        blocks = range((await engine.stats()).placement.num_blocks)
        reaper.dies, reaper.late = at(device, kind, 1), late
        replies = await begun(engine)
        with pytest.raises(JitllmError, match="lost"):
            await engine.move(blocks, SECOND, head=True)
        assert reaper.num_deaths == 1
        placement = (await engine.stats()).placement
        assert set(placement.devices) == {FIRST}
        assert [(await reply).bits for reply in replies] == expected
        stats = await engine.stats()
        assert stats.losses == (device == FIRST), "only the source had computed anything"
        await everything_works(engine, expected)
    await before.are_back()


async def test_both_devices_die_again_and_again(
    model: Path, expected: list[tuple[Any, ...]], reaper: Reaper
) -> None:
    async with two_devices(model, placement="0-2=cpu:0,*=cpu:1") as loaded:
        for round in range(3):
            for name in NAMES:
                replies = await begun(loaded.engine)
                reaper.kill(f"device {name}")
                assert [(await reply).bits for reply in replies] == expected, round
        assert (await loaded.engine.stats()).losses == 6
        await everything_works(loaded.engine, expected)


# --- without one -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize("how", ["no successor", "dies again and again"])
async def test_blocks_of_a_device_that_does_not_come_back_go_to_the_other(
    model: Path, expected: list[tuple[Any, ...]], reaper: Reaper, how: str, device: str
) -> None:
    before = Holdings.now()
    async with two_devices(model, placement="0-2=cpu:0,*=cpu:1") as loaded:
        replies = await begun(loaded.engine)
        if how == "no successor":
            reaper.has_successor = False
        else:
            reaper.dies = at(device, Own, *range(1, 100))
        reaper.kill(f"device {device}")
        assert [(await reply).bits for reply in replies] == expected
        stats = await loaded.engine.stats()
        (other,) = set(NAMES) - {device}
        assert set(stats.placement.devices) == {other}
        assert stats.lost == (device,)
        assert stats.recovery_s > 0
        with pytest.raises(JitllmError, match=device):
            await loaded.engine.move([0], device)
        assert await bits(loaded.engine) == expected
    await before.are_back()


@pytest.mark.parametrize("device", NAMES)
async def test_without_fallback_requests_fail_and_say_why(
    model: Path, expected: list[tuple[Any, ...]], reaper: Reaper, device: str
) -> None:
    choices = {"placement": "0-2=cpu:0,*=cpu:1", "fallback": False}
    async with two_devices(model, **choices) as loaded:
        reaper.dies = at(device, Step, 10)
        results = await asyncio.gather(
            *(one_reply(loaded.engine, request) for request in REQUESTS), return_exceptions=True
        )
        for result in results:
            assert isinstance(result, Lost)
            assert f"device {device} was lost" in str(result)
        await everything_works(loaded.engine, expected)  # those that come later


async def test_without_any_device_requests_fail_and_say_why(model: Path, reaper: Reaper) -> None:
    async with two_devices(model, placement="0-2=cpu:0,*=cpu:1") as loaded:
        replies = await begun(loaded.engine)
        reaper.has_successor = False
        for name in NAMES:
            reaper.kill(f"device {name}")
        for result in await asyncio.gather(*replies, return_exceptions=True):
            assert isinstance(result, Stopped)
        with pytest.raises(Stopped, match="has stopped"):
            await one_reply(loaded.engine, replace(REQUESTS[0]))
