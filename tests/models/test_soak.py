"""Everything at once, for a while: replies, moves, budgets, requests that come and go.

$JITLLM_SOAK_S says for how long; a minute, with `-m slow`, is a real test of patience.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jitllm.engine import Engine, EngineStats, Request, Sampling
from jitllm.errors import PlacementError
from tests.conftest import TinyModel
from tests.models.deaths import Holdings
from tests.models.native import Reply, opened

SOAK_S = float(os.environ.get("JITLLM_SOAK_S", "8"))
NUM_SESSIONS = 8
MOVE_EVERY_S = 0.05
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
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    counts: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    async def reply_again_and_again(self) -> None:
        while not self.is_over:
            number = self.dice.randrange(len(REQUESTS))
            whole = await one_reply(self.engine, REQUESTS[number])
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

    async def change_budgets(self) -> None:
        while not self.is_over:
            await self.engine.set_budget(self.dice.choice(self.budgets))
            self.counts["budgets"] += 1
            await asyncio.sleep(0.11)

    async def run(self, num_blocks: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_SESSIONS):
                tasks.create_task(self.reply_again_and_again())
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
    return await engine.stats()


@pytest.mark.timeout(SOAK_S * 4 + 120)
@pytest.mark.parametrize("name", ["gemma3", pytest.param("llama", marks=pytest.mark.slow)])
async def test_every_reply_is_what_it_is_in_peace_and_everything_is_given_back(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("JITLLM_POISON", "1")
    path: Path = tiny_model(name, "q8_0")
    async with opened(path, threads=1) as loaded:
        expected = [(await one_reply(loaded.engine, asked)).bits for asked in REQUESTS]
    before = Holdings.now()
    choices: dict[str, Any] = {
        "devices": ",".join(DEVICES),
        "page_sizes": ((DEVICES[0], 16), (DEVICES[1], 4)),
        "threads": 2,
        "move_share": 0.9,
    }
    async with opened(path, **choices) as loaded:
        engine = loaded.engine
        start = await at_rest(engine)
        full = start.pages.budget_bytes
        needed = start.pages.fixed_bytes + start.placement.num_blocks * (1 << 18)
        soak = Soak(engine, expected, (full, full, 2 * needed, needed, needed // 2))
        await soak.run(start.placement.num_blocks)
        await engine.set_budget(full)
        end = await at_rest(engine)
        print(dict(soak.counts))
        assert soak.counts["replies"] > NUM_SESSIONS
        assert soak.counts["moves"] > 3
        assert (end.running, end.waiting, end.kv_bytes) == (0, 0, 0)
        assert end.pages.fixed_bytes == start.pages.fixed_bytes
        assert end.pages.resident == start.pages.resident == end.placement.num_blocks
        assert [use.placed for use in end.devices] == [use.placed for use in start.devices]
        assert [use.kv_pages for use in end.devices] == [0, 0]
    await before.are_back()
