"""A handle of an engine: of one that this process opened, or of one that is open on a cluster.

Knows `compose`, tokenizers and chat templates. Replies are followed by the same code as behind
HTTP, so that they end in the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from jitllm import compose
from jitllm.api.choices import Choice, Piece, run_all
from jitllm.api.models import Served
from jitllm.api.sessions import Session, Sessions
from jitllm.compose import Loaded
from jitllm.config import EngineConfig
from jitllm.engine import EngineStats, Moved, Pages, ParkedIn, Request
from jitllm.errors import JitllmError, UsageError
from jitllm.handle.base import (
    Asked,
    Conversation,
    Handle,
    Prompt,
    Settings,
    TextDelta,
    kind_of,
    size_of,
)
from jitllm.schedule.placement_map import Selection


async def open_here(
    path: Path,
    maxmem: str | int | None = None,
    config: EngineConfig | None = None,
    *,
    ray: str | None = None,
) -> Handle:
    """Open a container and start an engine for it; see `compose.open_engine`."""
    config = config or EngineConfig()
    if maxmem is not None:
        config = replace(config, maxmem_bytes=size_of(maxmem))
    return await _handle(await compose.open_engine(path, config, ray=ray))


async def attach(ray: str, name: str | None = None) -> Handle:
    """Use a model that is open on a cluster; see `compose.attach`."""
    return await _handle(await compose.attach(ray, name))


async def _handle(loaded: Loaded) -> Handle:
    """Of a model that is open, or is closed if there can be none."""
    try:
        await asyncio.to_thread(loaded.tokenizer.prepare)
        stats = await loaded.engine.stats()
        return EmbeddedHandle(loaded, _served(loaded, stats.context_tokens))
    except BaseException:
        await loaded.close()
        raise


class EmbeddedHandle(Handle):
    """See `Handle`. loaded: the engine, for what a handle lacks: logits, token by token control."""

    def __init__(self, loaded: Loaded, served: Served) -> None:
        self.name = served.id
        self.loaded = loaded
        self._served = served
        self._sessions = Sessions()
        self._is_closed = False

    async def generate(
        self, prompt: Prompt, **settings: Unpack[Settings]
    ) -> AsyncGenerator[TextDelta, None]:
        """See `Handle.generate`."""
        asked = Asked.of(settings)
        if self._sessions.get(asked.id) is not None:
            raise UsageError(f"a reply called {asked.id!r} is under way", "choose another id")
        with self._sessions.open(
            self._served, id=asked.id, request_id=asked.id, kind="handle", client=""
        ) as session:
            request = await self._request(prompt, asked)
            choice = Choice(self._served, request, stops=asked.stops)
            async with aclosing(self._deltas(choice, session)) as deltas:
                async for delta in deltas:
                    yield delta

    async def stats(self) -> EngineStats:
        """See `Handle.stats`."""
        return await self.loaded.engine.stats()

    async def _move(self, chosen: Selection, to: str) -> Moved:
        return await self.loaded.engine.move(chosen.blocks, to, head=chosen.head)

    async def _place(self, placement: str, strict: bool) -> tuple[Moved, ...]:
        return await self.loaded.engine.place(placement, strict=strict)

    async def _set_budget(self, num_bytes: int) -> Pages:
        return await self.loaded.engine.set_budget(num_bytes)

    async def cancel(self, id: str) -> None:
        """See `Handle.cancel`."""
        session = self._sessions.get(id)
        if session is None:
            raise JitllmError(f"there is no request {id[:200]!r} under way")
        session.cancel()

    async def park(self, id: str, to: ParkedIn = "disk") -> None:
        """See `Handle.park`."""
        await self.loaded.engine.park(id, to)

    async def resume(self, id: str) -> None:
        """See `Handle.resume`."""
        await self.loaded.engine.resume(id)

    async def close(self) -> None:
        """See `Handle.close`."""
        if not self._is_closed:
            self._is_closed = True
            await self.loaded.close()

    async def _request(self, prompt: Prompt, asked: Asked) -> Request:
        return Request(
            tuple(await self._ids(prompt)),
            asked.max_tokens,
            asked.sampling,
            frozenset() if asked.ignore_eos else frozenset(self._served.header.stop_ids),
            priority=asked.priority,
            name=asked.id,
            namespace=asked.cache_salt,
        )

    async def _ids(self, prompt: Prompt) -> Sequence[int]:
        turns, text_or_ids = kind_of(prompt)
        if turns is not None:
            return await asyncio.to_thread(self._chat_ids, turns)
        if isinstance(text_or_ids, str):
            return await asyncio.to_thread(self._served.tokenizer.encode, text_or_ids)
        return text_or_ids

    def _chat_ids(self, turns: Conversation) -> list[int]:
        if self._served.chat is None:
            raise JitllmError(
                f"{self.name} has no chat template",
                "give it a text to continue, or convert its source with -chat-template FILE",
            )
        return self._served.tokenizer.encode_rendered(self._served.chat.render(turns))

    async def _deltas(self, choice: Choice, session: Session) -> AsyncGenerator[TextDelta, None]:
        if session.is_cancelled:
            choice.cancel()
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()  # no more than there are tokens

        async def put(_: Choice, piece: Piece) -> None:
            pieces.put_nowait(piece)

        worker = asyncio.create_task(run_all([choice], session, put, 1))
        worker.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                delta = TextDelta(session.id, piece.text, piece.ids)
                if piece.is_last:
                    usage = replace(choice.costs(), generated_tokens=choice.num_tokens)
                    delta = replace(delta, finish=choice.finish, usage=usage)
                yield delta
            worker.result()
        finally:
            worker.cancel()
            await asyncio.wait({worker})


def _served(loaded: Loaded, context_tokens: int) -> Served:
    return Served(
        id=loaded.name,
        path=loaded.path,
        engine=loaded.engine,
        tokenizer=loaded.tokenizer,
        chat=loaded.chat,
        header=loaded.header,
        context_tokens=context_tokens,
        vocab_tokens=loaded.graph.vocab,
        loaded_at_s=time.time(),
    )
