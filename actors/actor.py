"""What an actor is: state that only its own handler touches.

Knows messages, replies and refs. Knows no runtime: the same class runs as a task of one process or
as a process of a cluster. An actor is written like this::

    PagerMessage = Acquire | Release

    class Pager(Actor):
        async def receive(self, message: PagerMessage) -> object:
            match message:
                case Acquire(): return await self._acquire(message)
                case Release(): return self._release(message)
                case _: assert_never(message)

so that the type checker names a message that has no handler.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from actors.parts import Parts

R = TypeVar("R")
P = TypeVar("P")
ReplyT_co = TypeVar("ReplyT_co", covariant=True)


class Message(Generic[ReplyT_co]):
    """Base of every message; `Message[Reply]` says what `ask` gets back for it.

    A `Message[Parts[Part]]` is answered in parts: it is not asked but followed.
    """

    __slots__ = ()


class Ref(Protocol):
    """The address of an actor. Two refs of one actor are equal, and a message may carry one."""

    @property
    def name(self) -> str:
        """What the actor is called; unique in its runtime."""
        ...

    async def tell(self, message: Message[Any]) -> None:
        """Queue `message` and go on; waits only while the mailbox is full.

        Raises `Stopped` when the actor has. What its handler raises goes to the log.
        """
        ...

    async def ask(self, message: Message[R]) -> R:
        """Queue `message` and wait for its reply; raises what the handler raised, or `Stopped`."""
        ...

    def follow(self, message: Message[Parts[P]]) -> AsyncGenerator[P, None]:
        """Queue `message` and take its reply in parts: in order, each of them once.

        The message goes when the first part is asked for. Raises what the handler or the reply
        failed with, or `Stopped`, after the parts that came before. Whoever leaves early tells the
        actor by closing the iterator (`contextlib.aclosing` does it).
        """
        ...


class Recipe(Protocol):
    """How an actor is made in the process where it will live: plain values that travel there."""

    async def make(self) -> Actor:
        """A new actor, not started yet."""
        ...


class AnyRuntime(Protocol):
    """What carries actors: one process, or a cluster."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What about the place makes replies slower than they could be."""
        ...

    @property
    def here(self) -> str:
        """The name of this node; empty where there are no others."""
        ...

    async def start(
        self, recipe: Recipe, name: str, *, restarts: bool = False, node: str = ""
    ) -> Ref:
        """Start an actor under `name`; its ref once it is ready.

        restarts: when its process dies, its successor is made from the same recipe. node: where;
        this one by default. Raises `UsageError` for a node that there is not, and what
        `recipe.make` and the actor's `on_start` raise.
        """
        ...

    async def stop(self, name: str) -> None:
        """Stop one actor: what is queued or waits is answered with `Stopped`."""
        ...


class Context(Protocol):
    """What an actor may use of the runtime that it lives in."""

    @property
    def me(self) -> Ref:
        """The actor's own ref: to tell itself, or to be handed on. Asking it would deadlock."""
        ...

    def begin(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """Run `work` beside the handler until it ends, or is cancelled when the actor stops.

        What it raises goes to the log.
        """
        ...

    def later(self, work: Coroutine[Any, Any, R], name: str) -> asyncio.Future[R]:
        """Run `work` like `begin`; the future of its result, to be returned by `receive`."""
        ...


class Actor(ABC):
    """A handler with a life: `on_start`, `receive` for each message in turn, `on_stop`."""

    context: Context
    """Set by the runtime before `on_start`."""

    async def on_start(self) -> None:  # noqa: B027 - most actors have nothing to do here
        """Get ready; what it raises is raised by `spawn`, after `on_stop`."""

    async def on_stop(self) -> None:  # noqa: B027
        """Give everything back. Handlers and work that waited were cancelled before."""

    @abstractmethod
    async def receive(self, message: Any) -> object:
        """Handle `message`; the reply to whoever asked, or a future of it, or `Parts` of it.

        With a future or parts the handler is done and the next message gets its turn; the asker
        waits on. Parts that have no end when the actor stops fail with `Stopped`.
        What it raises is raised in the asker, and the actor lives on.
        """

    def on_lost(self, message: Any, reply: object) -> None:  # noqa: B027
        """Nobody took `reply`: who asked was cancelled. Take back what it handed out.

        Not called for `Parts`, which have a callback of their own for that.
        """
