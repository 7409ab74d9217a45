"""The runtime on a cluster: Ray starts a process for each actor, names it and watches over it.

Imports Ray, as `actors.cluster` does. Inside its process an actor lives as in the embedded runtime;
messages reach it through a door when the sender is on its node, and through Ray's own calls when it
is not. Nothing is detached: actors end with the process that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import transport
from actors.actor import Message, Recipe, Ref
from actors.caller import DEADLINE_S, Caller, Listener, Wire
from actors.carry import Carrier, NamedRef
from actors.cluster import Cluster, nodes_up
from actors.far import RayGuest, RayWire
from actors.local import LocalRef, Runtime
from actors.mailbox import Stopped
from actors.manager import NAME as MANAGER
from actors.manager import Manager
from actors.parts import Parts
from actors.transport import Door
from jitllm.errors import JitllmError, UsageError
from jitllm.jit.threads import let_steps_in
from jitllm.log import logger
from jitllm.memory.host import HostReport, report_host

R = TypeVar("R")
P = TypeVar("P")

NAMESPACE = "jitllm"
MAX_RESTARTS = 32
"""Deaths after which an actor stays dead: it will hardly have been chance."""

FORGET_S = 5.0
"""How long a cluster may take to forget the name of an actor that has ended."""

_MAX_CALLS = 10_000
"""Calls through Ray that an actor holds at once: everyone who waits for an answer holds one."""

_GONE = (RayActorError, ActorUnschedulableError)
"""What Ray raises when an actor is dead, or the node is on which it would begin again."""

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Where:
    """Where an actor lives."""

    node: str
    pid: int
    address: str
    """Of its door, for its own node."""
    niceness: int


class NameTaken(UsageError):
    """The cluster has an actor of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the cluster has an actor {name} already",
            "stop the server that runs it, or serve the model under another name",
        )


class RayRuntime:
    """Actors of one model by name, each in a process of its own; use it in an `async with`.

    model: empty for what belongs to no model; there the actors of a model are called after it, as
    "MODEL:scheduler". The end stops them, the latest first. What is left of an actor whose process
    dies is nothing: with `restarts` a successor is made from its recipe, and messages find it by
    the same ref.
    """

    def __init__(self, cluster: Cluster, model: str) -> None:
        self._cluster = cluster
        self._prefix = f"jitllm:{model}:" if model else "jitllm:"
        self._neighbours = _Neighbours(self._prefix)
        self._handles: dict[str, Any] = {}
        self.places: dict[str, Where] = {}
        """Where each actor was when it started."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What about the cluster makes replies slower than they could be."""
        own = os.getpriority(os.PRIO_PROCESS, 0)  # what a server at nice 5 starts is not nicer
        slow = next((where for where in self.places.values() if where.niceness > own), None)
        if slow is None:
            return ()
        return (
            f"Ray runs its workers at nice {slow.niceness} here, so that any busy process slows "
            "replies down; start the cluster with RAY_worker_niceness=0",
        )

    @property
    def here(self) -> str:
        """See `AnyRuntime`."""
        return next(name for name, id in self._cluster.nodes().items() if id == self._cluster.node)

    async def start(
        self, recipe: Recipe, name: str, *, restarts: bool = False, node: str = ""
    ) -> Ref:
        """Have an actor made from `recipe` in a process of its own; its ref once it is ready.

        Raises what `recipe.make` or `on_start` raise, `UsageError` when the cluster has an actor of
        this name, `Stopped` when the process dies before it is ready.
        """
        birth = _Birth(name, self._prefix, self._neighbours.carrier.dump(recipe))
        there = NodeAffinitySchedulingStrategy(self._cluster.find(node), soft=False)
        options: dict[str, Any] = {
            "name": _full_name(self._prefix, name),
            "namespace": NAMESPACE,
            "num_cpus": 0,  # what we take is said by budgets and threads, not by Ray's counting
            "max_restarts": MAX_RESTARTS if restarts else 0,
            "max_concurrency": _MAX_CALLS,
            "scheduling_strategy": there,
        }
        try:
            handle = ray.remote(ActorProcess).options(**options).remote(birth)
        except ValueError as error:
            raise NameTaken(options["name"]) from error
        self._handles[name] = handle
        try:
            where = await _where(handle, name, self._neighbours.carrier)
        except BaseException:
            await self.stop(name)
            raise
        self.places[name] = where
        return self._neighbours.ref(name)

    def ref(self, name: str) -> Ref:
        """The ref of the actor that is called `name`; `KeyError` when there is none."""
        if name not in self._handles:
            raise KeyError(name)
        return self._neighbours.ref(name)

    def find(self, name: str) -> str:
        """See `actors.member.Neighbourhood`."""
        return self._cluster.find(name)

    def reach(self, name: str) -> Ref:
        """The ref of an actor that any process of the cluster started, or will start."""
        return self._neighbours.ref(name)

    async def manager(self) -> Ref:
        """See `actors.member.Neighbourhood`; of a runtime without a model."""
        if not self._cluster.is_there():  # Ray's own patience is a minute, and ends in an abort
            raise Stopped(MANAGER)
        if MANAGER in self._handles:  # it is asked for again because it has ended
            self._kill(MANAGER, self._handles.pop(MANAGER))
        try:
            return await self.start(ManagerRecipe(), MANAGER)
        except NameTaken:
            return self.reach(MANAGER)

    async def stop(self, name: str) -> None:
        """Stop one actor and end its process, also when the cluster is gone."""
        handle = self._handles.pop(name, None)
        if handle is None:
            return
        try:
            if self._cluster.is_there():
                async with asyncio.timeout(DEADLINE_S):
                    await handle.stop.remote()
        except (*_GONE, TimeoutError) as error:
            _log.warning("%s did not stop by itself: %s", name, type(error).__name__)
        finally:
            self._kill(name, handle)
            self._neighbours.forget(name)
        if self._cluster.is_there():
            await _until_free(_full_name(self._prefix, name), handle)

    def _kill(self, name: str, handle: Any) -> None:
        """End the process of an actor, at once."""
        where = self.places.pop(name, None)
        if self._cluster.is_there():
            ray.kill(handle)
        elif where is not None and where.node == self._cluster.node:
            self._cluster.kill(where.pid)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for name in reversed(tuple(self._handles)):
                await self.stop(name)
        finally:  # after a second Ctrl-C: all at once, in no order
            for name, handle in self._handles.items():
                self._kill(name, handle)
            self._neighbours.close()


# -------------------------------------------------------------------------------- the manager


class _Nodes:
    """Implements `actors.manager.Nodes`, in the manager's process."""

    async def up(self) -> Mapping[str, str]:
        """See `Nodes`."""
        return await asyncio.to_thread(nodes_up)

    async def host(self, node_id: str) -> HostReport:
        """See `Nodes`."""
        if node_id == _own_node():
            return await asyncio.to_thread(report_host)
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        ask = ray.remote(report_host).options(
            num_cpus=0, max_retries=0, scheduling_strategy=there, name="jitllm:report"
        )
        host: HostReport = await ask.remote()
        return host


@dataclass(frozen=True, slots=True)
class ManagerRecipe:
    """The manager of the cluster that it is made in."""

    async def make(self) -> Manager:
        """See `Recipe`."""
        return Manager(_Nodes())


# ---------------------------------------------------------------------------------- refs


class RayRef(NamedRef):
    """The address of an actor in another process."""

    __slots__ = ("_name", "_neighbours")

    def __init__(self, name: str, neighbours: _Neighbours) -> None:
        self._name = name
        self._neighbours = neighbours

    @property
    def name(self) -> str:
        """See `Ref`."""
        return self._name

    async def tell(self, message: Message[Any]) -> None:
        """See `Ref.tell`."""
        await self._neighbours.caller(self._name).tell(message)

    async def ask(self, message: Message[R]) -> R:
        """See `Ref.ask`; raises `Lost` when the process of the actor ends meanwhile."""
        return await self._neighbours.caller(self._name).ask(message)

    async def follow(self, message: Message[Parts[P]]) -> AsyncGenerator[P, None]:
        """See `Ref.follow`; raises `Lost` when the process of the actor ends meanwhile."""
        async with aclosing(self._neighbours.caller(self._name).follow(message)) as parts:
            async for part in parts:
                yield part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RayRef) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f"<actor {self._name}>"


class _Neighbours:
    """The actors of a model as one process reaches them; its own one needs no way there."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._callers: dict[str, Caller] = {}
        self.own: LocalRef | None = None
        self.carrier = Carrier(self.ref)

    def ref(self, name: str) -> Ref:
        """The ref of an actor, whether or not there is one."""
        if self.own is not None and self.own.name == name:
            return self.own
        return RayRef(name, self)

    def caller(self, name: str) -> Caller:
        """The way to an actor, or to its successor."""
        caller = self._callers.get(name)
        if caller is None or caller.is_lost:
            connect = partial(self._connect, name)
            caller = self._callers[name] = Caller(name, self.carrier, connect)
        return caller

    def forget(self, name: str) -> None:
        """End the way to an actor."""
        caller = self._callers.pop(name, None)
        if caller is not None:
            caller.close()

    def close(self) -> None:
        """End all ways."""
        for name in tuple(self._callers):
            self.forget(name)

    async def _connect(self, name: str, listener: Listener) -> Wire:
        try:
            handle = ray.get_actor(_full_name(self._prefix, name), namespace=NAMESPACE)
        except ValueError as error:
            raise Stopped(name) from error
        while True:
            where = await _where(handle, name, self.carrier)
            if where.node != _own_node():
                return RayWire(handle, listener)
            try:
                return await transport.connect(where.address, listener)
            except ConnectionError:  # it died since: Ray will notice
                await asyncio.sleep(0.1)


def _full_name(prefix: str, name: str) -> str:
    return f"{prefix}{name}".replace(" ", ":")


async def _until_free(full_name: str, handle: Any) -> None:
    """Wait until the cluster has forgotten an actor: a model may come back under its name."""
    with contextlib.suppress(ValueError, TimeoutError):
        async with asyncio.timeout(FORGET_S):
            while True:
                if ray.get_actor(full_name, namespace=NAMESPACE) != handle:  # it has a successor
                    return
                await asyncio.sleep(0.01)


def _own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


async def _where(handle: Any, name: str, carrier: Carrier) -> Where:
    """Where an actor lives, once it is ready. Raises why it is not, `Stopped` if it is dead."""
    try:
        where: Where | bytes = await handle.where.remote()
    except _GONE as error:
        raise Stopped(name) from error
    if isinstance(where, bytes):
        raise carrier.load(where)
    return where


# ---------------------------------------------------------------------------- the actor's process


@dataclass(frozen=True, slots=True)
class _Birth:
    """All that a process needs to know to become an actor."""

    name: str
    prefix: str
    recipe: bytes


class ActorProcess:
    """One of our actors, alone in a process of Ray's; made again by Ray when the process died."""

    def __init__(self, birth: _Birth) -> None:
        self._birth = birth
        self._neighbours = _Neighbours(birth.prefix)
        self._guests: dict[str, RayGuest] = {}
        self._ref: LocalRef | None = None
        self._life: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    def __repr__(self) -> str:  # what Ray's pages and logs call it
        return _full_name(self._birth.prefix, self._birth.name)

    @ray.method(max_task_retries=-1)  # it starts what is to be found, and says the same twice
    async def where(self) -> Where | bytes:
        """Where this actor is, once it is ready; an error, packed, when it cannot be."""
        if self._life is None:
            self._ready: asyncio.Future[Where] = asyncio.get_running_loop().create_future()
            self._life = asyncio.create_task(self._live(), name=self._birth.name)
        try:
            return await asyncio.shield(self._ready)
        except Exception as error:
            return self._neighbours.carrier.dump_error(error)

    async def deliver(self, sender: str, number: int, data: bytes) -> bytes:
        """Frame `number` of a sender on another node; the frame that answers it, if one does."""
        if self._ref is None:
            raise JitllmError(f"{self._birth.name} is not ready")
        guest = self._guests.get(sender)
        if guest is None:
            guest = self._guests[sender] = RayGuest(self._ref, self._neighbours.carrier)
        return await guest.take(number, data)

    async def more(self, sender: str, question: int) -> bytes:
        """Further frames that answer a question of a sender on another node; see `RayGuest`."""
        guest = self._guests.get(sender)
        if guest is None:
            raise JitllmError(f"{self._birth.name} knows no such question")
        return await guest.more(question)

    async def stop(self) -> None:
        """Stop the actor; its process has nothing left to do."""
        self._end.set()
        if self._life is not None:
            await asyncio.wait([self._life])

    async def _live(self) -> None:
        let_steps_in()
        neighbours = self._neighbours
        try:
            async with Runtime() as runtime:
                recipe: Recipe = neighbours.carrier.load(self._birth.recipe)
                actor = await recipe.make()
                self._ref = neighbours.own = await runtime.spawn(actor, self._birth.name)
                door = Door(self._ref, neighbours.carrier)
                await door.open()
                with contextlib.closing(door):
                    niceness = os.getpriority(os.PRIO_PROCESS, 0)
                    where = Where(_own_node(), os.getpid(), door.address, niceness)
                    gc.freeze()  # what the actor is made of stays as long as the process
                    self._ready.set_result(where)
                    await self._end.wait()
        except Exception as error:
            if self._ready.done():
                _log.exception("%s did not stop cleanly", self._birth.name)
            else:
                self._ready.set_exception(error)
        finally:
            neighbours.close()
