"""How a reply leaves: as one body or as server-sent events, and what happens when nobody listens.

Knows ASGI. Whoever makes a reply sends its parts to an `Outlet`, and is cancelled when the client
goes away or reads too slowly. What fails before the first byte gets a status of its own, in streams
too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.responses import Response
from pydantic_core import to_json
from starlette.types import Message, Receive, Scope, Send

from jitllm.api.errors import explained

DONE = b"data: [DONE]\n\n"
PING = b": still at it\n\n"
"""A comment: clients skip it, and proxies see that the connection is in use."""

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def as_json(value: Any) -> bytes:
    """One JSON value, compact; null for a float that is no number."""
    return to_json(value, inf_nan_mode="null")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(value) + b"\n\n"


class Outlet:
    """Where the parts of a reply leave, one after the other, whoever sends them."""

    def __init__(self, send: Send, head: Message) -> None:
        self._send = send
        self._head: Message | None = head
        self._turn = asyncio.Lock()
        self.since_s = time.monotonic()
        """When the last part left, or the one that is on its way began to."""

    @property
    def has_begun(self) -> bool:
        """Whether a status is out."""
        return self._head is None

    @property
    def is_sending(self) -> bool:
        """Whether a part waits for the client to read."""
        return self._turn.locked()

    async def send(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body, and the head before the first one; waits for a slow client."""
        async with self._turn:
            self.since_s = time.monotonic()
            if self._head is not None:
                head, self._head = self._head, None
                if not more:
                    length = b"content-length", str(len(data)).encode()
                    head["headers"] = [*head["headers"], length]
                await self._send(head)
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            self.since_s = time.monotonic()


class Answer(Response):
    """Has `reply` send itself. param: the field to blame for a prompt that does not fit.

    send_timeout_s: for a client that reads nothing. patience_s: after so long without a part a
    stream gets a sign of life.
    """

    def __init__(
        self,
        reply: Callable[[Outlet], Awaitable[None]],
        *,
        is_stream: bool,
        send_timeout_s: float,
        patience_s: float,
        param: str | None = None,
    ) -> None:
        self.media_type = "text/event-stream" if is_stream else "application/json"
        super().__init__(headers=_STREAM_HEADERS if is_stream else None)
        del self.headers["content-length"]
        self._reply = reply
        self._send_timeout_s = send_timeout_s
        self._patience_s = patience_s if is_stream else math.inf
        self._param = param

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work until everything is sent or the client is gone."""
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        out = Outlet(send, head)
        worker = asyncio.create_task(self._work(out, scope, receive, send))
        watcher = asyncio.create_task(_gone(receive))
        try:
            await self._watch(out, {worker, watcher})
        finally:
            await _stopped(watcher)
            if not worker.done():
                scope["jitllm.gone"] = True
            await _stopped(worker)
        if not worker.cancelled():
            worker.result()

    async def _work(self, out: Outlet, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._reply(out)
        except Exception as error:
            refusal = explained(error, self._param)
            if not out.has_begun:
                await refusal.response()(scope, receive, send)
            else:  # the status is out: what is left is to say so in the stream
                await out.send(event(refusal.body()) + DONE, more=False)

    async def _watch(self, out: Outlet, tasks: set[asyncio.Task[None]]) -> None:
        """Returns when one of the tasks is done, or the client has read nothing for too long."""
        most_s = min(self._send_timeout_s, self._patience_s)  # who sends may begin or end meanwhile
        while True:
            limit_s = self._send_timeout_s if out.is_sending else self._patience_s
            left_s = out.since_s + limit_s - time.monotonic()
            if left_s > 0:
                done, _ = await asyncio.wait(
                    tasks, timeout=min(left_s, most_s), return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    return
            elif out.is_sending:
                return
            else:
                try:
                    async with asyncio.timeout(self._send_timeout_s):
                        await out.send(PING)
                except TimeoutError:
                    return


async def _gone(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stopped(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; what it raises stays in it."""
    task.cancel()
    await asyncio.wait({task})
