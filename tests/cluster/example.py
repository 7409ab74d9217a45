"""An actor to try runtimes with: it counts, fails, waits and loses."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import assert_never

from actors.actor import Actor, Message, Ref
from jitllm.errors import JitllmError, PageError


@dataclass(frozen=True, slots=True)
class Note(Message[None]):
    """Remember that this was the `number`th of a sender."""

    sender: str
    number: int


@dataclass(frozen=True, slots=True)
class Notes(Message[tuple[int, ...]]):
    """What was noted of a sender, in order."""

    sender: str


@dataclass(frozen=True, slots=True)
class Echo(Message[object]):
    """Answer with `value`."""

    value: object


@dataclass(frozen=True, slots=True)
class Fail(Message[None]):
    """Raise a page error, or one that cannot travel."""

    travels: bool = True


@dataclass(frozen=True, slots=True)
class Wait(Message[str]):
    """Answer after `Open`, while other messages are handled."""


@dataclass(frozen=True, slots=True)
class Hold(Message[None]):
    """Handle nothing else until so many seconds are over."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Open(Message[None]):
    """Answer who waits."""


@dataclass(frozen=True, slots=True)
class Taken(Message[tuple[object, ...]]):
    """Replies that nobody took."""


@dataclass(frozen=True, slots=True)
class Pid(Message[int]):
    """In which process the actor lives."""


@dataclass(frozen=True, slots=True)
class Through(Message[object]):
    """Ask another actor."""

    ref: Ref
    message: Message[object]


ExampleMessage = Note | Notes | Echo | Fail | Wait | Hold | Open | Taken | Pid | Through


class Untold(Exception):
    """Cannot be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("I stay")


class Example(Actor):
    """See the messages."""

    def __init__(self) -> None:
        self._notes: dict[str, list[int]] = {}
        self._gate = asyncio.Event()
        self._lost: list[object] = []

    async def receive(self, message: ExampleMessage) -> object:
        match message:
            case Note():
                self._notes.setdefault(message.sender, []).append(message.number)
                return None
            case Notes():
                return tuple(self._notes.get(message.sender, ()))
            case Echo():
                return message.value
            case Fail():
                raise PageError("/some/file", 4096, "no luck") if message.travels else Untold("x")
            case Wait():
                return self.context.later(self._wait(), "wait")
            case Hold():
                await asyncio.sleep(message.seconds)
                return None
            case Open():
                self._gate.set()
                return None
            case Taken():
                return tuple(self._lost)
            case Pid():
                return os.getpid()
            case Through():
                return await message.ref.ask(message.message)
            case _:
                assert_never(message)

    async def _wait(self) -> str:
        await self._gate.wait()
        return "open"

    def on_lost(self, message: object, reply: object) -> None:
        self._lost.append(reply)


@dataclass(frozen=True, slots=True)
class ExampleRecipe:
    """Makes an `Example`, or says that it cannot."""

    problem: str = ""

    async def make(self) -> Example:
        if self.problem:
            raise JitllmError(self.problem, "try another")
        return Example()
