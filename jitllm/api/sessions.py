"""The requests that a server works on at this moment.

Knows their names and their progress, and how each is cancelled. A model with a session is in use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jitllm.api.models import Served


@dataclass(slots=True)
class Progress:
    """One sequence of a request: how far it is, and how it is stopped."""

    prompt_tokens: int
    cancel: Callable[[], None]
    generated_tokens: int = 0
    is_started: bool = False
    is_done: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """A request under way. id: that of its reply. request_id: what x-request-id says."""

    id: str
    request_id: str
    model: str
    kind: str
    client: str
    began_s: float = field(default_factory=time.perf_counter)
    sequences: list[Progress] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def state(self) -> str:
        """queued until something came, then running."""
        return "running" if any(s.is_started for s in self.sequences) else "queued"

    def cancel(self) -> None:
        """End the reply with what there is."""
        self.is_cancelled = True
        for sequence in self.sequences:
            sequence.cancel()

    def describe(self) -> dict[str, Any]:
        """As the control plane shows it."""
        return {
            "id": self.id,
            "request_id": self.request_id,
            "model": self.model,
            "kind": self.kind,
            "client": self.client,
            "state": self.state,
            "age_s": time.perf_counter() - self.began_s,
            "sequences": [
                {
                    "prompt_tokens": s.prompt_tokens,
                    "generated_tokens": s.generated_tokens,
                    "is_done": s.is_done,
                }
                for s in self.sequences
            ],
        }


class Sessions:
    """All requests under way."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._closed = asyncio.Event()

    @contextmanager
    def open(
        self, served: Served, *, id: str, request_id: str, kind: str, client: str
    ) -> Iterator[Session]:
        """A session for as long as the block runs."""
        session = Session(id, request_id, served.id, kind, client)
        self._open[id] = session
        try:
            yield session
        finally:
            del self._open[id]
            self._closed.set()
            self._closed = asyncio.Event()

    def list(self, model_id: str | None = None) -> list[Session]:
        """All, or those of one model; the oldest first."""
        return [s for s in self._open.values() if model_id in (None, s.model)]

    def get(self, name: str) -> Session | None:
        """The session of a reply's id, or else of a request id."""
        found = self._open.get(name)
        return found or next((s for s in self._open.values() if s.request_id == name), None)

    async def next_end(self) -> None:
        """Wait until some request has ended."""
        await self._closed.wait()

    def __len__(self) -> int:
        return len(self._open)
