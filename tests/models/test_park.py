"""Requests wait without pages in the middle of a reply, and nothing else changes: not a bit."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jitllm.compose import Loaded
from jitllm.engine import Engine, EngineStats, ParkedIn, Request, Sampling, SequenceState
from jitllm.errors import DiskFull, JitllmError, UnknownSession
from tests.conftest import TinyModel
from tests.models.native import Reply, opened, reply

PROMPT = (1, 259, 75, 260, 269, 270, 271, 300, 12, 13)
REQUESTS = (
    Request(PROMPT, max_tokens=180, name="plain"),
    Request(PROMPT[:4], max_tokens=200, sampling=Sampling(temperature=0.8, seed=3), name="drawn"),
    Request(PROMPT[3:], max_tokens=160, sampling=Sampling(repeat_penalty=1.3), name="penalty"),
    Request(PROMPT * 6, max_tokens=150, chunk_tokens=5, name="long"),
)
NAMES = [request.name for request in REQUESTS]
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
async def two_devices(model: Path, folder: Path, **choices: Any) -> AsyncIterator[Loaded]:
    choices = {
        "page_sizes": PAGE_SIZES,
        "threads": 2,
        "strict": True,
        "move_share": 0.99,
        "kv_cache": str(folder),
        **choices,
    }
    async with opened(model, devices=",".join(DEVICES), **choices) as loaded:
        yield loaded


async def quiet(model: Path, requests: Sequence[Request] = REQUESTS) -> list[Reply]:
    """Each alone, on one device."""
    async with opened(model, threads=1, page_size_tokens=16) as loaded:
        return [await reply(loaded.engine, request) for request in requests]


def all_of(engine: Engine, requests: Sequence[Request]) -> list[asyncio.Task[Reply]]:
    return [asyncio.create_task(reply(engine, request)) for request in requests]


async def parking(engine: Engine, dice: random.Random, tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Park and resume at random until all replies are there; at the end nobody is parked."""
    parked: set[str] = set()
    while not all(task.done() for task in tasks):
        name = dice.choice(NAMES)
        to: ParkedIn = dice.choice(["disk", "memory"])
        try:
            if name in parked:
                parked.discard(name)
                await engine.resume(name)
            else:
                await engine.park(name, to)
                parked.add(name)
        except UnknownSession:  # it is done
            parked.discard(name)
        if len(parked) >= sum(not task.done() for task in tasks):
            for one in tuple(parked):
                parked.discard(one)
                await engine.resume(one)
        await asyncio.sleep(dice.random() * 0.01)


@pytest.mark.parametrize("seed", range(3))
async def test_parks_at_random_moments_change_nothing(
    model: Path, tmp_path: Path, seed: int
) -> None:
    expected = await quiet(model)
    async with two_devices(model, tmp_path, placement="0=cpu:0,1=cpu:1,*=cpu:0") as loaded:
        tasks = all_of(loaded.engine, REQUESTS)
        await parking(loaded.engine, random.Random(seed), tasks)
        replies = [await task for task in tasks]
        stats = await loaded.engine.stats()
    assert [r.bits for r in replies] == [e.bits for e in expected]
    assert stats.park_totals.resumes > 3


@pytest.mark.parametrize("seed", range(3))
async def test_parks_while_blocks_move_change_nothing(
    model: Path, tmp_path: Path, seed: int
) -> None:
    expected = await quiet(model)
    dice = random.Random(seed)
    async with two_devices(model, tmp_path) as loaded:
        engine = loaded.engine
        tasks = all_of(engine, REQUESTS)
        mover = asyncio.create_task(_moving(engine, random.Random(seed), tasks))
        await parking(engine, dice, tasks)
        replies = [await task for task in tasks]
        await mover
        stats = await engine.stats()
    assert [r.bits for r in replies] == [e.bits for e in expected]
    assert stats.park_totals.resumes > 3
    assert stats.moves > 3
    assert stats.kv_bytes == stats.parked_disk_bytes == stats.parked_memory_bytes == 0


async def _moving(engine: Engine, dice: random.Random, tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Random blocks go anywhere, until all replies are there."""
    placement = (await engine.stats()).placement
    owners = [*placement.blocks, placement.head]
    head = len(owners) - 1
    while not all(task.done() for task in tasks):
        to = dice.choice(DEVICES)
        chosen = [b for b, owner in enumerate(owners) if owner != to and dice.random() < 0.5]
        if chosen:
            await engine.move([b for b in chosen if b < head], to, head=head in chosen)
            for block in chosen:
                owners[block] = to
        await asyncio.sleep(0)


async def until_tokens(engine: Engine, name: str, count: int) -> None:
    """Wait until a reply has so many tokens."""
    while True:
        states = [s for s in await engine.sessions() if s.name == name]
        if states and states[0].generated_tokens >= count:
            return
        await asyncio.sleep(0)


async def until_stats(engine: Engine, condition: Callable[[EngineStats], bool]) -> EngineStats:
    """Wait until the engine says so."""
    while True:
        stats = await engine.stats()
        if condition(stats):
            return stats
        await asyncio.sleep(0)


async def one_state(engine: Engine, name: str) -> Any:
    [state] = [state for state in await engine.sessions() if state.name == name]
    return state


async def pages_of(engine: Any, sequence: int) -> bytes:
    """Keys and values of the first 40 positions of a sequence, as they lie in its pages."""
    from actors.messages.device import Pack, Piece

    placement = (await engine.stats()).placement
    found = b""
    for block, owner in enumerate(placement.blocks):
        pack = Pack((block,), (Piece(sequence, 0, (0,) * 40),), True, placement.epoch, 0)
        found += (await engine._sites[owner].device.ask(pack)).data
    return found


@pytest.mark.parametrize("to", ["disk", "memory"])
async def test_what_was_in_pages_is_there_again_byte_for_byte(
    model: Path, tmp_path: Path, to: ParkedIn
) -> None:
    request = replace(REQUESTS[0], max_tokens=450)
    async with two_devices(model, tmp_path, placement="0=cpu:0,1=cpu:1,*=cpu:0") as loaded:
        engine = loaded.engine
        [task] = all_of(engine, [request])
        await until_tokens(engine, "plain", 40)
        before = await pages_of(engine, 0)
        [parked] = await engine.park("plain", to)
        assert parked.state is SequenceState.PARKED
        assert parked.parked_in == to
        assert parked.parked_bytes == parked.kv_bytes > len(before)
        assert (await engine.stats()).kv_bytes == 0  # the pages are free
        await engine.move([1], "cpu:0")
        await engine.resume("plain")
        await until_tokens(engine, "plain", parked.generated_tokens + 1)
        after = await pages_of(engine, 0)
        assert (await one_state(engine, "plain")).state is SequenceState.RUNNING
        assert after == before
        assert any(before)
        task.cancel()


async def test_nothing_is_computed_again(model: Path, tmp_path: Path) -> None:
    request = replace(REQUESTS[0], max_tokens=200)
    async with two_devices(model, tmp_path) as loaded:
        engine = loaded.engine
        [task] = all_of(engine, [request])
        for _ in range(5):
            try:
                await engine.park("plain")
            except UnknownSession:
                await asyncio.sleep(0.001)
                continue
            await engine.resume("plain")
            await asyncio.sleep(0.01)
        assert len((await task).ids) == 200
        stats = await engine.stats()
    assert stats.steps == 200  # the first token comes with the prompt
    assert stats.park_totals.parks > 1


async def test_a_prompt_can_be_parked_half_way(model: Path, tmp_path: Path) -> None:
    request = replace(REQUESTS[3], chunk_tokens=1, max_tokens=20)
    [expected] = await quiet(model, [request])
    async with two_devices(model, tmp_path) as loaded:
        engine = loaded.engine
        [task] = all_of(engine, [request])
        await until_stats(engine, lambda stats: stats.steps > 1)
        [parked] = await engine.park("long")
        assert parked.generated_tokens == 0
        assert parked.parked_bytes > 0
        await engine.resume("long")
        assert (await task).bits == expected.bits
        stats = await engine.stats()
    assert stats.steps == len(request.prompt) + 19


async def test_what_others_computed_meanwhile_need_not_come_back(
    model: Path, tmp_path: Path
) -> None:
    """Pages that are shared are shared again, and are not written to."""
    first, second = REQUESTS[3], replace(REQUESTS[3], name="other", max_tokens=100)
    expected = await quiet(model, [first, second])
    async with two_devices(model, tmp_path) as loaded:
        engine = loaded.engine
        [one] = all_of(engine, [first])
        await until_tokens(engine, "long", 30)
        [two] = all_of(engine, [second])
        await until_tokens(engine, "other", 5)
        await engine.park("long")
        await engine.resume("long")
        replies = [await one, await two]
        totals = (await engine.stats()).park_totals
    assert [r.bits for r in replies] == [e.bits for e in expected]
    assert 0 < totals.bytes_in < totals.bytes_out


async def test_a_request_that_waits_is_parked_and_resumed_too(model: Path, tmp_path: Path) -> None:
    expected = await quiet(model, REQUESTS[:2])
    async with two_devices(model, tmp_path, max_batch=1) as loaded:
        engine = loaded.engine
        first, second = all_of(engine, REQUESTS[:2])
        await until_tokens(engine, "plain", 1)
        [parked] = await engine.park("drawn")
        assert (parked.state, parked.kv_bytes, parked.parked_in) == (SequenceState.PARKED, 0, "")
        assert (await first).bits == expected[0].bits
        assert (await engine.stats()).parked == 1
        await engine.resume("drawn")
        assert (await second).bits == expected[1].bits


async def test_what_cannot_be_is_refused_and_the_reply_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await quiet(model, REQUESTS[:1])
    async with two_devices(model, tmp_path / "there" / "none") as loaded:
        engine = loaded.engine
        with pytest.raises(UnknownSession, match="no request 'plain' under way"):
            await engine.park("plain")
        with pytest.raises(UnknownSession):
            await engine.resume("plain")
        [task] = all_of(engine, REQUESTS[:1])
        await until_tokens(engine, "plain", 3)

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(DiskFull, match="free some space"):
                await engine.park("plain")
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", lambda *_: None)
            patch.setattr(os, "pwrite", full)
            with pytest.raises(DiskFull):
                await engine.park("plain")
        (tmp_path / "there" / "none").rmdir()
        (tmp_path / "there" / "none").write_text("in the way")
        with pytest.raises(JitllmError, match="-kv-cache"):
            await engine.park("plain")
        assert (await one_state(engine, "plain")).state is SequenceState.RUNNING
        assert (await task).bits == expected[0].bits
        totals = (await engine.stats()).park_totals
    assert (totals.parks, totals.failures) == (0, 3)


@pytest.mark.parametrize("fallback", [True, False])
async def test_a_history_that_cannot_be_read_is_computed_again_or_says_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    expected = await quiet(model, REQUESTS[:1])
    async with two_devices(model, tmp_path, fallback=fallback) as loaded:
        engine = loaded.engine
        [task] = all_of(engine, REQUESTS[:1])
        await until_tokens(engine, "plain", 30)
        await engine.park("plain")
        monkeypatch.setattr(os, "pread", lambda *_: b"")
        await engine.resume("plain")
        if fallback:
            assert (await task).bits == expected[0].bits
        else:
            with pytest.raises(JitllmError, match="too early"):
                await task
        stats = await engine.stats()
        assert stats.park_totals.failures == 1
        assert stats.kv_bytes == stats.parked_disk_bytes == 0


async def test_a_corrupted_history_shows(model: Path, tmp_path: Path) -> None:
    """These tests can fail: one wrong byte of what was parked is another answer."""
    from jitllm.memory.parked import Parked

    put = Parked.put

    def corrupted(self: Parked, blocks: Any, start: int, stop: int, data: bytes) -> None:
        put(self, blocks, start, stop, data[:-64] + b"\x3c" * 64)  # in every block's window

    expected = await quiet(model, REQUESTS[:1])
    async with two_devices(model, tmp_path, share_prefixes=False) as loaded:
        [task] = all_of(loaded.engine, REQUESTS[:1])
        await until_tokens(loaded.engine, "plain", 30)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Parked, "put", corrupted)
            await loaded.engine.park("plain")
        await loaded.engine.resume("plain")
        assert (await task).bits != expected[0].bits


async def test_nothing_is_left_of_a_parked_request_whose_client_goes(
    model: Path, tmp_path: Path
) -> None:
    async with two_devices(model, tmp_path) as loaded:
        engine = loaded.engine
        fixed = (await engine.stats()).pages.fixed_bytes
        tasks = all_of(engine, REQUESTS[:2])
        for name, to in (("plain", "disk"), ("drawn", "memory")):
            await until_tokens(engine, name, 5)
            await engine.park(name, to)
        stats = await engine.stats()
        assert stats.parked == 2
        assert stats.parked_disk_bytes > 0
        assert stats.parked_memory_bytes > 0
        assert os.listdir(tmp_path) == []  # a file without a name
        assert num_files(tmp_path) == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stats = await until_stats(engine, lambda stats: not stats.parked)
        assert stats.parked_disk_bytes == stats.parked_memory_bytes == 0
        assert num_files(tmp_path) == 0
        assert (await engine.sessions()) == ()
        await reply(engine, replace(REQUESTS[0], max_tokens=1))
        assert (await engine.stats()).pages.fixed_bytes == fixed


def num_files(folder: Path) -> int:
    """Files of a folder that this process has open."""
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            names.append(os.readlink(fd))
        except OSError:
            continue
    return sum(name.startswith(f"{folder}/") for name in names)


async def test_memory_that_is_parked_is_charged_and_closing_gives_it_back(
    model: Path, tmp_path: Path
) -> None:
    async with two_devices(model, tmp_path) as loaded:
        engine = loaded.engine
        fixed = (await engine.stats()).pages.fixed_bytes
        [task] = all_of(engine, REQUESTS[:1])
        await until_tokens(engine, "plain", 5)
        [parked] = await engine.park("plain", "memory")
        charged = fixed + parked.parked_bytes
        await until_stats(engine, lambda stats: stats.pages.fixed_bytes == charged)
    ended = await task
    assert ended.finish == "cancelled"


EIGHT = tuple(
    Request(
        (*PROMPT, *range(20 + i, 26 + i)),
        max_tokens=90,
        sampling=Sampling(temperature=0.7, seed=i, repeat_penalty=1.1) if i % 2 else Sampling(),
        name=f"r{i}",
    )
    for i in range(8)
)


@pytest.mark.parametrize("level", [1, 50, 100])
async def test_eight_take_turns_where_there_is_room_for_two(
    model: Path, tmp_path: Path, level: int
) -> None:
    expected = await quiet(model, EIGHT)
    budget = await budget_for(model, tmp_path, 2)
    async with two_devices(model, tmp_path, fairness=level, maxmem_bytes=budget) as loaded:
        engine = loaded.engine
        tasks = all_of(engine, EIGHT)
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, (await engine.stats()).running)
            await asyncio.sleep(0)
        stats = await engine.stats()
        replies = [await task for task in tasks]
    assert [r.bits for r in replies] == [e.bits for e in expected]
    assert most == 2
    if level == 1:  # a slice is longer than a reply
        assert stats.park_totals.parks == 0
    else:
        assert stats.park_totals.slices == stats.park_totals.parks > 0
    assert stats.park_totals.resumes == stats.park_totals.parks
    assert stats.kv_bytes == stats.parked_disk_bytes == 0
    assert num_files(tmp_path) == 0


async def budget_for(model: Path, folder: Path, count: int) -> int:
    """Memory that all weights fit in beside the keys and values of so many sequences."""
    async with two_devices(model, folder) as loaded:
        engine = loaded.engine
        tasks = all_of(engine, EIGHT[:count])
        stats = await until_stats(engine, lambda stats: stats.running == count)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    weights = max(extent.length for extent in loaded.header.blocks)
    return stats.pages.fixed_bytes + weights
