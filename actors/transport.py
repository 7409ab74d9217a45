"""How processes of one node reach each other's actors: frames over a Unix socket.

Knows frames, mailboxes and who asked what. Knows no Ray. A socket is a bounded queue in the memory
of the kernel, and all that a step needs of one: it keeps the order, wakes the peer, holds a sender
back, and says at once when a process is gone.

The asking side is a `Caller`, one for each actor that a process speaks to. The actor's side is a
`Session` for each caller; behind a `Door` when the two share a node.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from actors.actor import Message
from actors.carry import Carrier, Frame, Frames, Kind, pack
from actors.local import Letter, LocalRef
from actors.mailbox import Lost, Stopped
from actors.parts import Parts
from jitllm.log import logger

R = TypeVar("R")
P = TypeVar("P")

PING_S = 2.0
"""How often a silent peer is asked whether it lives, while it owes an answer."""
DEADLINE_S = 30.0
"""Silence after which a peer is given up: loading a large vocabulary may hold it for seconds."""

_MAX_UNSENT_BYTES = 1 << 20
_log = logger(__name__)


class Wire(Protocol):
    """Carries frames to one actor, in order."""

    def send(self, data: bytes) -> None:
        """Queue a frame."""
        ...

    async def room(self) -> None:
        """Wait while too much is queued."""
        ...

    def close(self) -> None:
        """End it; nothing is answered any more."""
        ...


class Listener(Protocol):
    """Who opened a wire."""

    def answer(self, frame: Frame) -> None:
        """A frame came back."""
        ...

    def lose(self, problem: str) -> None:
        """The wire has ended."""
        ...


Connect = Callable[[Listener], Coroutine[Any, Any, Wire]]

# ------------------------------------------------------------------------------------ who asks


@dataclass(slots=True)
class _Ask:
    message: Message[Any]
    reply: asyncio.Future[Any]


class Caller:
    """Messages from this process to one actor elsewhere, in the order of the calls.

    Made for one connection: once it `is_lost`, make another one.
    """

    def __init__(self, name: str, carrier: Carrier, connect: Connect) -> None:
        self._name = name
        self._carrier = carrier
        self._asks: dict[int, _Ask] = {}
        self._followed: dict[int, Parts[Any]] = {}
        self._num_questions = 0
        self._unsent: list[bytes] = []
        self._wire: Wire | None = None
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._opening = loop.create_task(self._open(connect))
        self._error: Exception | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._silent_s = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether the other side is out of reach."""
        return self._error is not None

    async def tell(self, message: Message[Any]) -> None:
        """See `Ref.tell`. Raises `Lost` when the process of the actor is gone."""
        self._send(pack(Kind.TELL, 0, self._carrier.dump(message)))
        await self._room()

    async def ask(self, message: Message[R]) -> R:
        """See `Ref.ask`. Raises `Lost` when the process of the actor goes meanwhile."""
        question = self._put(Kind.ASK, message)
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._asks[question] = _Ask(message, reply)
        self._keep_watch()
        try:
            await self._room()
            return await reply
        except asyncio.CancelledError:
            if question in self._asks:
                reply.cancel()
                self._send(pack(Kind.CANCEL, question))
            elif reply.done() and not reply.cancelled() and reply.exception() is None:
                self._return(message, reply.result())  # it came in the same moment
            raise

    async def follow(self, message: Message[Parts[P]]) -> AsyncGenerator[P, None]:
        """See `Ref.follow`. Raises `Lost` when the process of the actor goes meanwhile."""
        question = self._put(Kind.FOLLOW, message)
        parts: Parts[P] = Parts(partial(self._leave, question))
        self._followed[question] = parts
        self._keep_watch()
        try:
            await self._room()
            async for part in parts:
                yield part
        finally:
            parts.leave()

    def close(self) -> None:
        """Ask nothing any more; who waits gets `Stopped`."""
        self._end(Stopped(self._name))

    # --- Listener ----------------------------------------------------------------------------

    def answer(self, frame: Frame) -> None:
        """See `Listener`."""
        self._silent_s = 0.0
        if frame.question in self._followed:
            self._take_part(frame, self._followed[frame.question])
            return
        ask = self._asks.pop(frame.question, None)
        if ask is None:
            return
        if ask.reply.done():  # who asked was cancelled
            if frame.kind is Kind.REPLY:
                self._return(ask.message, self._carrier.load(frame.body))
            return
        try:
            value = self._read(frame)
        except Exception as error:
            ask.reply.set_exception(error)
        else:
            ask.reply.set_result(value)

    def lose(self, problem: str) -> None:
        """See `Listener`."""
        self._end(Lost(self._name, problem))

    # -----------------------------------------------------------------------------------------

    def _take_part(self, frame: Frame, parts: Parts[Any]) -> None:
        try:
            value = self._read(frame)
        except Exception as error:
            del self._followed[frame.question]
            parts.fail(error)
            if frame.kind is Kind.PART and self._error is None:
                self._send(pack(Kind.CANCEL, frame.question))
            return
        if frame.kind is Kind.PART:
            parts.put(value)
        else:
            del self._followed[frame.question]
            parts.end()

    def _read(self, frame: Frame) -> Any:
        """What a frame says; raises what the actor failed with, or that it cannot be read."""
        try:
            value = self._carrier.load(frame.body) if frame.body else None
        except Exception as error:
            unread = f"an answer of {self._name} could not be read: {error}"
            raise RuntimeError(unread) from error
        if frame.kind in (Kind.REPLY, Kind.PART):
            return value
        raise value if isinstance(value, BaseException) else Stopped(self._name)

    def _leave(self, question: int) -> None:
        """Who followed takes no more."""
        del self._followed[question]
        if self._error is None:
            self._send(pack(Kind.CANCEL, question))

    async def _open(self, connect: Connect) -> None:
        try:
            wire = await connect(self)
        except Exception as error:
            self._end(error)
            return
        if self._error is not None:
            wire.close()
            return
        self._wire = wire
        for data in self._unsent:
            wire.send(data)
        self._unsent.clear()
        self._ready.set_result(None)

    def _put(self, kind: Kind, message: Message[Any]) -> int:
        """Send what will be answered; the number of the question."""
        body = self._carrier.dump(message)
        self._num_questions += 1
        self._send(pack(kind, self._num_questions, body))
        return self._num_questions

    def _send(self, data: bytes) -> None:
        if self._error is not None:
            raise self._error
        if self._wire is None:
            self._unsent.append(data)
        else:
            self._wire.send(data)

    async def _room(self) -> None:
        if self._wire is None:
            await asyncio.shield(self._ready)
        if self._wire is not None:
            await self._wire.room()

    def _return(self, message: Message[Any], reply: object) -> None:
        """Give a reply back that nobody took."""
        if self._error is None:
            self._send(pack(Kind.LOST, 0, self._carrier.dump((message, reply))))

    def _end(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._watch is not None:
            self._watch.cancel()
        if self._wire is not None:
            self._wire.close()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # perhaps nobody waits for it
        asks, self._asks = self._asks, {}
        for ask in asks.values():
            if not ask.reply.done():
                ask.reply.set_exception(error)
                ask.reply.exception()  # who asked may be cancelled before it looks
        followed, self._followed = self._followed, {}
        for parts in followed.values():
            parts.fail(error)

    def _keep_watch(self) -> None:
        """Ask a silent peer whether it lives, for as long as it owes an answer."""
        if self._watch is None:
            self._silent_s = 0.0
            self._watch = asyncio.get_running_loop().call_later(PING_S, self._look)

    def _look(self) -> None:
        self._watch = None
        if not (self._asks or self._followed) or self._wire is None:
            return
        if self._silent_s >= DEADLINE_S:
            _log.error("%s does not move", self._name)
            self.lose(f"it has not moved for {self._silent_s:g} s")
            return
        silent_s = self._silent_s + PING_S
        self._wire.send(pack(Kind.PING))
        self._keep_watch()
        self._silent_s = silent_s


# --------------------------------------------------------------------------------- who is asked


class Session:
    """One caller's messages to an actor of this process.

    send: takes the frames that go back, one or more at a time. resume: called when a full mailbox
    has room again. send_now: `send` for other threads, where there is such a way. Parts of all
    replies that come in one turn of the event loop go back together: it is the number of times that
    a caller is woken which costs.
    """

    def __init__(
        self,
        ref: LocalRef,
        carrier: Carrier,
        send: Callable[[bytes], None],
        resume: Callable[[], None] = lambda: None,
        send_now: Callable[[bytes], None] | None = None,
    ) -> None:
        self._ref = ref
        self._carrier = carrier
        self._send = send
        self._resume = resume
        self._send_now = send_now
        self._owed: dict[int, Letter] = {}
        self._followed: dict[int, tuple[Letter, Parts[Any]]] = {}
        self._changed: dict[int, None] = {}  # those with parts to send, in this order
        self._held: deque[tuple[Frame, Letter]] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._is_closed = False

    def take(self, frame: Frame) -> bool:
        """Handle a frame; False: send no more before `resume` was called."""
        match frame.kind:
            case Kind.TELL | Kind.ASK | Kind.FOLLOW:
                self._deliver(frame)
            case Kind.CANCEL:
                self._give_up(frame.question)
            case Kind.LOST:
                self._take_back(frame)
            case Kind.PING:
                self._send(pack(Kind.PONG))
            case _:
                raise ValueError(f"a caller sent {frame.kind.name}")
        return self._pump is None

    def close(self) -> None:
        """The caller is gone: nobody waits for what it asked."""
        self._is_closed = True
        for question in (*self._owed, *self._followed):
            self._give_up(question)

    def _give_up(self, question: int) -> None:
        """Who asked or followed does not wait any more."""
        letter = self._owed.get(question)
        if letter is not None and letter.reply is not None:
            if not letter.reply.cancel():  # it came in the same moment, and is about to be sent
                asyncio.get_running_loop().call_soon(self._give_up, question)
        elif question in self._followed:
            self._ref.lose(*self._followed.pop(question))
            self._send_back(pack(Kind.NOTHING, question))

    def _deliver(self, frame: Frame) -> None:
        try:
            message = self._carrier.load(frame.body)
        except Exception as error:
            self._refuse(frame, RuntimeError(f"a message could not be read: {error}"))
            return
        letter = Letter(message, None, is_followed=frame.kind is Kind.FOLLOW)
        if frame.kind is not Kind.TELL:
            letter.reply = asyncio.get_running_loop().create_future()
            letter.reply.add_done_callback(partial(self._answer, frame.question))
            self._owed[frame.question] = letter
        if self._pump is None and self._offer(frame, letter):
            return
        self._held.append((frame, letter))
        if self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._pump_held())

    def _offer(self, frame: Frame, letter: Letter) -> bool:
        try:
            return self._ref.offer(letter)
        except Stopped as error:
            self._fail(frame, letter, error)
            return True

    async def _pump_held(self) -> None:
        while self._held:
            frame, letter = self._held.popleft()
            try:
                await self._ref.put(letter)
            except Stopped as error:
                self._fail(frame, letter, error)
            self._send_back(pack(Kind.PONG))
        self._pump = None
        self._resume()

    def _fail(self, frame: Frame, letter: Letter, error: Exception) -> None:
        if letter.reply is not None and not letter.reply.done():
            letter.reply.set_exception(error)
        elif letter.reply is None:
            self._refuse(frame, error)

    def _refuse(self, frame: Frame, error: Exception) -> None:
        if frame.kind is not Kind.TELL:
            self._send_back(pack(Kind.FAILURE, frame.question, self._carrier.dump_error(error)))
        else:
            _log.error("%s did not get a message: %s", self._ref.name, error)

    def _answer(self, question: int, reply: asyncio.Future[Any]) -> None:
        """The actor has answered, or nobody waits any more."""
        letter = self._owed.pop(question)
        if reply.cancelled():
            self._send_back(pack(Kind.NOTHING, question))
        elif (error := reply.exception()) is not None:
            self._send_back(pack(Kind.FAILURE, question, self._carrier.dump_error(error)))
        elif self._is_closed:
            self._ref.lose(letter, reply.result())
        elif letter.is_followed:
            self._follow(question, letter, reply.result())
        else:
            try:
                data = pack(Kind.REPLY, question, self._carrier.dump(reply.result()))
            except Exception as untold:
                self._ref.lose(letter, reply.result())
                data = pack(Kind.FAILURE, question, self._carrier.dump_error(untold))
            self._send_back(data)

    def _follow(self, question: int, letter: Letter, parts: Parts[Any]) -> None:
        """Send what is put from now on, after what was put already."""
        self._followed[question] = letter, parts
        parts.watch(partial(self._note, question))
        self._note(question)

    def _note(self, question: int) -> None:
        if not self._changed:
            asyncio.get_running_loop().call_soon(self._send_parts)
        self._changed[question] = None

    def _send_parts(self) -> None:
        """All that was put since the last time."""
        changed, self._changed = self._changed, {}
        data = b"".join(frame for question in changed for frame in self._frames(question))
        if data:
            self._send_back(data)
        if (send := self._send_now) is not None:
            for question in changed:
                if question in self._followed:
                    self._followed[question][1].shortcut(partial(self._carry, send, question))

    def _carry(self, send: Callable[[bytes], None], question: int, part: object) -> None:
        """In the thread that sends a part: at once, without this loop."""
        send(self._part(question, part))

    def _part(self, question: int, part: object) -> bytes:
        return pack(Kind.PART, question, self._carrier.dump(part))

    def _frames(self, question: int) -> Iterator[bytes]:
        """The parts of one reply that wait, and its end."""
        if question not in self._followed:
            return
        letter, parts = self._followed[question]
        try:
            for part in parts.take():
                yield self._part(question, part)
        except Exception as untold:
            del self._followed[question]
            self._ref.lose(letter, parts)
            yield pack(Kind.FAILURE, question, self._carrier.dump_error(untold))
            return
        if parts.is_over:
            del self._followed[question]
            yield self._end(question, parts.error)

    def _end(self, question: int, error: BaseException | None) -> bytes:
        if error is None:
            return pack(Kind.REPLY, question)
        return pack(Kind.FAILURE, question, self._carrier.dump_error(error))

    def _take_back(self, frame: Frame) -> None:
        try:
            message, reply = self._carrier.load(frame.body)
        except Exception:
            _log.exception("%s could not take a reply back", self._ref.name)
        else:
            self._ref.lose(Letter(message, None), reply)

    def _send_back(self, data: bytes) -> None:
        if not self._is_closed:
            self._send(data)


# ------------------------------------------------------------------------------------- one node


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
