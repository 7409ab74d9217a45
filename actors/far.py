"""Messages between nodes: frames as calls of Ray's, in order.

Calls overtake each other, so each has a number. Knows frames and calls. Imports no Ray: a handle is
given.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

from actors import caller
from actors.caller import Listener
from actors.carry import Carrier, Frame, Frames, Kind, pack, peek
from actors.local import LocalRef
from actors.session import Session

_MAX_UNANSWERED = 256
"""Messages that are not in their mailbox yet, before their sender waits."""

_GOES_ON = (Kind.PART, Kind.PONG)
"""Frames after which more may answer the same question."""


class RayWire:
    """Frames as calls of Ray's. They overtake each other, so each has a number."""

    def __init__(self, handle: Any, listener: Listener) -> None:
        self._handle = handle
        self._listener = listener
        self._sender = secrets.token_hex(8)
        self._num_sent = 0
        self._calls: set[asyncio.Task[None]] = set()
        self._num_unanswered = 0
        self._drained = asyncio.Event()
        self._drained.set()

    def send(self, data: bytes) -> None:
        """See `Wire`."""
        call = asyncio.create_task(self._call(self._num_sent, data))
        self._num_sent += 1
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def room(self) -> None:
        """See `Wire`."""
        await self._drained.wait()

    def close(self) -> None:
        """See `Wire`."""
        self._drained.set()
        current = asyncio.current_task() if self._calls else None
        for call in self._calls - {current}:
            call.cancel()

    async def _call(self, number: int, data: bytes) -> None:
        kind, question = peek(data)
        is_tell = kind is Kind.TELL
        self._count(is_tell)
        try:
            goes_on = self._hand_on(await self._handle.deliver.remote(self._sender, number, data))
            while goes_on and kind is Kind.FOLLOW:
                goes_on = self._hand_on(await self._handle.more.remote(self._sender, question))
        except Exception as error:
            self._listener.lose(f"a call failed ({type(error).__name__})")
        finally:
            self._count(-is_tell)

    def _hand_on(self, answers: bytes) -> bool:
        """Whether more than these frames may come back."""
        kind = Kind.PONG
        for frame in Frames().feed(answers):
            self._listener.answer(frame)
            kind = frame.kind
        return kind in _GOES_ON

    def _count(self, change: int) -> None:
        self._num_unanswered += change
        if self._num_unanswered < _MAX_UNANSWERED:
            self._drained.set()
        else:
            self._drained.clear()


class RayGuest:
    """A sender on another node: its frames in the order in which they were sent.

    A call of Ray's is answered once. So who follows keeps a call here that takes what has come,
    and makes the next one then: a long poll. It bounds what travels, needs no stream of Ray's with
    a life of its own, and tells by its absence that who followed is gone with its node.
    """

    def __init__(self, ref: LocalRef, carrier: Carrier) -> None:
        self._session = Session(ref, carrier, self._answer, self._resume)
        self._num_taken = 0
        self._early: dict[int, asyncio.Future[None]] = {}
        self._has_room = asyncio.Event()
        self._trays: dict[int, _Tray] = {}

    async def take(self, number: int, data: bytes) -> bytes:
        """Handle frame `number`; frames that answer it, or one that says it was taken."""
        if number != self._num_taken:
            turn = self._early[number] = asyncio.get_running_loop().create_future()
            await turn
        (frame,) = Frames().feed(data)
        if frame.kind in (Kind.ASK, Kind.FOLLOW):
            self._trays[frame.question] = _Tray()
        self._has_room.clear()
        if not self._session.take(frame):
            await self._has_room.wait()
        self._num_taken += 1
        turn_of_next = self._early.pop(self._num_taken, None)
        if turn_of_next is not None:
            turn_of_next.set_result(None)
        match frame.kind:
            case Kind.ASK:
                return await self._collect(frame.question)
            case Kind.FOLLOW:
                return await self.more(frame.question)
            case _:
                return pack(Kind.PONG)

    async def more(self, question: int) -> bytes:
        """What has come of a reply in parts, or, when nothing does, that it goes on."""
        try:
            async with asyncio.timeout(caller.PING_S):
                data = await self._collect(question)
        except TimeoutError:
            data = pack(Kind.PONG)
        tray = self._trays.get(question)
        if tray is not None:
            loop = asyncio.get_running_loop()
            tray.absence = loop.call_later(caller.DEADLINE_S, self._give_up, question)
        return data

    async def _collect(self, question: int) -> bytes:
        """The frames that came for a question, once there are some."""
        tray = self._trays.get(question)
        if tray is None:  # it was given up
            return pack(Kind.NOTHING, question)
        if tray.absence is not None:
            tray.absence.cancel()
        await tray.has_some.wait()
        data = b"".join(tray.frames)
        tray.frames.clear()
        tray.has_some.clear()
        if tray.is_last:
            del self._trays[question]
        return data

    def _give_up(self, question: int) -> None:
        """Nobody has come for a reply for so long that nobody will."""
        del self._trays[question]
        self._session.take(Frame(Kind.CANCEL, question, b""))

    def _answer(self, data: bytes) -> None:
        for frame in Frames().feed(data):
            tray = self._trays.get(frame.question)
            if tray is not None:
                tray.frames.append(pack(*frame))
                tray.is_last = frame.kind not in _GOES_ON
                tray.has_some.set()

    def _resume(self) -> None:
        self._has_room.set()


@dataclass(slots=True)
class _Tray:
    """Frames that answer a question and were not collected yet.

    absence: runs out when nobody comes for them.
    """

    frames: list[bytes] = field(default_factory=list)
    has_some: asyncio.Event = field(default_factory=asyncio.Event)
    is_last: bool = False
    absence: asyncio.TimerHandle | None = None
