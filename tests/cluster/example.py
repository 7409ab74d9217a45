"""An actor to try runtimes with: it counts, fails, waits and loses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from actors.actor import Actor, Message, Ref
from actors.parts import Parts
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
    """Replies that nobody took, and each `Give` of which nobody took all parts."""


@dataclass(frozen=True, slots=True)
class Pid(Message[int]):
    """In which process the actor lives."""


@dataclass(frozen=True, slots=True)
class Through(Message[object]):
    """Ask another actor."""

    ref: Ref
    message: Message[object]


@dataclass(frozen=True, slots=True)
class Give(Message[Parts[object]]):
    """Put `values`, one in each turn of the event loop, or all `at_once`; then comes `outcome`.

    It "ends", "stays" as it is, "fails" with a page error, or a part follows that cannot be
    pickled ("untold") or cannot be made again ("unread"), and one more after it.
    """

    values: Sequence[object]
    at_once: bool = False
    outcome: str = "ends"


ExampleMessage = Note | Notes | Echo | Fail | Wait | Hold | Open | Taken | Pid | Through | Give


class Untold(Exception):
    """Cannot be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("I stay")


def _unread() -> None:
    raise ValueError("not here")


class Unread:
    """Can be pickled, and cannot be made again."""

    def __reduce__(self) -> tuple[object, ...]:
        return _unread, ()


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
            case Give():
                parts = Parts[object](lambda: self._lost.append(message))
                self.context.begin(self._give(message, parts), "give")
                return parts
            case Through():
                return await message.ref.ask(message.message)
            case _:
                assert_never(message)

    async def _wait(self) -> str:
        await self._gate.wait()
        return "open"

    async def _give(self, message: Give, parts: Parts[object]) -> None:
        for value in message.values:
            parts.put(value)
            if not message.at_once:
                await asyncio.sleep(0)
        match message.outcome:
            case "ends":
                parts.end()
            case "fails":
                parts.fail(PageError("/some/file", 4096, "no luck"))
            case "untold" | "unread":
                parts.put(Untold() if message.outcome == "untold" else Unread())
                parts.put("one more")

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
