"""What a move costs replies under way: the pause, and their rate while it is prepared.

Real weights (`gemma_model`), two CPU devices. Run alone on a quiet machine.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest

from actors.relocate import Mover
from jitllm.compose import Loaded, open_engine
from jitllm.config import EngineConfig
from jitllm.engine import Engine, Moved, Request

pytestmark = pytest.mark.bench

NUM_MOVES = 30
DEVICES = ("cpu:0", "cpu:1")
RUNTIMES = [None, pytest.param("local", marks=pytest.mark.ray)]


@asynccontextmanager
async def two_devices(model: Path, ray: str | None) -> AsyncIterator[Loaded]:
    sizes = (("cpu:0", 64), ("cpu:1", 128))
    config = EngineConfig(devices=",".join(DEVICES), threads=2, page_sizes=sizes)
    loaded = await open_engine(model, config, ray=ray)
    gc.freeze()  # as programs do that serve: a collection of all objects takes up to 75 ms
    try:
        yield loaded
    finally:
        gc.unfreeze()
        await loaded.close()


class Streams:
    """Replies under way, and the moment of each of their tokens."""

    def __init__(self, engine: Engine, num: int, history: int) -> None:
        dice = random.Random(num + history)
        self.times: list[list[float]] = [[] for _ in range(num)]
        self._tasks = []
        for index in range(num):
            prompt = tuple(dice.randrange(5, 50_000) for _ in range(history))
            self._tasks.append(asyncio.create_task(self._run(engine, Request(prompt), index)))

    async def _run(self, engine: Engine, request: Request, index: int) -> None:
        async for delta in engine.generate(request):
            self.times[index] += [perf_counter()] * len(delta.tokens)

    async def until(self, num_tokens: int) -> None:
        while any(len(times) < num_tokens for times in self.times):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def gaps(self, since_s: float = 0.0) -> list[float]:
        """Seconds between neighbouring tokens of a reply, after some moment."""
        return [
            later - earlier
            for times in self.times
            for earlier, later in zip(times, times[1:], strict=False)
            if earlier >= since_s
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def half_of_the_blocks(engine: Engine, dice: random.Random, **choices: Any) -> Moved:
    """Move a random half of the blocks to where most of them are not."""
    placement = (await engine.stats()).placement
    half = dice.sample(range(placement.num_blocks), placement.num_blocks // 2)
    num_first = sum(placement.blocks[block] == DEVICES[0] for block in half)
    to = DEVICES[num_first * 2 > len(half)]
    chosen = [block for block in half if placement.blocks[block] != to]
    if not chosen:
        return await half_of_the_blocks(engine, dice, **choices)
    return await engine.move(chosen, to, **choices)


@pytest.mark.parametrize("ray", RUNTIMES)
@pytest.mark.parametrize(("num", "history"), [(1, 256), (1, 8192), (8, 256)])
async def test_pauses(ray: str | None, num: int, history: int, gemma_model: Path) -> None:
    """Live, and with everything copied while replies stand still."""
    async with two_devices(gemma_model, ray) as loaded:
        engine = loaded.engine
        for is_live in (True, False):
            streams = Streams(engine, num, history)
            await streams.until(60)
            quiet = median(streams.gaps()[-40 * num :])
            dice, moves, since_s = random.Random(7), [], perf_counter()
            for _ in range(NUM_MOVES):
                moves.append(await half_of_the_blocks(engine, dice, is_live=is_live))
                await asyncio.sleep(0.05)
            worst = max(streams.gaps(since_s))
            await streams.stop()
            print(
                f"\n{'Ray' if ray else 'embedded'}, {num} sessions, history {history}, "
                f"{'live' if is_live else 'stop and copy'}: {described(moves)}; "
                f"gap {1e3 * quiet:.2f} ms before, largest at the client less that "
                f"{1e3 * (worst - quiet):.2f} ms"
            )


def described(moves: Sequence[Moved]) -> str:
    pauses = sorted(1e3 * moved.pause_s for moved in moves)
    before = median(moved.bytes_before for moved in moves) / 1e6
    paused = median(moved.bytes_paused for moved in moves) / 1e3
    return (
        f"pause p50 {median(pauses):.2f} ms, max {pauses[-1]:.2f} ms; prepare p50 "
        f"{1e3 * median(moved.prepare_s for moved in moves):.0f} ms, {before:.2f} MB ahead, "
        f"{paused:.1f} KB in the pause"
    )


async def test_rate_while_blocks_are_prepared_from_disk(
    gemma_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate of a reply while blocks are read for another device, over its rate without that."""

    async def nothing_is_lent(*_: object) -> None:
        return None

    monkeypatch.setattr(Mover, "_lend", nothing_is_lent)
    async with two_devices(gemma_model, None) as loaded:
        engine, ratios = loaded.engine, []
        streams = Streams(engine, 1, 256)
        await streams.until(60)
        for pair in range(12):
            rates = {}
            for is_moving in (False, True) if pair % 2 else (True, False):
                began_s, began = perf_counter(), len(streams.times[0])
                if is_moving:
                    blocks = range(0, 18, 2) if pair % 4 < 2 else range(1, 18, 2)
                    await engine.move(blocks, "cpu:1")
                else:
                    await asyncio.sleep(0.3)
                took_s = perf_counter() - began_s
                rates[is_moving] = (len(streams.times[0]) - began) / took_s
                if is_moving:
                    await engine.move(blocks, "cpu:0")
            ratios.append(rates[True] / rates[False])
        await streams.stop()
        print(
            f"\nrate while prepared: {median(ratios):.2f}x, {min(ratios):.2f} to {max(ratios):.2f}"
        )
