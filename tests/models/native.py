"""Runs models natively, through the Engine port, as every caller does.

Knows requests, deltas and arrays. Knows no actor, no kernel and no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitllm.compose import Loaded, open_engine
from jitllm.config import EngineConfig
from jitllm.engine import Delta, Engine, Finish, Outputs, Request

F32 = NDArray[np.float32]


@asynccontextmanager
async def opened(path: Path, *, strict: bool = False, **choices: Any) -> AsyncIterator[Loaded]:
    """A served model with these choices of an `EngineConfig`, closed at the end."""
    loaded = await open_engine(path, EngineConfig(**choices), strict=strict)
    try:
        yield loaded
    finally:
        await loaded.close()


@dataclass
class Reply:
    """All deltas of one request, put together."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    rows: list[F32] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Take one more delta in; raises its error if it has one."""
        if delta.error is not None:
            raise delta.error
        self.ids += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish = delta.finish
        if delta.logits is not None:
            self.rows.append(np.array(delta.logits.view(), np.float32))

    @property
    def logits(self) -> F32:
        """Logits [outputs, vocab]."""
        return np.concatenate(self.rows)

    @property
    def bits(self) -> tuple[Any, ...]:
        """Everything that must be equal where two replies are the same answer."""
        rows = tuple(row.tobytes() for row in self.logits) if self.rows else ()
        return (*self.ids, self.finish, *self.logprobs, *self.prompt_logprobs, *rows)


async def reply(engine: Engine, request: Request) -> Reply:
    """The whole reply to a request, logits included."""
    whole = Reply()
    async for delta in engine.generate(replace(request, logits=True)):
        whole.add(delta)
    return whole


async def replies(engine: Engine, requests: Iterable[Request]) -> list[Reply]:
    """Replies to requests that are all under way at once."""
    return await asyncio.gather(*(reply(engine, request) for request in requests))


async def prompt_logits(
    engine: Engine, tokens: Sequence[int], chunk_tokens: int | None = None
) -> F32:
    """Logits [tokens, vocab] of every position of a prompt."""
    request = Request(
        tuple(map(int, tokens)), max_tokens=0, outputs=Outputs.ALL, chunk_tokens=chunk_tokens
    )
    return (await reply(engine, request)).logits
