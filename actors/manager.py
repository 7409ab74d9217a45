"""The manager of a cluster: which models run where, what nodes offer, and who is told of it.

Knows members, nodes and schedulers by their refs. What it knows is what others told, and is told
again to the next one when it ends: its end loses nothing. On the way of no token.

Within one process there is no need of one: a server asks its own list on the way of every request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import Protocol, assert_never

from actors.actor import Actor
from actors.directory import Directory
from actors.mailbox import Stopped
from actors.messages.manager import (
    Claim,
    DrainModel,
    Health,
    Join,
    Listed,
    Listing,
    ManagerMessage,
    ModelsRequest,
    ModelState,
    NodeListed,
    NodeListing,
    NodesRequest,
    Publish,
    Withdraw,
)
from actors.messages.scheduler import Drain, SchedulerStatsRequest
from actors.parts import Parts
from jitllm.engine import SchedulerStats
from jitllm.errors import JitllmError
from jitllm.log import logger
from jitllm.memory.host import HostReport

NAME = "manager"

WATCH_S = 2.0
"""How often it is looked which nodes are up."""

FRESH_S = 5.0
"""How old what a node said of its memory may be."""

HOST_S = 15.0
"""How long a node may take to say what it offers: a process starts there for it."""

STATS_S = 1.0
"""How long a scheduler may take to say how it is."""

_log = logger(__name__)


class Nodes(Protocol):
    """The nodes of a cluster, as its manager reaches them."""

    async def up(self) -> Mapping[str, str]:
        """Names of those that are up, by id."""
        ...

    async def host(self, node_id: str) -> HostReport:
        """What a node offers, by its own account."""
        ...


class Manager(Actor):
    """One for each cluster."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._directory = Directory()
        self._members: dict[str, Parts[Health]] = {}
        self._told = Health()
        self._reported_s: dict[str, float] = {}

    async def on_start(self) -> None:
        """Learn which nodes there are, and begin to watch them."""
        await self._look()
        self.context.begin(self._watch(), "nodes")

    async def receive(self, message: ManagerMessage) -> object:
        """See `Actor.receive`."""
        match message:
            case Join():
                return self._join(message)
            case Claim():
                return self._directory.claim(message)
            case Publish():
                self._directory.publish(message.model)
                return None
            case Withdraw():
                self._directory.withdraw(message.member, message.name)
                self._tell()
                return None
            case DrainModel():
                return self.context.later(self._drain(message), f"drain {message.name}")
            case ModelsRequest():
                return self.context.later(self._models(), "models")
            case NodesRequest():
                return self.context.later(self._hosts(), "nodes")
            case _:
                assert_never(message)

    # --- members -----------------------------------------------------------------------------

    def _join(self, join: Join) -> Parts[Health]:
        for name in self._directory.join(join.models):
            _log.error("two members serve a model %r; %s cannot be found", name, join.member)
        parts: Parts[Health] = Parts(lambda: self._leave(join.member, parts))
        parts.put(self._told)
        self._members[join.member] = parts
        return parts

    def _leave(self, member: str, parts: Parts[Health]) -> None:
        if self._members.get(member) is parts:  # or it has joined again already
            del self._members[member]
            self._directory.leave(member)
            self._tell()

    def _tell(self) -> None:
        """Tell every member how the cluster is, if that changed."""
        health = self._directory.health
        if health != self._told:
            self._told = health
            for parts in self._members.values():
                parts.put(health)

    # --- models ------------------------------------------------------------------------------

    async def _drain(self, message: DrainModel) -> None:
        working = self._directory.model(message.name).working
        if working is None:
            raise JitllmError(f"the model {message.name!r} is being loaded", "try again then")
        try:
            await working.scheduler.ask(Drain(message.is_draining))
        except Stopped as error:  # or it would seem to be the manager that has
            raise JitllmError(error.problem, "unload the model") from error

    async def _models(self) -> Listing:
        await asyncio.gather(*map(self._ask, self._directory.models))
        return Listing(self._directory.models)

    async def _ask(self, model: Listed) -> None:
        """How a model is by now; one that does not answer in time is as it was."""
        if model.working is None:
            return
        try:
            async with asyncio.timeout(STATS_S):
                stats: SchedulerStats = await model.working.scheduler.ask(SchedulerStatsRequest())
        except Stopped:
            self._directory.update(model.name, "lost")
        except TimeoutError:
            pass
        else:
            state: ModelState = "draining" if stats.is_draining else "ready"
            self._directory.update(model.name, state, str(stats.placement))

    # --- nodes -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self._look()
            except Exception as error:  # a cluster without its head: it comes back, or we end too
                _log.warning("which nodes are up is not known: %s", error)

    async def _look(self) -> None:
        self._directory.see(await self._nodes.up())
        self._tell()

    async def _hosts(self) -> NodeListing:
        await self._look()
        await asyncio.gather(*map(self._refresh, self._directory.nodes))
        return NodeListing(self._directory.nodes)

    async def _refresh(self, node: NodeListed) -> None:
        """Ask a node what it offers; one that does not answer in time offers what it did."""
        began_s = monotonic()
        if node.host and began_s - self._reported_s[node.node_id] < FRESH_S:
            return
        try:
            async with asyncio.timeout(HOST_S):
                host = await self._nodes.host(node.node_id)
        except Exception as error:
            _log.warning("%s does not say what it offers: %r", node.name, error)
        else:
            self._reported_s[node.node_id] = began_s
            self._directory.report(node.node_id, host)
