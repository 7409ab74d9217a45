"""A device dies while a request is parked, or on its way in or out of its pages: the reply stays
the same, bit for bit, and what was parked is not computed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.messages.device import Close, Open, Own, Pack, Restore, Step
from jitllm.compose import Loaded
from jitllm.engine import Engine, EngineStats, ParkedIn, Request, Sampling, SequenceState
from tests.conftest import TinyModel
from tests.models.deaths import Holdings, Reaper, at
from tests.models.native import opened, reply

PROMPT = (1, 259, 75, 260, 269, 270, 271, 300, 12, 13)
PATIENT = Request(PROMPT, max_tokens=300, name="patient")
OTHER = Request(
    PROMPT[3:], max_tokens=120, sampling=Sampling(temperature=0.8, seed=3), name="other"
)
FIRST, SECOND = NAMES = ("cpu:0", "cpu:1")
PLACES: tuple[ParkedIn, ...] = ("disk", "memory")
Bits = tuple[Any, ...]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("gemma3", "q8_0")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Bits]:
    """The bits of each reply, alone and in peace."""

    async def ask() -> dict[str, Bits]:
        async with opened(model, threads=1) as loaded:
            return {r.name: (await reply(loaded.engine, r)).bits for r in (PATIENT, OTHER)}

    return asyncio.run(ask())


@pytest.fixture
def reaper(monkeypatch: pytest.MonkeyPatch) -> Reaper:
    """Parcels are small too, so that a history travels in several."""
    monkeypatch.setenv("JITLLM_POISON", "1")
    monkeypatch.setattr("actors.park.PARCEL_BYTES", 1 << 15)
    return Reaper.installed(monkeypatch)


@asynccontextmanager
async def two_devices(model: Path, folder: Path, **more: Any) -> AsyncIterator[Loaded]:
    before = Holdings.now()
    choices: dict[str, Any] = {
        "devices": ",".join(NAMES),
        "page_sizes": ((FIRST, 16), (SECOND, 4)),
        "placement": "0-2=cpu:0,*=cpu:1",
        "threads": 2,
        "strict": True,
        "move_share": 0.99,
        "kv_cache": str(folder),
        **more,
    }
    async with asyncio.timeout(60), opened(model, **choices) as loaded:
        yield loaded
        stats = await loaded.engine.stats()
        assert (stats.running, stats.waiting, stats.parked, stats.kv_bytes) == (0, 0, 0, 0)
        assert stats.parked_disk_bytes == stats.parked_memory_bytes == 0
    await before.are_back()


async def begun(engine: Engine, num_tokens: int = 40) -> asyncio.Task[Bits]:
    """The bits of the reply to `PATIENT`, which has so many tokens."""

    async def bits() -> Bits:
        return (await reply(engine, PATIENT)).bits

    task = asyncio.create_task(bits())
    while True:
        if any(state.generated_tokens >= num_tokens for state in await engine.sessions()):
            return task
        await asyncio.sleep(0)


async def until(engine: Engine, is_so: Callable[[EngineStats], object]) -> None:
    """Wait for what an engine says of itself."""
    while True:
        if is_so(await engine.stats()):
            return
        await asyncio.sleep(0)


async def steps_to_end(engine: Engine, task: asyncio.Task[Bits]) -> tuple[int, int]:
    """(steps that a parked request takes from its resumption on, tokens that it lacked)."""
    [parked] = await engine.sessions()
    before = (await engine.stats()).steps
    await engine.resume(PATIENT.name)
    await asyncio.wait([task])
    assert PATIENT.max_tokens is not None
    lacked = PATIENT.max_tokens - parked.generated_tokens
    return (await engine.stats()).steps - before, lacked


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize("how", ["at rest", "beside a reply", "for good"])
async def test_a_death_costs_nothing_of_what_is_parked(
    model: Path,
    tmp_path: Path,
    expected: dict[str, Bits],
    reaper: Reaper,
    how: str,
    device: str,
    to: ParkedIn,
) -> None:
    async with two_devices(model, tmp_path) as loaded:
        engine = loaded.engine
        task = await begun(engine)
        [parked] = await engine.park(PATIENT.name, to)
        assert parked.parked_bytes > 0
        reaper.has_successor = how != "for good"
        if how == "beside a reply":
            reaper.dies = at(device, Step, 20)
            assert (await reply(engine, OTHER)).bits == expected["other"]
        else:
            reaper.kill(f"device {device}")
        num_steps, lacked = await steps_to_end(engine, task)
        assert await task == expected["patient"]
        assert num_steps == lacked
        stats = await engine.stats()
        assert reaper.num_deaths == stats.losses == 1
        assert stats.lost == ((device,) if how == "for good" else ())
        assert (await reply(engine, OTHER)).bits == expected["other"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("has_successor", [True, False])
async def test_a_death_while_a_history_comes_back_costs_nothing_of_it(
    model: Path,
    tmp_path: Path,
    expected: dict[str, Bits],
    reaper: Reaper,
    has_successor: bool,
    number: int,
    device: str,
    late: bool,
) -> None:
    async with two_devices(model, tmp_path, share_prefixes=False) as loaded:
        engine = loaded.engine
        task = await begun(engine)
        await engine.park(PATIENT.name)
        reaper.has_successor, reaper.late = has_successor, late
        reaper.dies = at(device, Restore, number)
        num_steps, lacked = await steps_to_end(engine, task)
        assert await task == expected["patient"]
        assert num_steps == lacked
        assert reaper.num_deaths == (await engine.stats()).losses == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize(("kind", "number"), [(Pack, 1), (Pack, 3), (Close, 1)])
async def test_a_death_while_a_history_leaves_changes_no_reply(
    model: Path,
    tmp_path: Path,
    expected: dict[str, Bits],
    reaper: Reaper,
    kind: type,
    number: int,
    device: str,
    late: bool,
) -> None:
    """Who was to be parked is, with what could be saved; the other goes on."""
    async with two_devices(model, tmp_path) as loaded:
        engine = loaded.engine
        other = asyncio.create_task(reply(engine, OTHER))
        task = await begun(engine)
        reaper.dies, reaper.late = at(device, kind, number), late
        [parked] = await engine.park(PATIENT.name)
        assert parked.state is SequenceState.PARKED
        assert (parked.parked_bytes > 0) == (kind is Close)
        assert (await other).bits == expected["other"]
        assert not task.done()
        await engine.resume(PATIENT.name)
        assert await task == expected["patient"]
        assert reaper.num_deaths == (await engine.stats()).losses == 1


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize("is_noticed", [False, True])
async def test_who_is_parked_while_a_device_is_dead_goes_on_later(
    model: Path,
    tmp_path: Path,
    expected: dict[str, Bits],
    reaper: Reaper,
    is_noticed: bool,
    device: str,
) -> None:
    async with two_devices(model, tmp_path) as loaded:
        engine = loaded.engine
        task = await begun(engine)
        reaper.kill(f"device {device}")
        if is_noticed:
            await until(engine, lambda stats: stats.losses)
        [parked] = await engine.park(PATIENT.name)
        assert parked.state is SequenceState.PARKED
        assert (await reply(engine, OTHER)).bits == expected["other"]
        await engine.resume(PATIENT.name)
        assert await task == expected["patient"]


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize("kind", [Open, Own])
async def test_who_is_resumed_while_devices_begin_again_goes_on_then(
    model: Path,
    tmp_path: Path,
    expected: dict[str, Bits],
    reaper: Reaper,
    kind: type,
    device: str,
) -> None:
    """Another one dies of what the recovery, or the resumption, asks of it."""
    async with two_devices(model, tmp_path) as loaded:
        engine = loaded.engine
        task = await begun(engine)
        await engine.park(PATIENT.name)
        other = asyncio.create_task(reply(engine, replace(OTHER, max_tokens=60)))
        await until(engine, lambda stats: stats.running)
        reaper.dies = at(device, kind, 1)
        for name in NAMES:
            reaper.kill(f"device {name}")
        await engine.resume(PATIENT.name)
        assert await task == expected["patient"]
        assert (await other).ids == list(expected["other"][:60])
        assert reaper.num_deaths == 3


async def test_blocks_move_between_a_death_and_the_resumption(
    model: Path, tmp_path: Path, expected: dict[str, Bits], reaper: Reaper
) -> None:
    async with two_devices(model, tmp_path) as loaded:
        engine = loaded.engine
        task = await begun(engine)
        await engine.park(PATIENT.name)
        for to in (SECOND, FIRST):
            reaper.kill(f"device {to}")
            assert (await reply(engine, OTHER)).bits == expected["other"]
            await engine.move(range((await engine.stats()).placement.num_blocks), to, head=True)
        num_steps, lacked = await steps_to_end(engine, task)
        assert await task == expected["patient"]
        assert num_steps == lacked
