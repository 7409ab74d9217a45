"""The HTTP server under the app: uvicorn, with our limits on connections.

Knows sockets and connections. Signals and logs are somebody else's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jitllm.errors import JitllmError

BACKLOG = 2048
KEEP_ALIVE_S = 75
HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 64 << 10


class _Connection(h11.Connection):
    """Frames the chunks of a stream by itself: none of them changes a state, and h11 would take a
    part of each token's time to find that."""

    _is_chunked = False

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """The bytes of an event; see `h11.Connection.send`."""
        if self._is_chunked and type(event) is h11.Data:
            size = len(event.data)  # a chunk of no bytes would be the end
            return b"%x\r\n%b\r\n" % (size, event.data) if size else b""
        self._is_chunked = False
        sent = super().send(event)
        if sent is not None and type(event) is h11.Response:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent


class Protocol(H11Protocol):
    """Hangs up on clients that connect and say nothing, or take too long to say it."""

    head_timeout_s = HEAD_TIMEOUT_S
    _late: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Connection(h11.SERVER, MAX_HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            KEEP_ALIVE_S, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        """It said something; a head that has begun must end in time."""
        super().data_received(data)
        is_in_head = self.cycle is None or self.cycle.response_complete
        if not is_in_head or self.transport.is_closing():
            self._in_time()
        elif self._late is None:
            self._late = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._in_time()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class HttpServer(uvicorn.Server):
    """Serves an ASGI app; `should_exit` ends it, after at most drain_s for replies under way."""

    def __init__(self, app: Any, drain_s: float, protocol: type[Protocol] = Protocol) -> None:
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(round(drain_s), 1),
            server_header=False,
        )
        super().__init__(config)
        self._listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._listening.set()

    async def until_listening(self, running: asyncio.Task[None]) -> None:
        """Wait until clients can connect. Raises what ended `running` before that."""
        listening = asyncio.create_task(self._listening.wait())
        await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if not self._listening.is_set():
            running.result()
            raise JitllmError("the server did not start")

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave them alone."""
        yield
