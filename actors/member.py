"""A process among those of a cluster: what it serves, told to the manager, and to the next one.

Knows the manager by its messages, and how to find it or have it started. Knows no Ray. The manager
ends with the process that started it, or crashes; then one of the members starts the next one, and
all of them tell it what they serve.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

from actors.actor import Message, Ref
from actors.mailbox import Stopped
from actors.messages.manager import (
    Claim,
    DrainModel,
    Health,
    Join,
    Listed,
    ModelsRequest,
    Neighbour,
    NodeListed,
    NodesRequest,
    Publish,
    Withdraw,
    Working,
)
from actors.route import Site
from jitllm.config import ResolvedConfig
from jitllm.errors import JitllmError, UsageError
from jitllm.log import logger
from jitllm.schedule.placement import Placement

R = TypeVar("R")

RETRY_S = 0.2
"""Between two attempts to reach a manager: Ray takes a second to notice that one is dead."""

CHANGE_S = 5.0
"""How long a cluster may be without a manager while there are members."""

PATIENCE_S = 30.0
"""How long a manager may be out of reach before who asks is told so."""

_log = logger(__name__)


class Neighbourhood(Protocol):
    """Where members and their manager are: a cluster, or one process in tests."""

    @property
    def here(self) -> str:
        """The name of this node."""
        ...

    def find(self, name: str) -> str:
        """The id of a node; of this one if it has no name."""
        ...

    def reach(self, name: str) -> Ref:
        """The ref of an actor of a model: "MODEL:ACTOR"."""
        ...

    async def manager(self) -> Ref:
        """The one that is there, or else a new one. Raises `Stopped` while there can be none."""
        ...


@dataclass(frozen=True)
class Seat:
    """A name that is kept for a model, from before it is open until after it is closed."""

    name: str
    path: Path
    member: Member

    async def publish(
        self,
        scheduler: Ref,
        sites: Mapping[str, Site],
        placement: Placement,
        config: ResolvedConfig,
        fingerprint: Mapping[str, str | int],
    ) -> None:
        """Let others use the model. Refs are those of its own runtime."""

        around = self.member.neighbourhood

        def reach(ref: Ref) -> Ref:
            return around.reach(f"{self.name}:{ref.name}")

        devices = tuple(
            Neighbour(
                name,
                site.node or around.here,
                around.find(site.node),
                reach(site.device),
                reach(site.pager),
            )
            for name, site in sites.items()
        )
        working = Working(reach(scheduler), devices, config, tuple(fingerprint.items()))
        await self.member.publish(
            Listed(self.name, self.path, self.member.name, "ready", str(placement), working)
        )


async def lookup(manager: Ref, name: str | None) -> tuple[Listed, Working]:
    """A model that is open, by its name or because it is the only one.

    Raises `UsageError` when there is none like that, `JitllmError` while it is being loaded.
    """
    found = {model.name: model for model in await _models_of(manager)}
    names = ", ".join(found) or "none"
    if name is None and len(found) != 1:
        raise UsageError("which model of the cluster?", f"say model=...; there are: {names}")
    model = next(iter(found.values())) if name is None else found.get(name)
    if model is None:
        raise UsageError(f"the cluster has no model {name!r}", f"there are: {names}")
    if model.working is None:
        raise JitllmError(f"{model.name} is being loaded by {model.member}", "try again then")
    return model, model.working


async def _models_of(manager: Ref) -> tuple[Listed, ...]:
    """Those that it knows; none where there is no manager for longer than it takes to start one."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CHANGE_S):
            while True:
                try:
                    return (await manager.ask(ModelsRequest())).models
                except Stopped:
                    await asyncio.sleep(RETRY_S)
    return ()


class Member:
    """Use it in an `async with`: from its end on, nothing that it served is known."""

    def __init__(self, neighbourhood: Neighbourhood) -> None:
        self.neighbourhood = neighbourhood
        self.node_id = neighbourhood.find("")
        """Where we are."""
        self.name = f"{neighbourhood.here}:{os.getpid()}:{secrets.token_hex(2)}"
        """Of whom others see: its node, its process, and which one of that."""
        self.health = Health()
        """How the cluster is, as far as was heard."""
        self._models: dict[str, Listed] = {}
        self._manager: asyncio.Future[Ref] | None = None
        self._staying: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def claimed(self, name: str, path: Path, *, is_exact: bool) -> AsyncIterator[Seat]:
        """Keep a name for a model in the block; see `Claim`."""
        name = await self._ask(Claim(self.name, name, path, is_exact))
        self._models[name] = Listed(name, path, self.name)
        try:
            yield Seat(name, path, self)
        finally:
            del self._models[name]
            with suppress(JitllmError):  # the next manager does not hear of it
                if self.is_in_reach:
                    await self._ask(Withdraw(self.name, name))

    async def publish(self, model: Listed) -> None:
        """Let others use a model under a name that was claimed."""
        await self._ask(Publish(model))
        self._models[model.name] = model

    async def models(self) -> tuple[Listed, ...]:
        """Those of all members."""
        return (await self._ask(ModelsRequest())).models

    async def nodes(self) -> tuple[NodeListed, ...]:
        """Those of the cluster, with what they offer."""
        return (await self._ask(NodesRequest())).nodes

    async def drain(self, name: str, *, is_draining: bool = True) -> None:
        """Have a model refuse requests, or take them again; see `DrainModel`."""
        await self._ask(DrainModel(name, is_draining))

    async def __aenter__(self) -> Self:
        self._manager = asyncio.get_running_loop().create_future()
        self._staying = asyncio.create_task(self._stay(), name=f"member {self.name}")
        try:
            await self._reached()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._leave()

    # --- the way to the manager --------------------------------------------------------------

    async def _ask(self, message: Message[R]) -> R:
        """The answer of the manager, or of the next one: every message may come twice."""
        while True:
            manager = await self._reached()
            try:
                return await manager.ask(message)
            except Stopped as error:
                if error.name != manager.name:
                    raise
                self._forget(manager)

    async def _reached(self) -> Ref:
        """The manager, once it knows us. Raises `JitllmError` when it is long out of reach."""
        assert self._manager is not None, "a member is used within its `async with`"
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.shield(self._manager)
        except TimeoutError:
            raise JitllmError(
                f"the manager of the cluster has been out of reach for {PATIENCE_S:g} s",
                "see whether the cluster is there",
            ) from None

    @property
    def is_in_reach(self) -> bool:
        """Whether there is a manager that knows us at the moment."""
        manager = self._manager
        return manager is not None and manager.done() and manager.exception() is None

    def _forget(self, manager: Ref) -> None:
        """It has ended: whoever asks waits for the next one."""
        if self._manager is not None and self.is_in_reach and self._manager.result() is manager:
            self._manager = asyncio.get_running_loop().create_future()

    async def _stay(self) -> None:
        """Be a member of whichever manager there is."""
        while True:
            try:
                manager = await self.neighbourhood.manager()
                await self._follow(manager)
            except Stopped:
                pass
            except Exception as error:
                self._fail(error)
            await asyncio.sleep(RETRY_S)

    async def _follow(self, manager: Ref) -> None:
        join = Join(self.name, tuple(self._models.values()))
        try:
            async with aclosing(manager.follow(join)) as parts:
                async for health in parts:
                    self._hear(health)
                    if self._manager is not None and not self._manager.done():
                        self._manager.set_result(manager)
        finally:
            self._forget(manager)

    def _hear(self, health: Health) -> None:
        for node in set(health.lost) - set(self.health.lost):
            _log.warning("the node %s has left the cluster; models had devices there", node)
        self.health = health

    def _fail(self, error: Exception) -> None:
        """There can be no manager now: tell those who wait, and whoever comes waits again."""
        _log.warning("no manager can be had: %s", error)
        if self._manager is not None and not self._manager.done():
            self._manager.set_exception(error)
            self._manager.exception()  # perhaps nobody waits
        self._manager = asyncio.get_running_loop().create_future()

    async def _leave(self) -> None:
        if self._staying is not None:
            self._staying.cancel()
            await asyncio.wait([self._staying])
            self._staying = None
