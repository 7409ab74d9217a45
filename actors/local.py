"""The embedded runtime: every actor is a task of one event loop.

Knows mailboxes, tasks and how an answer finds its asker. Knows no actor in particular. Blocking
work belongs into an executor of the actor that has it; here nothing may block.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakSet

from actors.actor import Actor, Message, Recipe
from actors.carry import Carrier, NamedRef
from actors.mailbox import Lost, Mailbox, MailboxStatistics, Stopped
from actors.parts import Parts
from jitllm.errors import UsageError
from jitllm.log import logger

R = TypeVar("R")
P = TypeVar("P")

MAX_QUEUED = 256
"""Messages that wait for an actor before its senders wait too."""

_log = logger(__name__)


class Runtime:
    """Actors by name; use it in an `async with`, whose end stops them, the latest first.

    The order is a promise: an actor may rely on those that were spawned before it until its own
    `on_stop` has returned. With `strict`, messages and replies are pickled on their way, as if
    between processes: a test then finds what could not travel.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._carrier = Carrier(self._known) if strict else None
        self._cells: dict[str, _Cell] = {}
        self._dead: dict[str, LocalRef] = {}
        self._recipes: dict[str, Recipe] = {}
        self._tasks = asyncio.TaskGroup()

    @property
    def notes(self) -> tuple[str, ...]:
        """What about the place makes replies slower than they could be: nothing is known."""
        return ()

    here = ""  # one process is in one place

    async def start(
        self, recipe: Recipe, name: str, *, restarts: bool = False, node: str = ""
    ) -> LocalRef:
        """Start an actor that is made here; see `spawn`. Only what is killed is restarted."""
        if node:
            raise UsageError(f"no node {node} here", "devices of other nodes need -ray")
        ref = await self.spawn(await recipe.make(), name)
        if restarts:
            self._recipes[name] = recipe
        return ref

    async def spawn(self, actor: Actor, name: str, *, max_queued: int = MAX_QUEUED) -> LocalRef:
        """Start `actor` under `name`; its ref once it is ready.

        Raises what its `on_start` raises, and `ValueError` for a name that is taken.
        """
        if name in self._cells:
            raise ValueError(f"an actor is called {name!r} already")
        cell = self._cells[name] = _Cell(self, name, max_queued)
        cell.task = self._tasks.create_task(cell.run(actor), name=name)
        try:
            await asyncio.shield(cell.ready)
        except BaseException:
            await self.stop(name)
            raise
        return cell.ref

    def ref(self, name: str) -> LocalRef:
        """The ref of the actor that is called `name`; `KeyError` when there is none."""
        return self._cells[name].ref

    def _known(self, name: str) -> LocalRef:
        """The same, or of one that died: a ref is carried whether or not it is of any use."""
        return self._cells[name].ref if name in self._cells else self._dead[name]

    async def kill(self, name: str) -> None:
        """Have an actor die as if it were a process, for tests; `KeyError` when there is none.

        What is queued or waits is answered with `Lost`. What it holds goes as if it was stopped.
        With `restarts` a successor is made from its recipe, and what comes from now on goes there.
        """
        cell = self._cells.pop(name)
        recipe = self._recipes.get(name)
        heir = None if recipe is None else cell.heir()
        if heir is None:
            self._dead[name] = cell.ref
        else:
            self._cells[name] = heir
        await cell.die()
        if heir is not None and recipe is not None and self._cells.get(name) is heir:
            heir.task = self._tasks.create_task(heir.run(recipe), name=name)

    async def stop(self, name: str) -> None:
        """Stop one actor: what is queued or waits is answered with `Stopped`."""
        cell = self._cells.get(name)
        if cell is None or cell.task is None:
            return
        cell.task.cancel()
        await asyncio.wait([cell.task])
        self._cells.pop(name, None)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for name in reversed(tuple(self._cells)):
                await self.stop(name)
        except BaseException as impatience:  # a second Ctrl-C: all at once, in no order
            await self._tasks.__aexit__(type(impatience), impatience, impatience.__traceback__)
            raise
        await self._tasks.__aexit__(None, None, None)

    def carry(self, value: R) -> R:
        """`value` as it arrives at the other end."""
        if self._carrier is None:
            return value
        copy: R = self._carrier.load(self._carrier.dump(value))
        return copy

    def create_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that this runtime waits for."""
        return self._tasks.create_task(work, name=name)


class LocalRef(NamedRef):
    """The address of an actor of this process."""

    __slots__ = ("_cell",)

    def __init__(self, cell: _Cell) -> None:
        self._cell = cell

    @property
    def name(self) -> str:
        """See `Ref`."""
        return self._cell.name

    async def tell(self, message: Message[Any]) -> None:
        """See `Ref.tell`."""
        await self._cell.mailbox.put(Letter(self._cell.runtime.carry(message), None))

    async def ask(self, message: Message[R]) -> R:
        """See `Ref.ask`."""
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        return await self._reply(Letter(self._cell.runtime.carry(message), reply), reply)

    async def follow(self, message: Message[Parts[P]]) -> AsyncGenerator[P, None]:
        """See `Ref.follow`."""
        cell = self._cell
        reply: asyncio.Future[Parts[P]] = asyncio.get_running_loop().create_future()
        letter = Letter(cell.runtime.carry(message), reply, is_followed=True)
        parts = await self._reply(letter, reply)
        try:
            async for part in parts:
                yield cell.runtime.carry(part)
        except Exception as error:
            raise cell.carry_error(error) from None
        finally:
            cell.lose(letter, parts)

    def offer(self, letter: Letter) -> bool:
        """Queue `letter` if there is room. Raises `Stopped` when the actor has."""
        return self._cell.mailbox.offer(letter)

    async def put(self, letter: Letter) -> None:
        """Queue `letter`, after waiting for room. Raises `Stopped` when the actor has."""
        await self._cell.mailbox.put(letter)

    def lose(self, letter: Letter, reply: object) -> None:
        """Nobody took the `reply` to `letter`, or nobody takes the rest of it."""
        self._cell.lose(letter, reply)

    def statistics(self) -> MailboxStatistics:
        """Of the actor's mailbox."""
        return self._cell.mailbox.statistics()

    def __repr__(self) -> str:
        return f"<actor {self.name}>"

    async def _reply(self, letter: Letter, reply: asyncio.Future[R]) -> R:
        """Queue `letter`; its reply."""
        cell = self._cell
        try:
            await cell.mailbox.put(letter)
            return await reply
        except asyncio.CancelledError:
            # An answer that is still to come sees that nobody waits. One that came in the same
            # moment would be seen by nobody.
            if not reply.cancel() and not reply.cancelled() and reply.exception() is None:
                cell.lose(letter, reply.result())
            raise


@dataclass(slots=True, eq=False)
class Letter:
    """A message on its way; `reply` is None when nobody waits for one.

    A reply that was cancelled is one that nobody waits for any more. is_followed: the reply has to
    be `Parts`, as the actor made them; otherwise it must not.
    """

    message: Any
    reply: asyncio.Future[Any] | None
    is_followed: bool = False


class _Cell:
    """One actor at home: its mailbox, its task, and the work beside it."""

    def __init__(self, runtime: Runtime, name: str, max_queued: int) -> None:
        self.runtime = runtime
        self.name = name
        self.mailbox: Mailbox[Letter] = Mailbox(name, max_queued)
        self.ref = LocalRef(self)
        self.task: asyncio.Task[None] | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._actor: Actor | None = None
        self._is_lost = False
        self._beside: set[asyncio.Task[None]] = set()
        self._owed: set[Letter] = set()
        self._followed: WeakSet[Parts[Any]] = WeakSet()

    @property
    def me(self) -> LocalRef:
        """See `Context`."""
        return self.ref

    def begin(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """See `Context.begin`."""
        self._begin(work, self._watch(work, name), name)

    def later(self, work: Coroutine[Any, Any, R], name: str) -> asyncio.Future[R]:
        """See `Context.later`."""
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        task = self._begin(work, _fulfil(work, reply), name)
        task.add_done_callback(lambda _: reply.cancel())
        return reply

    def heir(self) -> _Cell:
        """Where the successor will live: the ref leads there from now on."""
        heir = _Cell(self.runtime, self.name, self.mailbox.statistics().max_queued)
        heir.ref, self.ref._cell = self.ref, heir
        heir.ready.add_done_callback(_look)  # nobody waits for it
        return heir

    async def die(self) -> None:
        """End the actor; whoever waits for it gets `Lost`."""
        self._is_lost = True
        if self.task is None:  # it was still to be made
            await self._end()
        else:
            self.task.cancel()
            await asyncio.wait([self.task])

    async def run(self, source: Actor | Recipe) -> None:
        """The whole life of the actor; it ends by being cancelled."""
        try:
            actor = source if isinstance(source, Actor) else await source.make()
            actor.context, self._actor = self, actor
            await actor.on_start()
            self.ready.set_result(None)
            while True:
                await self._handle(actor, await self.mailbox.take())
        except Exception as error:
            if self.ready.done():
                _log.exception("%s failed outside of its handler", self.name)
            else:
                self.ready.set_exception(error)
        finally:
            await self._end()

    def lose(self, letter: Letter, reply: object) -> None:
        """Tell the actor that nobody took `reply`, or takes more parts of it."""
        try:
            if isinstance(reply, Parts):
                reply.leave()
            elif self._actor is not None:
                self._actor.on_lost(letter.message, reply)
        except Exception:
            _log.exception("%s could not take a reply back", self.name)

    async def _handle(self, actor: Actor, letter: Letter) -> None:
        """Have `letter` handled and answer it, whatever happens."""
        try:
            reply = await actor.receive(letter.message)
        except asyncio.CancelledError:
            self._refuse(letter, self._ended())
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
        except Exception as error:
            self._refuse(letter, error)
        else:
            if isinstance(reply, asyncio.Future):
                self._owed.add(letter)
                reply.add_done_callback(partial(self._pay, letter))
            else:
                self._answer(letter, reply)

    def _pay(self, letter: Letter, reply: asyncio.Future[Any]) -> None:
        """A reply that was promised is there."""
        self._owed.discard(letter)
        if reply.cancelled():
            self._refuse(letter, self._ended())
        elif (error := reply.exception()) is not None:
            self._refuse(letter, error)
        else:
            self._answer(letter, reply.result())

    def _answer(self, letter: Letter, reply: object) -> None:
        if letter.reply is None and not isinstance(reply, Parts):
            return
        if letter.reply is None or letter.reply.done():  # told, or cancelled while it was handled
            self.lose(letter, reply)
            return
        try:
            letter.reply.set_result(self._handed(letter, reply))
        except Exception as error:
            self._refuse(letter, error)

    def _handed(self, letter: Letter, reply: object) -> object:
        """`reply` as its asker gets it.

        Raises `TypeError` for parts that nobody follows and the reverse; strict: whatever is raised
        by a reply that cannot travel.
        """
        if isinstance(reply, Parts) is not letter.is_followed:
            self.lose(letter, reply)
            verb = "asked, not followed" if letter.is_followed else "followed, not asked"
            raise TypeError(f"{type(letter.message).__name__} is {verb}")
        if isinstance(reply, Parts):
            self._followed.add(reply)
            return reply
        return self.runtime.carry(reply)

    def _refuse(self, letter: Letter, error: BaseException) -> None:
        if letter.reply is None:
            if not isinstance(error, Stopped):
                _log.error(
                    "%s could not handle %s",
                    self.name,
                    type(letter.message).__name__,
                    exc_info=error,
                )
        elif not letter.reply.done():
            letter.reply.set_exception(self.carry_error(error))

    def carry_error(self, error: BaseException) -> BaseException:
        """`error` as it arrives at the other end."""
        try:
            return self.runtime.carry(error)
        except Exception as untold:  # strict: the asker learns at least that much
            return RuntimeError(f"{type(error).__name__} could not travel: {untold}")

    async def _watch(self, work: Coroutine[Any, Any, object], name: str) -> None:
        try:
            await work
        except Exception:
            _log.exception("%s: %s failed", self.name, name)

    def _begin(
        self, work: Coroutine[Any, Any, Any], watched: Coroutine[Any, Any, None], name: str
    ) -> asyncio.Task[None]:
        task = self.runtime.create_task(watched, f"{self.name}: {name}")
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        task.add_done_callback(lambda _: work.close())  # it never began if cancelled at once
        return task

    def _ended(self) -> Stopped:
        """What those get who wait for an actor that ends."""
        return Lost(self.name) if self._is_lost else Stopped(self.name)

    async def _end(self) -> None:
        for letter in self.mailbox.close(self._ended()):
            self._refuse(letter, self._ended())
        beside = tuple(self._beside)
        for task in beside:
            task.cancel()
        if beside:
            await asyncio.wait(beside)
        try:
            if self._actor is not None:
                await self._actor.on_stop()
        except Exception:
            _log.exception("%s did not stop cleanly", self.name)
        for letter in self._owed:
            self._refuse(letter, self._ended())
        for parts in [parts for parts in self._followed if not parts.is_over]:
            parts.fail(self._ended())
        if not self.ready.done():
            self.ready.set_exception(self._ended())
            self.ready.exception()  # whoever spawned it may be gone, and that is no news


def _look(ready: asyncio.Future[None]) -> None:
    if not ready.cancelled() and (error := ready.exception()) is not None:
        _log.error("no successor could be made: %s", error)


async def _fulfil(work: Coroutine[Any, Any, R], reply: asyncio.Future[R]) -> None:
    try:
        result = await work
    except Exception as error:
        if not reply.done():
            reply.set_exception(error)
    else:
        if not reply.done():
            reply.set_result(result)
