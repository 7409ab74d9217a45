"""Blocks move while replies run, and devices refuse, hang or die at every message: no reply
changes.

Afterwards every device owns what it should, and another move works.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from typing import Any, get_args

import pytest

import actors.relocate
from actors.mailbox import Lost, Stopped
from actors.messages.device import (
    Abandon,
    Adopt,
    Bring,
    Close,
    DeviceMessage,
    Drop,
    Hand,
    Missing,
    Open,
    Own,
    Pack,
    Prepare,
    Step,
    Steps,
    Unpack,
)
from actors.messages.scheduler import SchedulerStatsRequest
from actors.relocate import PARCEL_BYTES
from jitllm.engine import Delta, Finish, Moved, Request
from jitllm.errors import JitllmError, PlacementError
from tests.actors.movable_device import (
    HEAD,
    KV_BYTES,
    SIZES,
    A,
    B,
    C,
    Fault,
    MovableDevice,
    Scene,
    moving,
    reply_to,
)
from tests.actors.test_scheduler import all_of, tokens

REQUESTS = tuple(Request(tuple(range(1, n + 1)), max_tokens=12 + n * n // 3) for n in (3, 9, 1))
"""Of lengths that differ much, so that one of them runs at any moment."""
ALL = range(HEAD)


async def one_reply(scene: Scene, request: Request) -> None:
    """It is what it should be."""
    deltas = await all_of(scene.client, request)
    assert deltas[-1].error is None, deltas[-1].error
    assert tokens(deltas) == reply_to(request)


@asynccontextmanager
async def replying(scene: Scene) -> AsyncIterator[None]:
    """Replies run within it all the time, and every one is what it should be."""
    is_over = False

    async def ask(first: int) -> None:
        for request in cycle((*REQUESTS[first:], *REQUESTS[:first])):
            await one_reply(scene, request)
            if is_over:
                return

    async with asyncio.TaskGroup() as tasks:
        for first in range(len(REQUESTS)):
            tasks.create_task(ask(first))
        await asyncio.sleep(0)
        yield
        is_over = True


async def tried(scene: Scene, blocks: Any, to: str, *, head: bool = False) -> Moved | None:
    """A move, perhaps refused."""
    try:
        return await scene.client.move(blocks, to, head=head)
    except JitllmError:
        return None


async def goes_on(scene: Scene) -> None:
    """Replies work, and so does a move of everything, and another one."""
    for device in scene.devices.values():
        device.faults = ()
    await asyncio.gather(*(one_reply(scene, request) for request in REQUESTS))
    for to in tuple(scene.route.sites)[:2]:
        if set(scene.route.placement.devices) != {to}:
            async with replying(scene):
                await scene.client.move(ALL, to, head=True)
        scene.check()


KINDS = (*(Open, Close, Step, Steps, Prepare, Missing, Bring, Pack, Unpack, Hand, Adopt, Drop),)


@pytest.mark.parametrize("how", ["dies", "dies after", "hangs"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [A, B, C])
async def test_whoever_dies_of_whatever_message(kind: Any, name: str, how: str) -> None:
    """A and C have the blocks and B gets them; then they go on to C, and then back to A."""
    met = 0
    for number in (1, 3):
        fault = Fault(kind, number, how)
        async with moving({name: [fault]}, "0020") as scene:
            async with replying(scene):
                for to in (B, C, A):
                    await tried(scene, ALL, to, head=True)
            await goes_on(scene)
            met += len(scene.devices[name].met)
    assert met, "the message was never sent"


@pytest.mark.parametrize("how", ["dies", "dies after", "hangs"])
@pytest.mark.parametrize(("kind", "name"), [(Abandon, A), (Abandon, B), (Abandon, C), (Own, B)])
async def test_whoever_dies_while_a_move_is_given_up(kind: Any, name: str, how: str) -> None:
    met = 0
    for cause in (Prepare, Unpack, Adopt):
        last = Fault(cause, 1, "refuses" if cause is Prepare else "hangs")
        faults = {B: [last], A: [], C: []}
        number = 2 if kind is Own else 1
        faults[name] = [*faults[name], Fault(kind, number, how)]
        async with moving(faults, "0020") as scene:
            async with replying(scene):
                assert await tried(scene, ALL, B, head=True) is None
            await goes_on(scene)
            met += len([fault for fault in scene.devices[name].met if fault.kind is kind])
    assert met


@pytest.mark.parametrize("how", ["dies", "dies after", "hangs"])
@pytest.mark.parametrize("name", [A, B, C])
async def test_whoever_dies_while_others_begin_again(name: str, how: str) -> None:
    faults = {B: [Fault(Step, 5, "dies")], A: [], C: []}
    faults[name] = [*faults[name], Fault(Own, 2, how)]
    async with moving(faults, "0120") as scene:
        async with replying(scene):
            await tried(scene, ALL, C, head=True)
        assert Own in {fault.kind for fault in scene.devices[name].met}
        await goes_on(scene)


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_happens(seed: int) -> None:
    """Devices anywhere, moves of anything, and two faults."""
    dice = random.Random(seed)
    faults: dict[str, list[Fault]] = {name: [] for name in SIZES}
    for _ in range(2):
        how = dice.choice(["dies", "dies after", "hangs"])
        kind = dice.choice([*KINDS, Abandon, Own])
        faults[dice.choice((A, B, C))].append(Fault(kind, dice.randint(2, 9), how))
    async with moving(faults, "".join(dice.choice("012") for _ in range(HEAD + 1))) as scene:
        async with replying(scene):
            for _ in range(6):
                blocks = [block for block in ALL if dice.random() < 0.6]
                await tried(scene, blocks, dice.choice((A, B, C)), head=dice.random() < 0.5)
        await goes_on(scene)


async def test_a_refusal_changes_nothing() -> None:
    async with moving({B: [Fault(Prepare, 1, "refuses"), Fault(Open, 1, "refuses")]}) as scene:
        async with replying(scene):
            for _ in range(2):
                with pytest.raises(PlacementError, match="no room for"):
                    await scene.client.move(ALL, B, head=True)
                assert set(scene.route.placement.devices) == {A}
        assert (await scene.scheduler.ask(SchedulerStatsRequest())).losses == 0
        scene.check()
        await goes_on(scene)


@pytest.mark.parametrize("kind", [Step, Open, Prepare, Unpack, Hand, Adopt, Drop])
@pytest.mark.parametrize("name", [A, B])
async def test_blocks_of_a_device_that_does_not_come_back_go_to_those_that_remain(
    name: str, kind: Any
) -> None:
    async with moving({name: [Fault(kind, 2 if kind is Step else 1, "ends")]}, "0120") as scene:
        async with replying(scene):
            for to in (B, A, B):
                await tried(scene, ALL, to, head=True)
        assert scene.devices[name].is_gone
        assert name not in scene.route.placement.devices
        assert name in scene.route.lost or name not in scene.route.placement.devices
        await goes_on(scene)


@pytest.mark.parametrize(
    ("with_memory", "heir"),
    [("", B), (B, C), (A, B), (A + B, C), (B + C, B), (A + C, B), (A + B + C, B)],
)
async def test_blocks_of_a_dead_device_go_to_one_that_pages(with_memory: str, heir: str) -> None:
    """Whose room has no end; where there is none, to the next one on the route."""
    names = [name for name in SIZES if name in with_memory]
    fault = Fault(Step, 3, "ends")
    async with moving({A: [fault]}, "1012", with_memory=names) as scene:
        async with replying(scene):
            pass
        assert scene.route.placement.blocks == (B, heir, B)
        assert scene.route.placement.head == C
        await goes_on(scene)


@pytest.mark.parametrize("kind", [Open, Prepare, Missing, Bring, Pack, Unpack, Hand, Adopt])
@pytest.mark.parametrize("how", ["dies", "dies after", "hangs", "ends"])
async def test_a_loss_in_a_move_is_a_refusal_with_the_reason(kind: Any, how: str) -> None:
    name = A if kind in (Pack, Hand) else B
    async with moving({name: [Fault(kind, 1, how)]}) as scene:
        async with replying(scene):
            with pytest.raises(PlacementError, match=f"{name} was lost.*; no block has moved"):
                await scene.client.move(ALL, B, head=True)
            if (name, how) != (A, "ends"):
                assert set(scene.route.placement.devices) == {A}
        assert scene.devices[name].met
        await goes_on(scene)


@pytest.mark.parametrize("name", [A, B, C])
async def test_a_death_that_nobody_noticed_ends_one_move_at_most(name: str) -> None:
    """No reply runs, and so no step finds out; the next move works, and so does the one after."""
    async with moving(placement="0020") as scene:
        await one_reply(scene, REQUESTS[0])
        scene.devices[name].begin_again()
        is_refused = await tried(scene, ALL, B, head=True) is None
        assert is_refused == (name != B)
        losses = (await scene.scheduler.ask(SchedulerStatsRequest())).losses
        assert losses == is_refused
        if is_refused:
            await scene.client.move(ALL, B, head=True)
        scene.check()
        await goes_on(scene)


async def test_without_any_device_requests_end_with_the_reason() -> None:
    faults = {name: [Fault(Step, 3, "ends")] for name in SIZES}
    async with moving(faults, "0120") as scene:
        for _ in range(2):
            for deltas in await asyncio.gather(*(all_of(scene.client, r) for r in REQUESTS)):
                assert isinstance(deltas[-1].error, Stopped)
                assert deltas[-1].finish is Finish.ERROR


async def test_requests_fail_with_the_reason_where_that_is_asked_for() -> None:
    async with moving({B: [Fault(Step, 3, "dies")]}, "0120", falls_back=False) as scene:
        deltas = await all_of(scene.client, REQUESTS[0])
        assert isinstance(deltas[-1].error, Lost)
        assert "cpu:1 was lost" in str(deltas[-1].error)
        await goes_on(scene)


async def test_what_ended_before_a_death_has_ended() -> None:
    """Several steps come from one message; the device dies of the one after the last."""
    request = Request((1, 2, 3), max_tokens=7)
    for number in range(2, 12):
        async with moving({A: [Fault(Step, number, "dies")]}) as scene:
            for _ in range(3):
                deltas = await all_of(scene.client, request)
                assert tokens(deltas) == reply_to(request)
                assert deltas[-1].finish is Finish.LENGTH


@pytest.mark.parametrize("placement", ["0000", "0020", "0200"])
async def test_nothing_that_is_copied_at_once_is_larger_than_a_parcel(placement: str) -> None:
    """However long histories are, and however many; so no reply waits long for a part of them."""
    long = Request(tuple(range(1, 120)), max_tokens=100)
    async with moving({}, placement) as scene:
        sizes: list[int] = []
        for device in scene.devices.values():
            watch_parcels(device, sizes)
        has_begun = asyncio.Event()
        replies = [asyncio.create_task(followed(scene, long, has_begun)) for _ in range(3)]
        await has_begun.wait()
        for to in (B, C, A):
            await scene.client.move(ALL, to, head=True)
        assert [tokens(await reply) for reply in replies] == [reply_to(long)] * 3
    assert len(sizes) > 20
    assert max(sizes) <= PARCEL_BYTES


def watch_parcels(device: MovableDevice, sizes: list[int]) -> None:
    """Bytes of each piece of history that a device is asked for."""
    receive = device.receive

    async def watched(message: Any) -> object:
        if isinstance(message, Pack):
            num_tokens = sum(len(piece.tokens) for piece in message.pieces)
            sizes.append(num_tokens * len(message.blocks) * KV_BYTES)
        return await receive(message)

    device.receive = watched  # type: ignore[method-assign]


async def followed(scene: Scene, request: Request, has_begun: asyncio.Event) -> list[Delta]:
    """All deltas of a reply; says when it has begun."""
    deltas = []
    async for delta in scene.client.generate(request):
        deltas.append(delta)
        has_begun.set()
    return deltas


# --- moves beside each other ---------------------------------------------------------------------


async def test_moves_that_overlap_take_turns_or_are_refused() -> None:
    async with moving() as scene:
        async with replying(scene):
            done = await asyncio.gather(
                scene.client.move([0, 1], B),
                scene.client.move([1, 2], C),
                scene.client.move([2], C),
                scene.client.move([], B, head=True),
                scene.client.move([2], "cpu:9"),
                return_exceptions=True,
            )
        assert [isinstance(one, Moved) for one in done] == [True, False, True, True, False]
        assert str(scene.route.placement) == "0-1=cpu:1,2=cpu:2,head=cpu:1"
        scene.check()
        await goes_on(scene)


@pytest.mark.parametrize("num_turns", [0, 1, 5, 20, 60, 150])
async def test_who_asks_for_a_move_may_go(num_turns: int) -> None:
    """It takes place, and nothing hangs."""
    async with moving() as scene:
        async with replying(scene):
            move = asyncio.create_task(scene.client.move(ALL, B, head=True))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            move.cancel()
            await asyncio.wait([move])
        await goes_on(scene)


@pytest.mark.parametrize("num_turns", [0, 1, 2, 5, 10, 20, 40, 80, 150, 300])
async def test_a_model_closes_in_the_middle_of_a_move(num_turns: int) -> None:
    async with moving() as scene:
        streams = [asyncio.create_task(all_of(scene.client, request)) for request in REQUESTS]
        move = asyncio.create_task(scene.client.move(ALL, B, head=True))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await scene.client.close()
        (moved,) = await asyncio.gather(move, return_exceptions=True)
        assert isinstance(moved, Moved | Stopped)
        for ended in await asyncio.gather(*streams, return_exceptions=True):
            is_whole = isinstance(ended, list) and ended[-1].finish is not None
            assert is_whole or isinstance(ended, Stopped)
        with pytest.raises(Stopped):
            await scene.client.move(ALL, C)


async def test_requests_come_and_go_while_blocks_move() -> None:
    async with moving() as scene:
        dice = random.Random(5)

        async def come_and_go() -> None:
            for _ in range(30):
                request = dice.choice(REQUESTS)
                stream = asyncio.create_task(all_of(scene.client, request))
                for _ in range(dice.randrange(40)):
                    await asyncio.sleep(0)
                if dice.random() < 0.5:
                    stream.cancel()
                    await asyncio.wait([stream])
                else:
                    assert tokens(await stream) == reply_to(request)

        guests = [asyncio.create_task(come_and_go()) for _ in range(3)]
        while not all(task.done() for task in guests):
            blocks = [block for block in ALL if dice.random() < 0.6]
            await tried(scene, blocks, dice.choice((A, B, C)), head=dice.random() < 0.5)
        await asyncio.gather(*guests)
        await goes_on(scene)


def test_devices_die_here_of_everything_that_a_mover_sends() -> None:
    tree = ast.parse(inspect.getsource(actors.relocate))
    calls = [call.func for call in ast.walk(tree) if isinstance(call, ast.Call)]
    called = {name.id for name in calls if isinstance(name, ast.Name)}
    sent = {kind.__name__ for kind in get_args(DeviceMessage)} & called
    assert sent == {kind.__name__ for kind in (*KINDS, Abandon)} - ALSO_SENT_BY_OTHERS


ALSO_SENT_BY_OTHERS = {"Open", "Close", "Step", "Steps"}
