"""An app with a fake model, and clients for it that need no socket."""

from __future__ import annotations

import asyncio
import gc
import json
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from jitllm.api.app import create_app
from jitllm.api.service import Limits
from tests.api.fake import FakeEngine, FakeModels, served


@pytest.fixture(scope="module", autouse=True)
def _clients_are_collected() -> Iterator[None]:
    """What other people's clients leave open goes here, and is not laid to a later test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def models(engine: FakeEngine) -> FakeModels:
    return FakeModels(served(engine))


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def app(models: FakeModels, limits: Limits) -> FastAPI:
    return create_app(models, limits)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@dataclass
class Call:
    """One request to an ASGI app, with a client that may go away or read slowly."""

    app: FastAPI
    path: str
    body: Any
    messages: list[Any] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    may_read: asyncio.Event | None = None
    _chunks: list[bytes] = field(default_factory=list)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._chunks = [json.dumps(self.body).encode()]

    def start(self) -> asyncio.Task[None]:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"mine")],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
            "scheme": "http",
            "root_path": "",
        }
        return asyncio.create_task(self.app(scope, self._receive, self._send))

    async def until(self, num_messages: int) -> None:
        """Wait for so many messages of the answer."""
        while len(self.messages) < num_messages:
            self._came.clear()
            await self._came.wait()

    @property
    def text(self) -> str:
        """All of the body so far."""
        return b"".join(m.get("body", b"") for m in self.messages).decode()

    async def _receive(self) -> Any:
        if self._chunks:
            return {"type": "http.request", "body": self._chunks.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self.may_read is not None and self.messages:
            await self.may_read.wait()
        self.messages.append(message)
        self._came.set()


async def until(condition: Callable[[], object]) -> None:
    """Let the others run until it is so."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


Caller = Callable[..., Call]


@pytest.fixture
def call(app: FastAPI) -> Caller:
    """(path, body) to a `Call`."""
    return lambda path, body, **more: Call(app, path, {"model": "fake"} | body, **more)


def events(text: str) -> list[Any]:
    """What a stream said, without its end."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
