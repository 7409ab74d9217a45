"""A handle for programs without an event loop: every call runs one until it is done.

Knows `Handle` and asyncio. Between two calls nothing moves, so a stream goes on while it is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from jitllm.engine import EngineStats, Moved, Pages, ParkedIn
from jitllm.handle.base import (
    Blocks,
    Completion,
    Conversation,
    Handle,
    Prompt,
    Settings,
    TextDelta,
)

T = TypeVar("T")


class SyncHandle:
    """See `Handle`. For the thread that made it, and not inside of a running event loop."""

    def __init__(self, opening: Callable[[], Coroutine[Any, Any, Handle]]) -> None:
        self._runner = asyncio.Runner()
        try:
            self._handle = self._runner.run(opening())
        except BaseException:
            self._runner.close()
            raise
        self._is_closed = False
        self.name = self._handle.name
        """What the model is called."""

    def generate(self, prompt: Prompt, **settings: Unpack[Settings]) -> Iterator[TextDelta]:
        """See `Handle.generate`."""
        deltas = self._handle.generate(prompt, **settings)
        try:
            while (delta := self._run(_next(deltas))) is not None:
                yield delta
        finally:
            if not self._is_closed:
                self._run(deltas.aclose())

    def complete(self, prompt: Prompt, **settings: Unpack[Settings]) -> Completion:
        """See `Handle.complete`."""
        return self._run(self._handle.complete(prompt, **settings))

    def chat(self, messages: str | Conversation, **settings: Unpack[Settings]) -> Completion:
        """See `Handle.chat`."""
        return self._run(self._handle.chat(messages, **settings))

    def stats(self) -> EngineStats:
        """See `Handle.stats`."""
        return self._run(self._handle.stats())

    def move(self, blocks: Blocks, *, to: str, head: bool = False) -> Moved:
        """See `Handle.move`."""
        return self._run(self._handle.move(blocks, to=to, head=head))

    @overload
    def place(self, *, maxmem: str | int) -> Pages: ...

    @overload
    def place(self, placement: str, *, strict: bool = False) -> tuple[Moved, ...]: ...

    def place(self, *placement: Any, **choices: Any) -> Pages | tuple[Moved, ...]:
        """See `Handle.place`."""
        placed: Pages | tuple[Moved, ...] = self._run(self._handle.place(*placement, **choices))
        return placed

    def cancel(self, id: str) -> None:
        """See `Handle.cancel`."""
        self._run(self._handle.cancel(id))

    def park(self, id: str, to: ParkedIn = "disk") -> None:
        """See `Handle.park`; between two deltas of a stream, as nothing moves meanwhile."""
        self._run(self._handle.park(id, to))

    def resume(self, id: str) -> None:
        """See `Handle.resume`."""
        self._run(self._handle.resume(id))

    def close(self) -> None:
        """See `Handle.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._run(self._handle.close())
        finally:
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, work: Awaitable[T]) -> T:
        return self._runner.run(_awaited(work))


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _next(deltas: AsyncGenerator[TextDelta, None]) -> TextDelta | None:
    return await anext(deltas, None)
