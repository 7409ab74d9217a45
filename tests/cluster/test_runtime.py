"""Actors in processes of Ray's: what the embedded runtime promises holds there too."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest
import ray
from ray.util import list_named_actors

import actors.ray
from actors.carry import Carrier, Kind, pack
from actors.cluster import Cluster
from actors.far import RayGuest
from actors.local import Runtime
from actors.mailbox import Lost, Stopped
from actors.ray import RayRuntime
from jitllm.errors import JitllmError, PageError, UsageError
from tests.cluster.example import (
    Echo,
    Example,
    ExampleRecipe,
    Fail,
    Give,
    Note,
    Notes,
    Open,
    Pid,
    Taken,
    Through,
    Wait,
)


@pytest.fixture(params=["one node", "two nodes"])
def distance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How far this process is from the actors: next door, or so far that Ray carries messages."""
    distance: str = request.param
    if distance == "two nodes":
        monkeypatch.setattr(actors.ray, "_own_node", lambda: "elsewhere")
    return distance


async def test_an_actor_has_a_name_and_a_process(cluster: Cluster, runtime: RayRuntime) -> None:
    example = await runtime.start(ExampleRecipe(), "device cpu")
    pid = await example.ask(Pid())
    assert pid != os.getpid()
    assert pid == runtime.places["device cpu"].pid
    assert psutil.Process(pid).nice() == 0
    assert runtime.notes == ()
    assert cluster.address
    named = list_named_actors(all_namespaces=True)
    assert {"name": "jitllm:test:device:cpu", "namespace": "jitllm"} in named
    assert runtime.ref("device cpu") == example
    with pytest.raises(KeyError):
        runtime.ref("nobody")


async def test_messages_are_handled_in_order_under_load(runtime: RayRuntime, distance: str) -> None:
    example = await runtime.start(ExampleRecipe(), "example")

    async def send(sender: str) -> None:
        for number in range(200):
            await example.tell(Note(sender, number))
        asked = [example.ask(Note(sender, 200 + number)) for number in range(200)]
        await asyncio.gather(*asked)

    senders = ("a", "b", "c", "d")
    await asyncio.gather(*map(send, senders))
    for sender in senders:
        assert await example.ask(Notes(sender)) == tuple(range(400))


async def test_errors_travel_with_their_fields(runtime: RayRuntime, distance: str) -> None:
    example = await runtime.start(ExampleRecipe(), "example")
    with pytest.raises(PageError, match="no luck") as caught:
        await example.ask(Fail())
    assert caught.value.offset == 4096
    with pytest.raises(RuntimeError, match="Untold could not travel"):
        await example.ask(Fail(travels=False))
    await example.tell(Fail())
    assert await example.ask(Echo(1)) == 1


async def test_a_reply_that_nobody_waits_for_goes_back(runtime: RayRuntime, distance: str) -> None:
    example = await runtime.start(ExampleRecipe(), "example")
    asking = asyncio.create_task(example.ask(Wait()))
    await example.ask(Echo(0))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await example.ask(Open())
    lost: object = ()
    while not lost:
        lost = await example.ask(Taken())
    assert lost == ("open",)


async def test_parts_arrive_in_order_and_once(runtime: RayRuntime, distance: str) -> None:
    example = await runtime.start(ExampleRecipe(), "example")

    async def taken(message: Give) -> list[object]:
        return [part async for part in example.follow(message)]

    given = [Give(range(stop), at_once) for stop in (0, 1, 300) for at_once in (False, True)]
    assert await asyncio.gather(*map(taken, given)) == [list(give.values) for give in given]
    with pytest.raises(PageError, match="no luck"):
        await taken(Give((1,), outcome="fails"))
    with pytest.raises(TypeError, match="I stay"):
        await taken(Give((1,), outcome="untold"))
    assert len(await example.ask(Taken())) == 1


async def test_an_actor_hears_that_who_followed_has_left(
    runtime: RayRuntime, distance: str
) -> None:
    message = Give((0, 1), outcome="stays")
    example = await runtime.start(ExampleRecipe(), "example")
    closed, cancelled = example.follow(message), example.follow(message)
    for parts in (closed, cancelled):
        assert [await anext(parts), await anext(parts)] == [0, 1]
    await closed.aclose()
    waiting = asyncio.ensure_future(anext(cancelled))
    await example.ask(Echo(0))
    waiting.cancel()
    lost: tuple[object, ...] = ()
    while len(lost) < 2:
        lost = await example.ask(Taken())
    assert lost == (message, message)


async def test_who_follows_learns_of_a_death(runtime: RayRuntime, distance: str) -> None:
    example = await runtime.start(ExampleRecipe(), "example", restarts=True)
    parts = example.follow(Give((0, 1), outcome="stays"))
    assert [await anext(parts), await anext(parts)] == [0, 1]
    waiting = asyncio.ensure_future(anext(parts))
    os.kill(await example.ask(Pid()), signal.SIGKILL)
    with pytest.raises(Lost, match="example was lost"):
        await waiting
    again = example.follow(Give((2,)))
    assert [part async for part in again] == [2]


@pytest.mark.parametrize("leaves", ["before the first part", "between two parts"])
async def test_a_follower_that_is_gone_with_its_node_is_missed(
    leaves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.caller.PING_S", 0.01)
    monkeypatch.setattr("actors.caller.DEADLINE_S", 0.05)
    message = Give(() if leaves == "before the first part" else (0,), outcome="stays")
    async with Runtime() as there:
        ref = await there.spawn(Example(), "example")
        carrier = Carrier(there.ref)
        guest = RayGuest(ref, carrier)
        answer = await guest.take(0, pack(Kind.FOLLOW, 1, carrier.dump(message)))
        for _ in range(20):  # who comes back in time is waited for, however long it takes
            assert await ref.ask(Taken()) == ()
            answer = await guest.more(1)
        assert answer == pack(Kind.PONG)
        while await ref.ask(Taken()) == ():  # noqa: ASYNC110 - an actor tells nobody
            await asyncio.sleep(0.01)
        assert await ref.ask(Taken()) == (message,)
        assert await guest.more(1) == pack(Kind.NOTHING, 1)


async def test_actors_reach_each_other(runtime: RayRuntime) -> None:
    first = await runtime.start(ExampleRecipe(), "first")
    second = await runtime.start(ExampleRecipe(), "second")
    pid = await second.ask(Pid())
    assert await first.ask(Through(second, Pid())) == pid
    assert await first.ask(Echo((first, second))) == (first, second)
    with pytest.raises(PageError):
        await first.ask(Through(second, Fail()))


async def test_a_successor_answers_after_a_death(runtime: RayRuntime, distance: str) -> None:
    example = await runtime.start(ExampleRecipe(), "example", restarts=True)
    pid = await example.ask(Pid())
    asking = asyncio.create_task(example.ask(Wait()))
    await example.ask(Echo(0))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Lost, match="example was lost"):
        await asking
    assert await example.ask(Pid()) != pid
    assert await example.ask(Notes("a")) == ()


async def test_without_a_successor_a_death_is_the_end(runtime: RayRuntime) -> None:
    example = await runtime.start(ExampleRecipe(), "example")
    asking = asyncio.create_task(example.ask(Wait()))
    os.kill(await example.ask(Pid()), signal.SIGKILL)
    with pytest.raises(Lost):
        await asking
    with pytest.raises(Stopped, match="example has stopped; open the engine again"):
        await example.ask(Echo(0))
    with pytest.raises(Stopped):
        await example.tell(Echo(0))


async def test_an_actor_that_cannot_begin_says_why(runtime: RayRuntime) -> None:
    with pytest.raises(JitllmError, match="no such thing; try another"):
        await runtime.start(ExampleRecipe("no such thing"), "example")
    example = await runtime.start(ExampleRecipe(), "example")
    assert await example.ask(Echo(1)) == 1


async def test_a_name_is_free_as_soon_as_its_actor_has_stopped(runtime: RayRuntime) -> None:
    for _ in range(3):
        example = await runtime.start(ExampleRecipe(), "example")
        assert await example.ask(Echo(1)) == 1
        await runtime.stop("example")


async def test_a_name_is_served_once(cluster: Cluster, runtime: RayRuntime) -> None:
    await runtime.start(ExampleRecipe(), "example")
    async with RayRuntime(cluster, "test") as other:
        with pytest.raises(UsageError, match="jitllm:test:example already; stop the server"):
            await other.start(ExampleRecipe(), "example")
    async with RayRuntime(cluster, "other model") as other:
        await other.start(ExampleRecipe(), "example")


async def test_the_end_leaves_no_process(cluster: Cluster) -> None:
    async with RayRuntime(cluster, "brief") as runtime:
        first = await runtime.start(ExampleRecipe(), "first")
        second = await runtime.start(ExampleRecipe(), "second", restarts=True)
        processes = [psutil.Process(await ref.ask(Pid())) for ref in (first, second)]
        asking = asyncio.create_task(second.ask(Wait()))
        await second.ask(Echo(0))
    with pytest.raises(Stopped):
        await asking
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 20)
    assert not alive
    assert not [n for n in list_named_actors(all_namespaces=True) if "brief" in n["name"]]


def test_a_process_is_part_of_one_cluster(cluster: Cluster) -> None:
    with Cluster("local") as again:
        assert again.node == cluster.node
    assert ray.is_initialized()
    with pytest.raises(JitllmError, match="part of a cluster already"):
        Cluster("192.0.2.1:6379")
