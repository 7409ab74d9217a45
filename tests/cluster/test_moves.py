"""Blocks change processes in the middle of replies: not a bit changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from actors.cluster import Cluster
from jitllm.devices.memory import POISON_VARIABLE
from jitllm.engine import Engine, Moved, Request, Sampling
from tests.cluster.test_engine import on_ray, process_of
from tests.conftest import TinyModel
from tests.models.native import Reply, opened

PROMPT = (1, 259, 75, 260, 269, 270, 271, 300, 12, 13)
REQUESTS = (
    Request(PROMPT, max_tokens=90, logits=True),
    Request(PROMPT[:4], max_tokens=80, sampling=Sampling(temperature=0.8, seed=3), logits=True),
    Request(PROMPT * 6, max_tokens=40, chunk_tokens=5, logits=True),
    Request(PROMPT[2:], max_tokens=120),
)
FIRST, SECOND = NAMES = ("cpu:0", "cpu:1")
CHOICES: dict[str, Any] = {
    "devices": ",".join(NAMES),
    "page_sizes": ((FIRST, 16), (SECOND, 4)),
    "threads": 2,
    "move_share": 0.9,
}
Bits = tuple[Any, ...]


async def one_reply(engine: Engine, request: Request, seen: asyncio.Event | None = None) -> Bits:
    """The bits of a reply; raises its error."""
    whole = Reply()
    async for delta in engine.generate(request):
        whole.add(delta)
        if seen is not None:
            seen.set()
    return whole.bits


def is_poisoned(device: str) -> bool:
    """Whether the process of a device overwrites what it gives back."""
    return process_of(f"device:{device}").environ().get(POISON_VARIABLE) == "1"


async def in_peace(path: Path, **choices: Any) -> list[Bits]:
    """Of each reply, in one process and on one device."""
    async with opened(path, threads=1, **choices) as loaded:
        return [await one_reply(loaded.engine, request) for request in REQUESTS]


@asynccontextmanager
async def replying(engine: Engine, expected: list[Bits]) -> AsyncIterator[None]:
    """Replies run within it all the time, and every one is what it should be."""
    is_over = False
    seen = [asyncio.Event() for _ in REQUESTS]

    async def ask(first: int) -> None:
        order = range(len(REQUESTS))
        for number in cycle((*order[first:], *order[:first])):
            bits = await one_reply(engine, REQUESTS[number], seen[first])
            assert bits == expected[number], number
            if is_over:
                return

    async with asyncio.TaskGroup() as tasks:
        for first in range(len(REQUESTS)):
            tasks.create_task(ask(first))
        await asyncio.gather(*(event.wait() for event in seen))
        yield
        is_over = True


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
async def test_a_reply_whose_blocks_move_is_the_same(
    cluster: Cluster, tiny_model: TinyModel, kv_type: str
) -> None:
    """All blocks there and back three times, then some of them, with holes."""
    dice = random.Random(3)
    expected = await in_peace(tiny_model("gemma3", "q8_0"), kv_type=kv_type)
    async with on_ray(tiny_model("gemma3", "q8_0"), kv_type=kv_type, **CHOICES) as loaded:
        engine = loaded.engine
        assert all(map(is_poisoned, NAMES))
        num_blocks = (await engine.stats()).placement.num_blocks
        done: list[Moved] = []
        async with replying(engine, expected):
            for to in (SECOND, FIRST) * 3:
                done.append(await engine.move(range(num_blocks), to, head=True))
            for _ in range(8):
                placement = (await engine.stats()).placement
                to = dice.choice(NAMES)
                blocks = [b for b in range(num_blocks) if dice.random() < 0.6]
                if any(placement.blocks[block] != to for block in blocks):
                    done.append(await engine.move(blocks, to))
        stats = await engine.stats()
        assert (stats.losses, stats.kv_bytes, stats.running) == (0, 0, 0)
        assert stats.moves == len(done) > 6
        assert all(moved.bytes_before + moved.bytes_paused > 0 for moved in done)
