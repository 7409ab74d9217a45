"""Who asks an actor in another process: its questions, and what becomes of them.

Knows frames and who waits for which answer. A `Wire` carries frames: a socket on one node
(`actors.transport`), calls of Ray's between nodes (`actors.far`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from actors.actor import Message
from actors.carry import Carrier, Frame, Kind, pack
from actors.mailbox import Lost, Stopped
from actors.parts import Parts
from jitllm.log import logger

R = TypeVar("R")
P = TypeVar("P")

PING_S = 2.0
"""How often a silent peer is asked whether it lives, while it owes an answer."""
DEADLINE_S = 30.0
"""Silence after which a peer is given up: loading a large vocabulary may hold it for seconds."""

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
