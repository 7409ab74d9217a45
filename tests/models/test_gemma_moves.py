"""A real model whose blocks move in the middle of a reply: every logit stays the same."""

from __future__ import annotations

import asyncio
import hashlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.slow
async def test_a_reply_whose_blocks_move_is_the_same(
    gemma_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks there and back three times, then some of them, with holes, until the reply ends;
    nothing is computed twice."""
    monkeypatch.setenv("JITLLM_POISON", "1")
    async with opened(gemma_model, threads=1) as model:
        expected = await traced(model.engine)
    assert len(expected.ids) == len(expected.digests) == NUM_TOKENS
    choices: dict[str, Any] = {
        "devices": ",".join(NAMES),
        "page_sizes": ((FIRST, 64), (SECOND, 16)),
        "threads": 2,
        "move_share": 0.99,
    }
    dice = random.Random(7)
    async with opened(gemma_model, **choices) as model:
        engine = model.engine
        has_begun = asyncio.Event()
        reply = asyncio.create_task(traced(engine, has_begun))
        await has_begun.wait()
        done: list[Moved] = []
        for to in (SECOND, FIRST) * 3:
            done.append(await engine.move(range(NUM_BLOCKS), to, head=True))
        num_whole = 0 if reply.done() else len(done)
        while not reply.done():
            placement = (await engine.stats()).placement
            to = dice.choice(NAMES)
            blocks = [block for block in range(NUM_BLOCKS) if dice.random() < 0.5]
            if any(placement.blocks[block] != to for block in blocks):
                done.append(await engine.move(blocks, to))
        assert await reply == expected
        stats = await engine.stats()
        assert stats.steps == NUM_TOKENS  # the first token comes with the prompt
        print(len(done), [round(moved.pause_s * 1000, 2) for moved in done])
    assert num_whole == 6, "the reply was over too soon to show anything"
    kv_bytes = 2 * 2 * 256 * NUM_BLOCKS  # of a position: keys and values of one head, in f16
    for moved in done[:6]:
        assert moved.bytes_before + moved.bytes_paused >= kv_bytes * len(REQUEST.prompt)
