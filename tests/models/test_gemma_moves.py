"""A real model whose blocks move in the middle of a reply: every logit stays the same."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jitllm.compose import Loaded, open_engine
from jitllm.config import EngineConfig
from jitllm.devices.memory import POISON_VARIABLE
from jitllm.engine import Delta, Engine, Moved, Request
from tests.models.native import opened
from tests.models.test_gemma import prompts

NUM_TOKENS = 128
NUM_BLOCKS = 18
FIRST, SECOND = NAMES = ("cpu:0", "cpu:1")
REQUEST = Request(tuple(next(prompts()).tokens), max_tokens=NUM_TOKENS, logits=True)


@dataclass
class Trace:
    """What a reply was: its ids, and a digest of the logits of each."""

    ids: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        assert delta.error is None, delta.error
        self.ids += delta.tokens
        if delta.logits is not None:
            self.digests.append(hashlib.blake2b(bytes(delta.logits.view())).digest())


async def traced(engine: Engine, has_begun: asyncio.Event | None = None) -> Trace:
    trace = Trace()
    async for delta in engine.generate(REQUEST):
        trace.add(delta)
        if has_begun is not None:
            has_begun.set()
    return trace


@asynccontextmanager
async def on(ray: str | None, path: Path, **choices: Any) -> AsyncIterator[Loaded]:
    """A served model whose memory overwrites what is given back, in whatever process it is."""
    with ExitStack() as stack:
        if ray is not None:
            cluster = pytest.importorskip("actors.cluster", reason="needs the extra `ray`")
            stack.enter_context(cluster.Cluster(ray, dashboard=False))
        loaded = await open_engine(path, EngineConfig(**choices), ray=ray)
        try:
            if ray is not None:
                from tests.cluster.test_moves import is_poisoned

                assert all(map(is_poisoned, NAMES))
            yield loaded
        finally:
            await loaded.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ray", [None, pytest.param("local", marks=pytest.mark.ray)], ids=["embedded", "ray"]
)
async def test_a_reply_whose_blocks_move_is_the_same(
    gemma_model: Path, monkeypatch: pytest.MonkeyPatch, ray: str | None
) -> None:
    """All blocks there and back three times, then some of them, with holes, until the reply ends;
    nothing is computed twice."""
    monkeypatch.setenv(POISON_VARIABLE, "1")
    async with opened(gemma_model, threads=1) as model:
        expected = await traced(model.engine)
    assert len(expected.ids) == len(expected.digests) == NUM_TOKENS
    choices: dict[str, Any] = {
        "devices": ",".join(NAMES),
        "page_sizes": ((FIRST, 16), (SECOND, 4)),
        "threads": 2,
        "move_share": 0.99,
    }
    dice = random.Random(7)
    async with on(ray, gemma_model, **choices) as model:
        engine = model.engine
        has_begun = asyncio.Event()
        reply = asyncio.create_task(traced(engine, has_begun))
        await has_begun.wait()
        done: list[Moved] = []
        for to in (SECOND, FIRST) * 3:
            done.append(await engine.move(range(NUM_BLOCKS), to, head=True))
        while not reply.done():
            placement = (await engine.stats()).placement
            to = dice.choice(NAMES)
            blocks = [block for block in range(NUM_BLOCKS) if dice.random() < 0.5]
            if any(placement.blocks[block] != to for block in blocks):
                done.append(await engine.move(blocks, to))
        assert await reply == expected
        stats = await engine.stats()
        assert stats.steps == NUM_TOKENS  # the first token comes with the prompt
        assert (stats.losses, stats.kv_bytes) == (0, 0)
    print(len(done), [(round(m.pause_s * 1e3, 2), m.tokens_meanwhile) for m in done])
    during = [moved for moved in done if moved.bytes_before + moved.bytes_paused]
    assert len(during) > 7, "the reply was over too soon to show anything"
    kv_bytes = 2 * 2 * 256 * NUM_BLOCKS  # of a position: keys and values of one head, in f16
    for moved in done[:6]:
        assert moved.bytes_before + moved.bytes_paused >= kv_bytes * len(REQUEST.prompt)
