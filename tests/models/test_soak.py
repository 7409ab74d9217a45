"""Everything at once, for a while: replies, moves, budgets, parking, requests that come and go.

$JITLLM_SOAK_S says for how long; a minute, with `-m slow`, is a real test of patience.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from jitllm.engine import Engine, EngineStats, ParkedIn, Request, Sampling
from jitllm.errors import PlacementError, UnknownSession
from tests.conftest import TinyModel
from tests.models.deaths import Holdings
from tests.models.native import Reply, opened

SOAK_S = float(os.environ.get("JITLLM_SOAK_S", "8"))
NUM_SESSIONS = 8
NUM_STREAMS = 16
"""Replies at once where a budget of keys and values is too small for them."""
KV_BUDGET_BYTES = 300 << 10
MOVE_EVERY_S, PARK_EVERY_S = 0.05, 0.03
DEVICES = ("cpu:0", "cpu:1")
TEXT = tuple(range(7, 300, 3))


def request(number: int) -> Request:
    """One of some that begin alike, or not."""
    dice = random.Random(number)
    start = dice.choice((0, 0, 0, 11, 23))
    return Request(
        TEXT[start : start + dice.randint(1, 60)],
        max_tokens=dice.randint(20, 120),
        sampling=dice.choice((Sampling(), Sampling(temperature=0.8, seed=number))),
        chunk_tokens=dice.choice((None, 7)),
        logits=dice.random() < 0.5,
    )


REQUESTS = tuple(map(request, range(24)))


async def one_reply(engine: Engine, asked: Request) -> Reply:
    whole = Reply()
    async for delta in engine.generate(asked):
        whole.add(delta)
    return whole


@dataclass
class Soak:
    """Who does what; each stops soon after `is_over`. counts: what happened."""

    engine: Engine
    expected: list[tuple[Any, ...]]
    budgets: tuple[int, ...]
    sessions: tuple[str, ...]
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    counts: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def reply_again_and_again(self, name: str) -> None:
        while not self.is_over:
            number = self.dice.randrange(len(REQUESTS))
            whole = await one_reply(self.engine, replace(REQUESTS[number], name=name))
            assert whole.bits == self.expected[number], number
            self.counts["replies"] += 1

    async def come_and_leave(self) -> None:
        while not self.is_over:
            task = asyncio.create_task(one_reply(self.engine, self.dice.choice(REQUESTS)))
            await asyncio.wait([task], timeout=self.dice.random() * 0.3)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self.counts["cancelled"] += 1

    async def move(self, num_blocks: int) -> None:
        while not self.is_over:
            blocks = [b for b in range(num_blocks) if self.dice.random() < 0.5]
            to, head = self.dice.choice(DEVICES), self.dice.random() < 0.3
            try:
                await self.engine.move(blocks, to, head=head)
                self.counts["moves"] += 1
            except PlacementError:
                self.counts["refused moves"] += 1
            await asyncio.sleep(MOVE_EVERY_S)

    async def park_and_resume(self) -> None:
        """At the end nobody is parked."""
        parked: set[str] = set()
        while not self.is_over or parked:
            name = self.dice.choice(self.sessions)
            to: ParkedIn = self.dice.choice(("disk", "memory"))
            if self.is_over or len(parked) > len(self.sessions) // 2 or name in parked:
                name = self.dice.choice(sorted(parked))
                parked.discard(name)
                with suppress(UnknownSession):  # its reply has ended
                    await self.engine.resume(name)
            else:
                with suppress(UnknownSession):
                    await self.engine.park(name, to)
                    parked.add(name)
                    self.counts["parks"] += 1
            await asyncio.sleep(0 if self.is_over else PARK_EVERY_S)

    async def change_budgets(self) -> None:
        while not self.is_over:
            await self.engine.set_budget(self.dice.choice(self.budgets))
            self.counts["budgets"] += 1
            await asyncio.sleep(0.11)

    async def run(self, num_blocks: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in self.sessions:
                tasks.create_task(self.reply_again_and_again(name))
            tasks.create_task(self.park_and_resume())
            tasks.create_task(self.come_and_leave())
            tasks.create_task(self.move(num_blocks))
            tasks.create_task(self.change_budgets())
            await asyncio.sleep(SOAK_S)
            self.is_over = True


async def at_rest(engine: Engine) -> EngineStats:
    """What is held once everything is on one device, and nothing runs."""
    with suppress(PlacementError):  # it is there already
        blocks = range((await engine.stats()).placement.num_blocks)
        await engine.move(blocks, DEVICES[1], head=True)
    await engine.move(blocks, DEVICES[0], head=True)
    await one_reply(engine, REQUESTS[0])
    while True:
        stats = await engine.stats()
        if not stats.prefix_waiting_bytes:
            return stats
        await asyncio.sleep(0.001)


async def soaked(
    engine: Engine, expected: list[tuple[Any, ...]], num_sessions: int = NUM_SESSIONS
) -> None:
    """Let everything happen, and see that all that was taken is given back."""
    start = await at_rest(engine)
    full = start.pages.budget_bytes
    needed = start.pages.fixed_bytes + start.placement.num_blocks * (1 << 18)
    sessions = tuple(f"session {number}" for number in range(num_sessions))
    soak = Soak(engine, expected, (full, full, 2 * needed, needed, needed // 2), sessions)
    await soak.run(start.placement.num_blocks)
    await engine.set_budget(full)
    end = await at_rest(engine)
    totals = end.park_totals
    print(
        f"{SOAK_S:.0f} s: {dict(soak.counts)}, {end.steps} steps, {end.moved_blocks} blocks moved"
    )
    print(f"{end.move_totals}; {totals}; evictions {end.pages.evictions}; {end.kv_spill}")
    assert soak.counts["replies"] > num_sessions
    assert soak.counts["moves"] > 3
    assert totals.parks > 3
    assert totals.resumes > 0
    assert (totals.failures, end.losses) == (0, 0)
    assert (end.running, end.waiting, end.parked, end.kv_bytes) == (0, 0, 0, 0)
    assert end.parked_disk_bytes == end.parked_memory_bytes == 0
    assert end.pages.fixed_bytes == start.pages.fixed_bytes
    assert end.pages.resident == start.pages.resident == end.placement.num_blocks
    assert [use.placed for use in end.devices] == [use.placed for use in start.devices]
    assert [use.kv_pages for use in end.devices] == [0, 0]


async def in_peace(path: Path) -> list[tuple[Any, ...]]:
    """The bits of each reply, alone and on one device."""
    async with opened(path, threads=1) as loaded:
        return [(await one_reply(loaded.engine, asked)).bits for asked in REQUESTS]


CHOICES: dict[str, Any] = {
    "devices": ",".join(DEVICES),
    "page_sizes": ((DEVICES[0], 16), (DEVICES[1], 4)),
    "threads": 2,
    "move_share": 0.9,
}


@pytest.mark.timeout(SOAK_S * 4 + 120)
@pytest.mark.parametrize("name", ["gemma3", pytest.param("llama", marks=pytest.mark.slow)])
async def test_every_reply_is_what_it_is_in_peace_and_everything_is_given_back(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("JITLLM_POISON", "1")
    path: Path = tiny_model(name, "q8_0")
    expected = await in_peace(path)
    before = Holdings.now()
    async with opened(path, kv_cache=str(tmp_path), **CHOICES) as loaded:
        await soaked(loaded.engine, expected)
        assert os.listdir(tmp_path) == []
    await before.are_back()


@pytest.mark.timeout(SOAK_S * 4 + 120)
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
async def test_the_same_while_keys_and_values_are_put_away_and_read_again(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("JITLLM_POISON", "1")
    path: Path = tiny_model(name, "q8_0")
    expected = await in_peace(path)
    before = Holdings.now()
    budget = {"kv_cache": str(tmp_path), "kv_budget_bytes": KV_BUDGET_BYTES}
    async with opened(path, **budget, **CHOICES) as loaded:
        await soaked(loaded.engine, expected, NUM_STREAMS)
        assert (await loaded.engine.stats()).kv_spill.bytes_read > 0
        assert os.listdir(tmp_path) == []
    await before.are_back()


def held_bytes(folder: Path) -> int:
    """What the files of a prefix cache take, each of which is whole."""
    files = [file for file in folder.glob("prefixes/*/*") if file.is_file()]
    assert all(file.suffix == ".kv" for file in files)
    return sum(file.stat().st_size for file in files)


@pytest.mark.timeout(SOAK_S * 4 + 120)
@pytest.mark.parametrize("budget", [0, pytest.param(KV_BUDGET_BYTES, marks=pytest.mark.slow)])
async def test_a_prefix_cache_that_is_full_all_the_time_changes_nothing_of_that(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setenv("JITLLM_POISON", "1")
    path = tiny_model("llama", "q8_0")
    expected = await in_peace(path)
    before = Holdings.now()
    most = 1 << 21
    choices = {"kv_cache": str(tmp_path), "prefix_cache_bytes": most, "kv_budget_bytes": budget}
    async with opened(path, **CHOICES, **choices) as loaded:
        await soaked(loaded.engine, expected, NUM_STREAMS)
        totals = (await loaded.engine.stats()).prefix_totals
        print(totals)
        assert os.listdir(tmp_path) == ["prefixes"]
    assert 0 < held_bytes(tmp_path) <= most
    assert min(totals.hits, totals.whole, totals.files, totals.evictions) > 0
    assert (totals.failures, totals.damaged) == (0, 0)
    await before.are_back()


@pytest.mark.timeout(SOAK_S * 4 + 120)
@pytest.mark.parametrize("placement", [None, "0-1=cpu:1%host,*=cpu:0"])
async def test_experts_that_come_one_by_one_change_nothing_of_that(
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    placement: str | None,
) -> None:
    """Nor do those that the host computes, of blocks that come and go."""
    monkeypatch.setenv("JITLLM_POISON", "1")
    path = tiny_model("qwen3moe", "q8_0")
    expected = await in_peace(path)
    before = Holdings.now()
    choices = {"kv_cache": str(tmp_path), "experts": "apart", "placement": placement, **CHOICES}
    async with opened(path, **choices) as loaded:
        await soaked(loaded.engine, expected)
        experts = (await loaded.engine.stats()).pages.experts
        assert experts is not None
        assert experts.reads > 2 * experts.resident
    await before.are_back()
