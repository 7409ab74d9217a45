"""Who is asked from another process: one caller's messages to an actor of this one.

Knows frames, mailboxes and what each question is owed. Knows no way that frames come by.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from actors.carry import Carrier, Frame, Kind, pack
from actors.local import Letter, LocalRef
from actors.mailbox import Stopped
from actors.parts import Parts
from jitllm.log import logger

_log = logger(__name__)


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
