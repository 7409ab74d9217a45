"""Parked sequences on devices that compute nothing, and that die: nobody is forgotten."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from actors.client import Client
from actors.local import LocalRef
from actors.mailbox import Lost, Stopped
from actors.messages.device import (
    Close,
    Open,
    Pack,
    Parcel,
    Piece,
    Restore,
    Step,
    Unpacked,
)
from actors.messages.pager import Reserve
from actors.messages.scheduler import SchedulerStatsRequest
from actors.park import Parker
from jitllm.engine import Delta, Finish, ParkedIn, Priority, Request, SequenceState
from jitllm.errors import Draining, JitllmError, UnknownSession
from jitllm.schedule.plan import Budget
from tests.actors.test_losses import MortalDevice, at, ever
from tests.actors.test_scheduler import all_of, scheduling, tokens, until

KV_BYTES = (3, 2)
SMALL = Budget(rows=8, tokens=16, outputs=8)


@dataclass
class ParkingDevice(MortalDevice):
    """Keys and values of a position are made of its block and its token.

    num_computed: positions that steps computed.
    """

    num_computed: int = 0
    reserved: list[int] = field(default_factory=list)

    async def receive(self, message: Any) -> object:
        """See `actors.messages`."""
        if isinstance(message, Reserve):
            self.reserved.append(message.num_bytes)
            return None
        if isinstance(message, Pack | Restore):
            return self._carry(message)
        if isinstance(message, Step):
            if any(span.sequence not in self.promised for span in message.spans):
                raise Lost("device")  # it died of something that nobody waited for
            self.num_computed += sum(len(span.tokens) for span in message.spans)
        return await super().receive(message)

    def _carry(self, message: Pack | Restore) -> Parcel | Unpacked:
        if self.dies(message):
            self.num_deaths += 1
            self.promised.clear()
            self.computed.clear()
            raise Lost("device")
        if isinstance(message, Pack):
            pieces = tuple(p for p in message.pieces if p.sequence in self.promised)
            data = b"".join(content(message.blocks, piece) for piece in pieces)
            assert all(piece.stop <= self.computed[piece.sequence] for piece in pieces)
            return Parcel(message.blocks, pieces, data, 0.0, message.epoch, message.number)
        [piece] = message.parcel.pieces
        if piece.sequence not in self.promised:
            raise Lost("device")
        assert message.parcel.data == content(message.parcel.blocks, piece)
        assert piece.start == self.computed[piece.sequence]
        self.computed[piece.sequence] = piece.stop
        return Unpacked(1, 0.0)


def content(blocks: tuple[int, ...], piece: Piece) -> bytes:
    """What blocks have of some positions."""
    return b"".join(
        bytes((block + 7 * token) % 251 for token in piece.tokens) * KV_BYTES[block]
        for block in blocks
    )


@asynccontextmanager
async def parking(
    device: ParkingDevice, folder: Path, **choices: Any
) -> AsyncIterator[tuple[Client, LocalRef]]:
    """A client and a scheduler that can park."""
    choices = {"kv_bytes": KV_BYTES, "park_folder": folder, **choices}
    async with scheduling(device, **choices) as (client, ref):
        yield client, ref


def whole(request: Request) -> list[int]:
    """The tokens of a reply."""
    start = len(request.prompt)
    return [token % 1000 for token in range(start, start + (request.max_tokens or 0))]


async def until_tokens(client: Client, name: str, count: int) -> None:
    while True:
        states = [state for state in await client.sessions() if state.name == name]
        if states and min(state.generated_tokens for state in states) >= count:
            return
        await asyncio.sleep(0)


LONG = Request((1,) * 20, max_tokens=60, name="long")


@pytest.mark.parametrize("to", ["disk", "memory"])
async def test_a_request_goes_on_where_it_was(tmp_path: Path, to: ParkedIn) -> None:
    device = ParkingDevice()
    async with parking(device, tmp_path) as (client, ref):
        task = asyncio.create_task(all_of(client, LONG))
        await until_tokens(client, "long", 5)
        [parked] = await client.park("long", to)
        assert parked.state is SequenceState.PARKED
        assert parked.parked_bytes == parked.kv_bytes == 5 * (19 + parked.generated_tokens)
        assert device.promised == {}
        assert await client.park("long") == (parked,)  # it stays as it is
        await until(device, ref, running=0, waiting=0, parked=1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (await client.sessions()) == (parked,)
        [resumed] = await client.resume("long")
        assert resumed.state is SequenceState.WAITING
        assert tokens(await task) == whole(LONG)
        assert await client.sessions() == ()
    assert device.num_computed == 20 + 59
    if to == "memory":
        assert [n for n in device.reserved if n] == [parked.parked_bytes]
        assert device.reserved[-1] == 0


async def test_all_sequences_of_a_name_are_one_request(tmp_path: Path) -> None:
    device = ParkingDevice()
    requests = [replace(LONG, prompt=(n,) * 5) for n in (1, 2, 3)]
    async with parking(device, tmp_path) as (client, ref):
        tasks = [asyncio.create_task(all_of(client, request)) for request in requests[:2]]
        other = asyncio.create_task(all_of(client, replace(LONG, name="other")))
        await until_tokens(client, "long", 2)
        assert len(await client.park("long")) == 2
        late = asyncio.create_task(all_of(client, requests[2]))  # under the same name: it waits too
        await until(device, ref, parked=3)
        assert tokens(await other) == whole(LONG)
        assert len(await client.resume("long")) == 3
        for task, request in zip((*tasks, late), requests, strict=True):
            assert tokens(await task) == whole(request)


async def test_what_is_not_there_cannot_be_parked(tmp_path: Path) -> None:
    device = ParkingDevice()
    async with parking(device, tmp_path) as (client, ref):
        task = asyncio.create_task(all_of(client, replace(LONG, name="")))
        await until(device, ref, running=1)
        for name in ("", "long"):  # no name is not a name
            with pytest.raises(UnknownSession):
                await client.park(name)
            with pytest.raises(UnknownSession):
                await client.resume(name)
        await task


async def test_a_client_that_goes_and_an_engine_that_stops_leave_nothing(tmp_path: Path) -> None:
    device = ParkingDevice()
    async with parking(device, tmp_path) as (client, ref):
        async with aclosing(client.generate(LONG)) as stream:
            await anext(stream)
            await client.park("long")
        await until(device, ref, parked=0)
        assert (await ref.ask(SchedulerStatsRequest())).parked_disk_bytes == 0
        task = asyncio.create_task(all_of(client, LONG))
        await until_tokens(client, "long", 1)
        await client.park("long")
        await client.close()
        assert (await task)[-1].finish is Finish.CANCELLED
    assert device.promised == {}


# --- devices that die ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Pack, Close, Open, Restore])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("late", [False, True])
async def test_no_reply_changes_when_a_device_dies_of_it(
    tmp_path: Path, kind: Any, number: int, late: bool
) -> None:
    device = ParkingDevice(dies=at(kind, number), late=late)
    requests = [replace(LONG, prompt=(n,) * (5 + n), name=f"r{n}") for n in range(4)]
    async with parking(device, tmp_path) as (client, ref):
        tasks = [asyncio.create_task(all_of(client, request)) for request in requests]
        for name in ("r0", "r1", "r2"):
            await until_tokens(client, name, 3)
            [parked] = await client.park(name)
            assert parked.state is SequenceState.PARKED
        for name in ("r0", "r1", "r2"):
            await client.resume(name)
        for task, request in zip(tasks, requests, strict=True):
            assert tokens(await task) == whole(request)
        stats = await ref.ask(SchedulerStatsRequest())
    assert device.num_deaths == 1
    assert device.promised == {}
    assert stats.parked == stats.parked_disk_bytes == 0


@pytest.mark.parametrize("seed", range(10))
async def test_no_reply_changes_whenever_it_dies(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    device = ParkingDevice(dies=ever(dice, 120), late=dice.random() < 0.5)
    requests = [replace(LONG, prompt=(n,) * (5 + n), name=f"r{n}") for n in range(4)]
    async with parking(device, tmp_path) as (client, ref):
        tasks = [asyncio.create_task(all_of(client, request)) for request in requests]
        while not all(task.done() for task in tasks):
            name = f"r{dice.randrange(4)}"
            with suppress(UnknownSession, Stopped):
                await (client.park(name) if dice.random() < 0.5 else client.resume(name))
            if not (await ref.ask(SchedulerStatsRequest())).running:
                for state in await client.sessions():
                    await client.resume(state.name)
            await asyncio.sleep(0)
        for task, request in zip(tasks, requests, strict=True):
            assert [(await task)[-1].error, *tokens(await task)] == [None, *whole(request)]
        stats = await ref.ask(SchedulerStatsRequest())
    assert device.promised == {}
    assert stats.parked_disk_bytes == 0


async def test_who_is_parked_when_a_device_dies_of_it_begins_again_later(tmp_path: Path) -> None:
    device = ParkingDevice(dies=at(Pack, 1))
    async with parking(device, tmp_path) as (client, ref):
        task = asyncio.create_task(all_of(client, LONG))
        other = asyncio.create_task(all_of(client, replace(LONG, name="other")))
        await until_tokens(client, "long", 10)
        [parked] = await client.park("long")
        assert (parked.state, parked.parked_in) == (SequenceState.PARKED, "")
        assert tokens(await other) == whole(LONG)
        assert [state.state for state in await client.sessions()] == [SequenceState.PARKED]
        await client.resume("long")
        assert tokens(await task) == whole(LONG)
        totals = (await ref.ask(SchedulerStatsRequest())).park_totals
    assert (totals.parks, totals.failures) == (0, 1)


async def test_who_does_not_survive_a_death_is_not_parked(tmp_path: Path) -> None:
    device = ParkingDevice(dies=at(Pack, 1))
    async with parking(device, tmp_path, falls_back=False) as (client, _):
        task = asyncio.create_task(all_of(client, LONG))
        await until_tokens(client, "long", 10)
        with pytest.raises(Lost):
            await client.park("long")
        assert isinstance((await task)[-1].error, Lost)
        assert await client.sessions() == ()


@pytest.mark.parametrize("num_turns", range(0, 24, 2))
async def test_what_is_parked_while_draining_begins_goes_on(tmp_path: Path, num_turns: int) -> None:
    """Or draining would never end."""
    async with parking(ParkingDevice(), tmp_path) as (client, ref):
        task = asyncio.create_task(all_of(client, LONG))
        await until_tokens(client, "long", 5)
        park = asyncio.create_task(client.park("long"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await client.drain()
        with suppress(Draining):
            await park
        assert tokens(await task) == whole(LONG)


@pytest.mark.parametrize("falls_back", [True, False])
async def test_a_death_while_it_is_parked_costs_nothing(tmp_path: Path, falls_back: bool) -> None:
    device = ParkingDevice()
    async with parking(device, tmp_path, falls_back=falls_back) as (client, _):
        task = asyncio.create_task(all_of(client, LONG))
        await until_tokens(client, "long", 30)
        await client.park("long")
        device.dies = at(Step, 3)
        other = await all_of(client, replace(LONG, name="other"))
        assert (other[-1].error is None) is falls_back
        device.num_computed = 0
        [resumed] = await client.resume("long")
        assert tokens(await task) == whole(LONG)
    assert device.num_deaths == 1
    assert device.num_computed == 60 - resumed.generated_tokens


async def test_when_nothing_can_be_computed_any_more_parked_requests_are_told(
    tmp_path: Path,
) -> None:
    device = ParkingDevice()
    async with parking(device, tmp_path) as (client, _):
        task = asyncio.create_task(all_of(client, LONG))
        await until_tokens(client, "long", 3)
        await client.park("long")
        device.dies = lambda _: True
        other = await all_of(client, replace(LONG, name="other"))
        assert isinstance(other[-1].error, JitllmError)
        assert isinstance((await task)[-1].error, JitllmError)


# --- time slices ---------------------------------------------------------------------------------


async def timeline(client: Client, requests: list[Request]) -> list[tuple[str, Delta]]:
    """All deltas of all requests, in the order in which they came."""
    seen: list[tuple[str, Delta]] = []

    async def follow(request: Request) -> None:
        async for delta in client.generate(request):
            seen.append((request.name, delta))

    await asyncio.gather(*(follow(request) for request in requests))
    return seen


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parking takes no time to speak of, as beside the steps of a device that computes."""
    monkeypatch.setattr(Parker, "swap_s", 0.0)


def firsts(seen: list[tuple[str, Delta]]) -> list[str]:
    """Who had a token before anybody was done."""
    names: dict[str, None] = {}
    for name, delta in seen:
        if delta.finish is not None:
            return list(names)
        names |= {name: None}
    raise AssertionError("nobody was ever done")


EIGHT = [Request((n + 1,) * 8, max_tokens=64, name=f"r{n}") for n in range(8)]
ROOM = 2 * 72


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("level", [0, 100])
async def test_everybody_gets_a_turn_before_anybody_is_done(tmp_path: Path, level: int) -> None:
    device = ParkingDevice(room=ROOM)
    choices = {"budget": SMALL, "fairness": level}
    async with parking(device, tmp_path, **choices) as (client, ref):
        seen = await timeline(client, EIGHT)
        totals = (await ref.ask(SchedulerStatsRequest())).park_totals
    for request in EIGHT:
        assert tokens([d for name, d in seen if name == request.name]) == whole(request)
    assert device.promised == {}
    assert len(firsts(seen)) == (8 if level else 2)
    assert totals.parks == totals.slices == totals.resumes
    assert (totals.parks > 0) is (level > 0)
    assert device.num_computed == 8 * (8 + 63)  # nothing twice


@pytest.mark.usefixtures("cheap")
async def test_nobody_is_parked_where_it_would_not_help(tmp_path: Path) -> None:
    device = ParkingDevice(room=ROOM)
    big = Request((9,) * 100, max_tokens=60, name="big")  # more than both of the others hold
    async with parking(device, tmp_path, budget=SMALL, fairness=100) as (client, ref):
        seen = await timeline(client, [*EIGHT[:2], big])
        totals = (await ref.ask(SchedulerStatsRequest())).park_totals
    assert tokens([d for name, d in seen if name == "big"]) == whole(big)
    assert totals.parks == 0


async def test_slices_that_would_not_pay_are_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Parker, "swap_s", 1e6)
    device = ParkingDevice(room=ROOM)
    async with parking(device, tmp_path, budget=SMALL, fairness=100) as (client, ref):
        seen = await timeline(client, EIGHT)
        assert (await ref.ask(SchedulerStatsRequest())).park_totals.parks == 0
    assert len(firsts(seen)) == 2


@pytest.mark.usefixtures("cheap")
async def test_high_priority_is_not_parked_for_others(tmp_path: Path) -> None:
    device = ParkingDevice(room=ROOM)
    high = [replace(request, priority=Priority.HIGH) for request in EIGHT[:2]]
    async with parking(device, tmp_path, budget=SMALL, fairness=50) as (client, _):
        seen = await timeline(client, [*high, *EIGHT[2:4]])
    assert set(firsts(seen)) == {"r0", "r1"}


@pytest.mark.usefixtures("cheap")
async def test_a_disk_that_fails_ends_slices_and_no_reply(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    device = ParkingDevice(room=ROOM)
    async with parking(device, tmp_path / "file", budget=SMALL, fairness=100) as (client, ref):
        seen = await timeline(client, EIGHT)
        totals = (await ref.ask(SchedulerStatsRequest())).park_totals
    for request in EIGHT:
        assert tokens([d for name, d in seen if name == request.name]) == whole(request)
    assert totals.parks == 0
    assert totals.failures > 0


@pytest.mark.usefixtures("cheap")
async def test_slices_outlive_devices(tmp_path: Path) -> None:
    device = ParkingDevice(room=ROOM, dies=at(Step, 40, 100))
    async with parking(device, tmp_path, budget=SMALL, fairness=100) as (client, _):
        seen = await timeline(client, EIGHT)
    for request in EIGHT:
        assert tokens([d for name, d in seen if name == request.name]) == whole(request)
    assert device.num_deaths == 2
    assert device.promised == {}
