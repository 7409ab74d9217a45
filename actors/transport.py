"""How processes of one node reach each other's actors: frames over a Unix socket.

Knows frames and sockets. Knows no Ray. A socket is a bounded queue in the memory of the kernel, and
all that a step needs of one: it keeps the order, wakes the peer, holds a sender back, and says at
once when a process is gone.

The asking side is a wire for a `Caller`, one for each actor that a process speaks to. The actor's
side is a `Door`, behind which there is a `Session` for each caller.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import threading
from functools import partial
from typing import cast

from actors.caller import Listener, Wire
from actors.carry import Carrier, Frames
from actors.local import LocalRef
from actors.session import Session
from jitllm.log import logger

_MAX_UNSENT_BYTES = 1 << 20

_log = logger(__name__)


class Door:
    """Where the other processes of this node reach an actor; its address is a socket's name.

    The name lies in no file system, so that nothing is left of it when the process ends.
    """

    def __init__(self, ref: LocalRef, carrier: Carrier) -> None:
        self._ref = ref
        self._carrier = carrier
        self._guests: set[_Guest] = set()
        self._server: asyncio.Server | None = None
        self.address = f"\0jitllm-{os.getpid()}-{secrets.token_hex(8)}"

    async def open(self) -> None:
        """Let callers in."""
        loop = asyncio.get_running_loop()
        listening = _socket()
        listening.bind(self.address)
        self._server = await loop.create_unix_server(self._guest, sock=listening)

    def close(self) -> None:
        """Let nobody in any more, and end what callers have open."""
        if self._server is not None:
            self._server.close()
        for guest in list(self._guests):
            guest.close()

    def _guest(self) -> _Guest:
        return _Guest(self._ref, self._carrier, self._guests)


class _Writer:
    """Bytes to a socket, from its event loop and from other threads; in order, and each call's
    bytes in one piece."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._fd = os.dup(transport.get_extra_info("socket").fileno())
        self._left = b""  # of what other threads sent, for the event loop to write

    def write(self, data: bytes = b"") -> None:
        """From the event loop."""
        with self._lock:
            data, self._left = self._left + data, b""
            if data:
                self._transport.write(data)

    def send(self, data: bytes) -> None:
        """From another thread: at once, if nothing waits and the socket takes it."""
        with self._lock:
            if self._fd < 0:
                return
            is_free = not self._left and not self._transport.get_write_buffer_size()
            sent = self._send(data) if is_free else 0
            if sent == len(data):
                return
            self._left += data[sent:]
        self._loop.call_soon_threadsafe(self.write)

    def _send(self, data: bytes) -> int:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0
        except OSError:  # who was to read it is gone, as the event loop finds out by itself
            return len(data)

    def close(self) -> None:
        """The socket is closed."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1


class _Guest(asyncio.Protocol):
    """A caller at a door."""

    def __init__(self, ref: LocalRef, carrier: Carrier, guests: set[_Guest]) -> None:
        self._ref = ref
        self._carrier = carrier
        self._guests = guests
        self._frames = Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._guests.add(self)
        if _peer_uid(transport) != os.getuid():
            _log.error("%s was called by another user, who was not let in", self._ref.name)
            self._transport.abort()
        self._writer = writer = _Writer(self._transport)
        resume = self._transport.resume_reading
        self._session = Session(self._ref, self._carrier, writer.write, resume, writer.send)

    def data_received(self, data: bytes) -> None:
        goes_on = True
        try:
            for frame in self._frames.feed(data):
                goes_on = self._session.take(frame)
        except ValueError as error:
            _log.error("%s was sent what is no message: %s", self._ref.name, error)
            self._transport.abort()
        if not goes_on:
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._guests.discard(self)
        self._session.close()
        self._writer.close()

    def close(self) -> None:
        """What was answered still goes out."""
        self._transport.close()


class _UnixWire(asyncio.Protocol):
    """A caller's end."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._frames = Frames()
        self._drained: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_MAX_UNSENT_BYTES)
        if _peer_uid(transport) != os.getuid():
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._listener.answer(frame)

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def connection_lost(self, error: Exception | None) -> None:
        self.resume_writing()
        self._listener.lose("its process ended")

    def send(self, data: bytes) -> None:
        """See `Wire`."""
        self._transport.write(data)

    async def room(self) -> None:
        """See `Wire`."""
        if self._drained is not None:
            await asyncio.shield(self._drained)

    def close(self) -> None:
        """See `Wire`."""
        self._transport.abort()


async def connect(address: str, listener: Listener) -> Wire:
    """A wire to the actor behind the door at `address`. Raises `OSError` when it is closed."""
    loop = asyncio.get_running_loop()
    calling = _socket()
    try:
        await loop.sock_connect(calling, address)
        _, wire = await loop.create_unix_connection(partial(_UnixWire, listener), sock=calling)
    except BaseException:
        calling.close()
        raise
    return wire


def _socket() -> socket.socket:
    """Made here and not by the event loop: not every kind of loop takes a name without a file."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


def _peer_uid(transport: asyncio.BaseTransport) -> int:
    """The user at the other end."""
    sock = transport.get_extra_info("socket")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1])
