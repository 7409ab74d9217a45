"""The manager and its members in one process: who is found, and what the end of a manager means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest

from actors import manager as manager_module
from actors import member as member_module
from actors.actor import Actor, Ref
from actors.local import Runtime
from actors.mailbox import Stopped
from actors.manager import NAME, Manager
from actors.member import Member, lookup
from actors.messages.manager import (
    Health,
    Join,
    Listed,
    ModelsRequest,
    Neighbour,
    NodesRequest,
    Working,
)
from actors.messages.scheduler import Drain, SchedulerStatsRequest
from jitllm.config import EngineConfig, Probe, resolve
from jitllm.devices.choose import AvailableDevice
from jitllm.engine import SchedulerStats
from jitllm.errors import JitllmError, UsageError
from jitllm.memory.host import HostReport
from jitllm.schedule.placement import Placement

PATH = Path("/models/small.jlm")
CONFIG = resolve(EngineConfig(), Probe(num_cores=1, memory_bytes=1 << 30, tiers=("plain",)))
HOST = HostReport(2, (), (AvailableDevice("cpu", 0, num_cores=2, free_bytes=1 << 30),))


class FakeNodes:
    """Implements `Nodes`. silent: of whom nothing is heard."""

    def __init__(self) -> None:
        self.names = {"a": "here"}
        self.silent: set[str] = set()
        self.num_asked = 0

    async def up(self) -> Mapping[str, str]:
        return dict(self.names)

    async def host(self, node_id: str) -> HostReport:
        self.num_asked += 1
        if node_id in self.silent:
            raise JitllmError("nothing is heard")
        return HOST


class FakeScheduler(Actor):
    """Says how it is; never when it is "stuck", and as one that has ended when it is "dead"."""

    def __init__(self, state: str) -> None:
        self.is_draining = False
        self._state = state

    async def receive(self, message: Any) -> object:
        if self._state == "dead":
            raise Stopped("dead:scheduler")
        match message:
            case Drain():
                self.is_draining = message.is_draining
                return None
            case SchedulerStatsRequest():
                if self._state == "stuck":
                    return asyncio.get_running_loop().create_future()
                return SchedulerStats(
                    running=0,
                    waiting=0,
                    steps=0,
                    placement=Placement.all_on("cpu:0", 2),
                    is_draining=self.is_draining,
                )
        raise AssertionError(message)


class Neighbourhood:
    """One process that messages travel in as between processes."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.nodes = FakeNodes()
        self.here = "here"
        self.num_started = 0
        self.may_start = True

    def find(self, name: str) -> str:
        return {"": "a", "here": "a", "there": "b"}[name]

    def reach(self, name: str) -> Ref:
        return self.runtime.ref(name)

    async def manager(self) -> Ref:
        if not self.may_start:
            raise Stopped(NAME)
        try:
            return self.runtime.ref(NAME)
        except KeyError:
            self.num_started += 1
            return await self.runtime.spawn(Manager(self.nodes), NAME)

    async def member(self, stack: AsyncExitStack) -> Member:
        return await stack.enter_async_context(Member(self))

    async def scheduler(self, name: str, state: str = "well") -> Ref:
        return await self.runtime.spawn(FakeScheduler(state), f"{name}:scheduler")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "RETRY_S", 0.001)
    monkeypatch.setattr(manager_module, "WATCH_S", 0.001)


@pytest.fixture
async def around() -> AsyncIterator[Neighbourhood]:
    async with Runtime(strict=True) as runtime:
        yield Neighbourhood(runtime)


async def serve(member: Member, stack: AsyncExitStack, name: str, scheduler: Ref) -> str:
    """Have a member serve a model with a device on each of two nodes."""
    seat = await stack.enter_async_context(member.claimed(name, PATH, is_exact=False))
    devices = tuple(
        Neighbour(f"{name}/cpu:0", name, node_id, scheduler, scheduler)
        for name, node_id in (("here", "a"), ("there", "b"))
    )
    working = Working(scheduler, devices, CONFIG, (("source", "x"),))
    await member.publish(Listed(seat.name, PATH, member.name, "ready", "", working))
    return seat.name


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - the test's own limit ends it
        await asyncio.sleep(0.001)


async def states(member: Member) -> dict[str, str]:
    return {model.name: model.state for model in await member.models()}


async def test_members_find_each_others_models(around: Neighbourhood) -> None:
    async with AsyncExitStack() as stack:
        one, other = [await around.member(stack) for _ in range(2)]
        assert around.num_started == 1
        assert one.name != other.name
        async with AsyncExitStack() as serving:
            for member, name in ((one, "small"), (other, "small-2")):
                scheduler = await around.scheduler(name)
                assert await serve(member, serving, "small", scheduler) == name
            [first, second] = await other.models()
            assert (first.member, second.member) == (one.name, other.name)
            assert first.placement == str(Placement.all_on("cpu:0", 2))
            model, working = await lookup(around.reach(NAME), "small")
            assert (model.path, working.config) == (PATH, CONFIG)
            assert working.scheduler == around.reach("small:scheduler")
            with pytest.raises(UsageError, match="say model=...; there are: small, small-2"):
                await lookup(around.reach(NAME), None)
        assert await one.models() == ()


async def test_a_model_that_loads_has_its_name_and_nothing_else(around: Neighbourhood) -> None:
    async with AsyncExitStack() as stack:
        member = await around.member(stack)
        async with member.claimed("small", PATH, is_exact=True):
            assert await states(member) == {"small": "loading"}
            with pytest.raises(UsageError, match="has a model 'small' already"):
                async with member.claimed("small", PATH, is_exact=True):
                    pass
            for asking in (lookup(around.reach(NAME), None), member.drain("small")):
                with pytest.raises(JitllmError, match="is being loaded"):
                    await asking
        with pytest.raises(UsageError, match="no model 'small'"):
            await member.drain("small")


@pytest.mark.parametrize("end", ["stops", "dies"])
async def test_what_runs_is_told_to_the_next_manager(around: Neighbourhood, end: str) -> None:
    async with AsyncExitStack() as stack:
        members = [await around.member(stack) for _ in range(3)]
        for member, name in zip(members, ("a", "b", "c"), strict=True):
            await serve(member, stack, name, await around.scheduler(name))
        await (around.runtime.stop if end == "stops" else around.runtime.kill)(NAME)
        seen: list[dict[str, str]] = []
        while not seen or len(seen[-1]) < 3:
            seen.append(await states(members[1]))  # who asks waits for the next one
        assert seen[-1] == dict.fromkeys("abc", "ready")
        assert around.num_started == 2
        assert await states(members[0]) == seen[-1]


async def test_a_member_that_ends_is_forgotten_with_all_that_it_served(
    around: Neighbourhood,
) -> None:
    async with AsyncExitStack() as stack:
        stays = await around.member(stack)
        async with AsyncExitStack() as short:
            leaves = await around.member(short)
            await leaves._ask(  # as one does that dies: nothing is withdrawn
                member_module.Claim(leaves.name, "small", PATH, is_exact=True)
            )
            assert await states(stays) == {"small": "loading"}
        assert await states(stays) == {}


async def test_without_a_manager_who_asks_is_told_in_the_end(
    around: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(member_module, "CHANGE_S", 0.05)
    around.may_start = False
    with pytest.raises(JitllmError, match="out of reach for 0.05 s"):
        async with Member(around):
            pass
    around.may_start = True
    async with AsyncExitStack() as stack:
        member = await around.member(stack)
        manager = around.reach(NAME)
        around.may_start = False
        await around.runtime.stop(NAME)
        await until(lambda: not member.is_in_reach)
        with pytest.raises(JitllmError, match="out of reach"):
            await member.models()
        with pytest.raises(UsageError, match="no model 'small'; there are: none"):
            await lookup(manager, "small")
        around.may_start = True
        assert await member.models() == ()
        assert member.is_in_reach


async def test_who_cannot_start_a_manager_says_why(around: Neighbourhood) -> None:
    class Broken(FakeNodes):
        async def up(self) -> Mapping[str, str]:
            raise JitllmError("no nodes to be seen")

    around.nodes = Broken()
    with pytest.raises(JitllmError, match="no nodes to be seen"):
        async with Member(around):
            pass


async def test_a_model_drains_for_everybody(around: Neighbourhood) -> None:
    async with AsyncExitStack() as stack:
        one, other = [await around.member(stack) for _ in range(2)]
        await serve(one, stack, "small", await around.scheduler("small"))
        await other.drain("small")
        assert await states(one) == {"small": "draining"}
        await other.drain("small", is_draining=False)
        assert await states(one) == {"small": "ready"}


async def test_a_scheduler_that_is_dead_or_stuck_holds_nobody_up(
    around: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "STATS_S", 0.01)
    async with AsyncExitStack() as stack:
        member = await around.member(stack)
        for name in ("dead", "stuck", "well"):
            await serve(member, stack, name, await around.scheduler(name, name))
        assert await states(member) == {"dead": "lost", "stuck": "ready", "well": "ready"}
        with pytest.raises(JitllmError, match="dead:scheduler has stopped"):
            await member.drain("dead")
        assert member.is_in_reach


async def test_nodes_say_what_they_offer_when_somebody_asks_and_it_is_old(
    around: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    around.nodes.names["b"] = "there"
    around.nodes.silent.add("b")
    async with AsyncExitStack() as stack:
        member = await around.member(stack)
        assert around.nodes.num_asked == 0
        hosts = {node.name: node.host for node in await member.nodes()}
        assert hosts == {"here": HOST, "there": None}
        around.nodes.silent.clear()
        assert [node.host for node in await member.nodes()] == [HOST, HOST]
        assert around.nodes.num_asked == 3
        monkeypatch.setattr(manager_module, "FRESH_S", 0.0)
        around.nodes.silent.add("b")  # it offers what it did
        assert [node.host for node in await member.nodes()] == [HOST, HOST]
        assert around.nodes.num_asked == 5


async def test_a_node_that_goes_is_told_to_all_members(around: Neighbourhood) -> None:
    around.nodes.names["b"] = "there"
    async with AsyncExitStack() as stack:
        one, other = [await around.member(stack) for _ in range(2)]
        async with AsyncExitStack() as serving:
            await serve(one, serving, "small", await around.scheduler("small"))
            del around.nodes.names["b"]
            await until(lambda: one.health == other.health == Health(("there",)))
            late = await around.member(stack)
            assert late.health == Health(("there",))
        await until(lambda: one.health == other.health == late.health == Health())


async def test_who_joins_again_before_it_was_missed_is_not_forgotten(
    around: Neighbourhood,
) -> None:
    manager = await around.manager()
    model = Listed("small", PATH, "one")
    async with aclosing(manager.follow(Join("one", (model,)))) as again:
        async with aclosing(manager.follow(Join("one", (model,)))) as first:
            assert await anext(first) == await anext(again) == Health()
        # The manager hears of an end after what came on the new way.
        assert (await manager.ask(ModelsRequest())).models == (model,)
    assert [node.name for node in (await manager.ask(NodesRequest())).nodes] == ["here"]
