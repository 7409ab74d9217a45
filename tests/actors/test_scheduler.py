"""The scheduler on a device that computes nothing: who waits, who is served, who hears what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from actors.carry import Carrier, Frame, Frames, Kind
from actors.client import Client
from actors.local import LocalRef, Runtime
from actors.messages.scheduler import SchedulerStatsRequest, Submit
from actors.route import Site
from actors.scheduler import Scheduler
from actors.session import Session
from jitllm.engine import Delta, Finish, Priority, Request, SchedulerStats
from jitllm.errors import QueueFull
from jitllm.schedule.plan import Budget
from jitllm.schedule.sequence import MAX_PASSED
from tests.actors.null_device import NAME, NullDevice, route_to

BUDGET = Budget(rows=4, tokens=64, outputs=4)
VOCAB = 1000


@asynccontextmanager
async def scheduling(
    device: NullDevice, budget: Budget = BUDGET, *, strict: bool = False, **choices: Any
) -> AsyncIterator[tuple[Client, LocalRef]]:
    """A client of a scheduler on `device`, and the scheduler."""
    async with Runtime(strict=strict) as runtime:
        there = await runtime.spawn(device, "device")
        choices = {"context_tokens": 4096, "page_tokens": device.page_tokens, **choices}
        scheduler = Scheduler(route_to(there), budget, vocab=VOCAB, **choices)
        ref = await runtime.spawn(scheduler, "scheduler")

        async def stop() -> None:
            await runtime.stop("scheduler")

        yield Client(ref, {NAME: Site(there, there)}, stop), ref


async def all_of(client: Client, request: Request) -> list[Delta]:
    """Every delta of a reply."""
    return [delta async for delta in client.generate(request)]


def tokens(deltas: list[Delta]) -> list[int]:
    """Those of all deltas."""
    return [token for delta in deltas for token in delta.tokens]


async def until(device: NullDevice, scheduler: LocalRef, **expected: int) -> None:
    """Wait until so many are running or waiting."""
    while True:
        stats: SchedulerStats = await scheduler.ask(SchedulerStatsRequest())
        if all(getattr(stats, name) == count for name, count in expected.items()):
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize("strict", [False, True])
async def test_every_reply_is_whole(strict: bool) -> None:
    device = NullDevice()
    async with scheduling(device, strict=strict) as (client, _):
        requests = [Request((1,) * n, max_tokens=n % 7 + 1) for n in range(1, 40)]
        replies = await asyncio.gather(*(all_of(client, request) for request in requests))
    for request, deltas in zip(requests, replies, strict=True):
        start = len(request.prompt)
        assert tokens(deltas) == list(range(start, start + (request.max_tokens or 0)))
        assert deltas[-1].finish is Finish.LENGTH
    assert device.promised == {}
    assert max(len(spans) for spans in device.steps) == BUDGET.rows


async def test_a_step_costs_one_message_for_all_clients_of_a_process() -> None:
    """And they send none: what a token costs is how often a process has to wake up for it."""
    num_replies, num_tokens = 3, 6
    sent: list[bytes] = []
    async with scheduling(NullDevice()) as (_, scheduler):
        carrier = Carrier(lambda name: scheduler)
        session = Session(scheduler, carrier, sent.append)
        for question in range(num_replies):
            body = carrier.dump(Submit(Request((1,), max_tokens=num_tokens)))
            assert session.take(Frame(Kind.FOLLOW, question, body))
        kinds: list[list[Kind]] = []
        while sum(kind is Kind.REPLY for write in kinds for kind in write) < num_replies:
            await asyncio.sleep(0)
            kinds = [[frame.kind for frame in Frames().feed(data)] for data in sent]
    assert kinds[: num_tokens - 1] == [[Kind.PART] * num_replies] * (num_tokens - 1)
    ends = [kind for write in kinds[num_tokens - 1 :] for kind in write]
    assert ends == [Kind.PART, Kind.REPLY] * num_replies


# --- the queue ------------------------------------------------------------------------------------


async def test_a_full_queue_refuses_and_the_rest_is_served() -> None:
    device = NullDevice()
    async with scheduling(device, max_queue=6) as (client, scheduler):
        request = Request((1, 2), max_tokens=5)
        outcomes = await asyncio.gather(
            *(all_of(client, request) for _ in range(100)), return_exceptions=True
        )
        served = [o for o in outcomes if isinstance(o, list)]
        refused = [o for o in outcomes if isinstance(o, QueueFull)]
        assert len(served) + len(refused) == 100
        assert len(served) >= 6 + BUDGET.rows
        assert all(len(tokens(deltas)) == 5 for deltas in served)
        assert refused[0].max_queue == 6
        stats: SchedulerStats = await scheduler.ask(SchedulerStatsRequest())
        assert (stats.running, stats.waiting) == (0, 0)
        assert len(tokens(await all_of(client, request))) == 5
    assert device.promised == {}


async def test_nobody_is_refused_while_rows_are_free() -> None:
    async with scheduling(NullDevice(), max_queue=0) as (client, _):
        request = Request((1, 2), max_tokens=5)
        replies = await asyncio.gather(*(all_of(client, request) for _ in range(BUDGET.rows)))
        assert all(len(tokens(deltas)) == 5 for deltas in replies)


async def test_a_queue_without_bounds_takes_everyone() -> None:
    async with scheduling(NullDevice(), max_queue=-1) as (client, _):
        replies = await asyncio.gather(
            *(all_of(client, Request((1,), max_tokens=2)) for _ in range(300))
        )
        assert all(len(tokens(deltas)) == 2 for deltas in replies)


# --- admission ------------------------------------------------------------------------------------


async def started(client: Client, request: Request) -> asyncio.Task[list[Delta]]:
    """A request that has been submitted, or soon will be."""
    task = asyncio.create_task(all_of(client, request))
    for _ in range(6):
        await asyncio.sleep(0)
    return task


async def test_high_priority_goes_first() -> None:
    device = NullDevice(gate=asyncio.Semaphore(0))
    async with scheduling(device, Budget(1, 64, 1)) as (client, _):
        tasks = [await started(client, Request((1,), max_tokens=1)) for _ in range(3)]
        high = Request((1,), max_tokens=1, priority=Priority.HIGH)
        tasks.append(await started(client, high))
        device.gate = None if device.gate is None else open_gate(device.gate)
        await asyncio.gather(*tasks)
    assert device.opened == [0, 3, 1, 2]


def open_gate(gate: asyncio.Semaphore) -> None:
    """Let every step through."""
    for _ in range(10_000):
        gate.release()


async def test_the_first_is_admitted_whatever_it_needs() -> None:
    device = NullDevice(room=10)
    async with scheduling(device) as (client, _):
        deltas = await all_of(client, Request((1,) * 50, max_tokens=5))
        assert len(tokens(deltas)) == 5


async def test_small_ones_pass_a_large_one_but_not_for_ever() -> None:
    """A request that there is no room for is passed by later ones so many times, then all wait."""
    device = NullDevice(room=1000)
    async with scheduling(device, Budget(2, 64, 2)) as (client, _):
        long = await started(client, Request((1,) * 10, max_tokens=400))
        large = await started(client, Request((1,) * 600, max_tokens=1))
        small = [await started(client, Request((1,), max_tokens=2)) for _ in range(2 * MAX_PASSED)]
        await asyncio.gather(long, large, *small)
    place = device.opened.index(1)
    assert place == 1 + MAX_PASSED
    assert device.promised == {}


async def test_a_stream_of_urgent_ones_does_not_starve_others() -> None:
    device = NullDevice()
    async with scheduling(device, Budget(1, 64, 1)) as (client, _):
        first = await started(client, Request((1,), max_tokens=3))
        patient = await started(client, Request((1,), max_tokens=1))
        urgent = Request((1,), max_tokens=1, priority=Priority.HIGH)
        await asyncio.gather(
            first, patient, *(all_of(client, urgent) for _ in range(3 * MAX_PASSED))
        )
    assert device.opened.index(1) <= 1 + MAX_PASSED


# --- prefixes -------------------------------------------------------------------------------------


async def test_a_prefix_that_arrives_together_is_computed_once() -> None:
    device = NullDevice(page_tokens=16)
    async with scheduling(device, Budget(8, 64, 8)) as (client, _):
        prompt = tuple(range(200))
        replies = await asyncio.gather(
            *(all_of(client, Request((*prompt, n), max_tokens=4)) for n in range(8))
        )
    computed = sum(len(span.tokens) for spans in device.steps for span in spans if span.start < 200)
    assert computed <= 200 + 8 * 16
    cached = [deltas[-1].usage.cached_tokens for deltas in replies if deltas[-1].usage]
    assert sorted(cached) == [0] + [192] * 7
    assert all(len(tokens(deltas)) == 4 for deltas in replies)


async def test_what_a_prompt_cost_is_known_with_the_first_token() -> None:
    async with scheduling(NullDevice(page_tokens=16)) as (client, _):
        request = Request(tuple(range(40)), max_tokens=3)
        await all_of(client, request)
        first, *between, last = await all_of(client, request)
    assert first.usage is not None
    assert last.usage is not None
    assert (first.usage.cached_tokens, first.usage.generated_tokens) == (32, 1)
    decode_s = last.usage.decode_s
    assert last.usage == replace(first.usage, generated_tokens=3, decode_s=decode_s)
    assert all(delta.usage is None for delta in between)


async def test_who_waits_for_a_prefix_goes_on_when_its_leader_is_cancelled() -> None:
    device = NullDevice(page_tokens=16, gate=asyncio.Semaphore(0))
    async with scheduling(device) as (client, scheduler):
        request = Request(tuple(range(200)), max_tokens=4)
        leader = await started(client, request)
        follower = await started(client, request)
        await until(device, scheduler, running=1, waiting=1)
        leader.cancel()
        assert device.gate is not None
        open_gate(device.gate)
        assert len(tokens(await follower)) == 4
    assert device.promised == {}


# --- cancelling -----------------------------------------------------------------------------------

PHASES = ["queued", "prompt", "decode"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("way", ["closed", "task"])
@pytest.mark.parametrize("phase", PHASES)
async def test_cancelling_takes_effect_within_a_step(phase: str, way: str, n: int) -> None:
    """The client leaves: at most one more step has its rows, and its room is free."""
    device = NullDevice(gate=asyncio.Semaphore(0))
    assert device.gate is not None
    async with scheduling(device, Budget(4, 16, 4)) as (client, scheduler):
        length, steps = {"queued": (5, 1), "prompt": (2000, 3), "decode": (5, 7)}[phase]
        others = 4 if phase == "queued" else 0
        beside = [await started(client, Request((3,) * 4, max_tokens=30)) for _ in range(others)]
        request = Request((1,) * length, max_tokens=1000)
        leaving = [asyncio.create_task(read(client, request, way)) for _ in range(n)]
        device.gate.release()  # who came first was alone in a step
        await until(device, scheduler, running=others or n, waiting=n if others else 0)
        for _ in range(steps - 1):
            device.gate.release()
        while len(device.steps) < steps:  # noqa: ASYNC110 - the device knows no test
            await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        before = len(device.steps)
        device.gate.release()  # the one that may have been under way
        await until(device, scheduler, running=others, waiting=0)
        assert len(device.steps) <= before + 1
        assert len(device.promised) == others
        open_gate(device.gate)
        for task in beside:
            assert len(tokens(await task)) == 30
    assert device.promised == {}


async def read(client: Client, request: Request, way: str) -> None:
    """Follow a reply, closing it in the end or leaving that to whoever cleans up."""
    stream = client.generate(request)
    if way == "task":
        async for _ in stream:
            pass
        return
    async with aclosing(stream) as deltas:
        async for _ in deltas:
            pass
