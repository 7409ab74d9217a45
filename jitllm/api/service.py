"""What all endpoints of one server share: its models, its sessions, its limits, its counts.

Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from fastapi import Request

from jitllm.api.errors import ApiError, unknown_model
from jitllm.api.metrics import Counts
from jitllm.api.models import Models, Served
from jitllm.api.sessions import Session, Sessions
from jitllm.engine import SequenceState


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a client may ask of a server. Sizes in bytes, times in seconds.

    api_key: what every request but /healthz must bring as a bearer token; empty: none.
    max_depth: nesting of a JSON body. receive_timeout_s: for the whole body. send_timeout_s: for a
    client that reads nothing. patience_s: after so long without a token a stream gets a sign of
    life. stuck_after_s: an engine that has work and makes no step for so long is not healthy.
    """

    api_key: str = ""
    max_head_bytes: int = 32 << 10
    max_body_bytes: int = 16 << 20
    max_depth: int = 32
    receive_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    patience_s: float = 10.0
    stuck_after_s: float = 60.0
    stats_timeout_s: float = 5.0


@dataclass(kw_only=True)
class Service:
    """One server."""

    models: Models
    limits: Limits = field(default_factory=Limits)
    sessions: Sessions = field(default_factory=Sessions)
    counts: Counts = field(default_factory=Counts)
    began_s: float = field(default_factory=time.perf_counter)
    is_draining: bool = False
    _leaving: set[str] = field(default_factory=set)

    def served(self, model_id: str) -> Served:
        """The model of that name. Raises ApiError if there is none."""
        found = self.models.get(model_id)
        if found is None:
            raise unknown_model(model_id, [served.id for served in self.models.list()])
        return found

    @contextmanager
    def leaving(self, served: Served) -> Iterator[None]:
        """A model is being unloaded in the block."""
        names = {served.id, *served.aliases}
        self._leaving |= names
        try:
            yield
        finally:
            self._leaving -= names

    def refuse_leaving(self, model_id: str) -> None:
        """Raise ApiError for a model that is being unloaded."""
        if model_id in self._leaving:
            raise ApiError(409, f"{model_id} is being unloaded", "model", "unloading")

    @contextmanager
    def session(self, request: Request, model_id: str, prefix: str) -> Iterator[Serving]:
        """Finds a model and keeps it in use for the block; raises ApiError while draining."""
        if self.is_draining:
            raise ApiError(
                503, "the server is shutting down", None, "draining", {"Retry-After": "5"}
            )
        served = self.served(model_id)
        request.scope["jitllm.model"] = served.id
        client = request.client
        with self.sessions.open(
            served,
            id=f"{prefix}-{uuid.uuid4().hex}",
            request_id=request.scope.get("jitllm.request_id", ""),
            kind=prefix,
            client=f"{client.host}:{client.port}" if client else "",
        ) as session:
            yield Serving(served, session, model_id, int(time.time()))

    def named(self, name: str) -> Session:
        """The session of a reply's id or a request id. Raises ApiError if there is none."""
        session = self.sessions.get(name)
        if session is None:
            raise ApiError(404, f"there is no request {name[:200]!r} under way", "session")
        return session

    async def begin_drain(self) -> None:
        """Take no more requests, and let those that are parked go on, so that they can end."""
        self.is_draining = True
        for served in self.models.list():
            with suppress(Exception):  # dead, closing or stuck
                async with asyncio.timeout(self.limits.stats_timeout_s):
                    states = await served.engine.sessions()
                    parked = [state for state in states if state.state is SequenceState.PARKED]
                    for name in {state.name for state in parked}:
                        await served.engine.resume(name)

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for those under way; False if some are left then."""
        await self.begin_drain()
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.sessions):
                    await self.sessions.next_end()
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Serving:
    """A request and the model that works on it. name: what the request called the model."""

    served: Served
    session: Session
    name: str
    created_s: int


def service_of(request: Request) -> Service:
    """The service of the app that a request came to."""
    service: Service = request.app.state.service
    return service
