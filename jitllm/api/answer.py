"""How a reply leaves: as one body or as server-sent events, and what happens when nobody listens.

Knows ASGI. A reply is an async generator of bytes. It is closed when the client goes away or reads
too slowly, which cancels what is behind it. What fails before the first byte gets a status of its
own, in streams too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from jitllm.api.errors import explained

Parts = AsyncGenerator[bytes, None]

DONE = b"data: [DONE]\n\n"
PING = b": still at it\n\n"
"""A comment: clients skip it, and proxies see that the connection is in use."""

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def as_json(value: Any) -> bytes:
    """One JSON value, compact."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(value) + b"\n\n"


class _SlowReaderError(Exception):
    """The client took too long to read; for us it is gone."""


class Answer(Response):
    """Sends what `parts` yields. param: the field to blame for a prompt that does not fit."""

    def __init__(
        self,
        parts: Callable[[], Parts],
        *,
        is_stream: bool,
        send_timeout_s: float,
        param: str | None = None,
    ) -> None:
        self.media_type = "text/event-stream" if is_stream else "application/json"
        super().__init__(headers=_STREAM_HEADERS if is_stream else None)
        del self.headers["content-length"]
        self._parts = parts
        self._is_stream = is_stream
        self._send_timeout_s = send_timeout_s
        self._param = param

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work until everything is sent or the client is gone."""
        worker = asyncio.create_task(self._work(scope, receive, send))
        watcher = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _stopped(watcher)
            if not worker.done():
                scope["jitllm.gone"] = True
            await _stopped(worker)
        if not worker.cancelled():
            worker.result()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts()) as parts:
            try:
                first = await anext(parts)
            except Exception as error:
                refusal = explained(error, self._param)
                await refusal.response()(scope, receive, send)
                return
            if not self._is_stream:
                self.headers["content-length"] = str(len(first))
            await self._send(send, self._head())
            try:
                await self._send(send, _body(first, more=self._is_stream))
                if self._is_stream:
                    await self._send_rest(parts, send)
            except _SlowReaderError:
                scope["jitllm.gone"] = True

    async def _send_rest(self, parts: Parts, send: Send) -> None:
        try:
            async for part in parts:
                await self._send(send, _body(part, more=True))
        except _SlowReaderError:
            raise
        except Exception as error:  # the status is out: what is left is to say so in the stream
            await self._send(send, _body(event(explained(error, self._param).body()), more=True))
            await self._send(send, _body(DONE, more=True))
        await self._send(send, _body(b"", more=False))

    def _head(self) -> dict[str, Any]:
        return {"type": "http.response.start", "status": 200, "headers": self.raw_headers}

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)
        except TimeoutError as error:
            raise _SlowReaderError from error


async def _gone(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stopped(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; what it raises stays in it."""
    task.cancel()
    await asyncio.wait({task})


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
