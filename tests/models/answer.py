"""One engine, one answer: what it was and what it cost. For processes of their own."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jitllm.engine import Engine, Request
from tests.models.native import Reply, opened


@dataclass(frozen=True)
class Answer:
    """What came of it.

    digest: of everything that both replies said, logits included. ids: of the second reply.
    fixed_bytes: what the budget is charged besides blocks while the request runs. frames: how many
    of the largest block the budget holds then. page_ins, steps: of the second reply.
    """

    digest: str
    ids: list[int]
    fixed_bytes: int
    frames: int
    page_ins: int
    steps: int


def answer(
    path: str, choices: dict[str, Any], prompt: list[int], max_tokens: int
) -> dict[str, Any]:
    """An `Answer` as plain values. choices: an `EngineConfig`'s.

    The request is made twice: the first time brings the weights in, the second one is the steady
    state that is counted.
    """
    request = Request(tuple(prompt), max_tokens=max_tokens, logits=True)
    return asdict(asyncio.run(_answer(Path(path), choices, request)))


async def _answer(path: Path, choices: dict[str, Any], request: Request) -> Answer:
    async with opened(path, **choices) as model:
        first, _, _ = await _ask(model.engine, request)
        before = await model.engine.stats()
        second, fixed_bytes, frames = await _ask(model.engine, request)
        after = await model.engine.stats()
    return Answer(
        digest=hashlib.sha256(repr((first.bits, second.bits)).encode()).hexdigest(),
        ids=second.ids,
        fixed_bytes=fixed_bytes,
        frames=frames,
        page_ins=after.pages.page_ins - before.pages.page_ins,
        steps=after.steps - before.steps,
    )


async def _ask(engine: Engine, request: Request) -> tuple[Reply, int, int]:
    """The reply; fixed bytes and frames in the middle of it."""
    reply, fixed_bytes, frames = Reply(), 0, 0
    async for delta in engine.generate(request):
        reply.add(delta)
        if not fixed_bytes:
            pages = (await engine.stats()).pages
            fixed_bytes, frames = pages.fixed_bytes, pages.frames
    return reply, fixed_bytes, frames
