"""What scheduling costs, and what a long prompt costs those who are in the middle of a reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

from actors.client import Client
from actors.local import Runtime
from actors.messages.device import Step, StepDone
from actors.reply import Reply
from actors.route import Site
from actors.scheduler import Scheduler
from jitllm.engine import Delta, Engine, Request
from jitllm.schedule.plan import Budget
from jitllm.schedule.step import Span
from tests.actors.null_device import NAME, NullDevice, route_to
from tests.models.native import opened

NUM_SEQUENCES = 32
NUM_STEPS = 1000
MAX_STALL = 2.0
"""Longest gap of undisturbed replies over the typical one; above it a measurement is rejected."""


class TimedScheduler(Scheduler):
    """Writes down the time of its own that each step takes: plan, message, results."""

    def __init__(self, *arguments: object, **choices: object) -> None:
        super().__init__(*arguments, **choices)  # type: ignore[arg-type]
        self.own_s: list[float] = []
        self._asked_s = self._came_s = 0.0
        name, site = next(iter(self._route.sites.items()))
        self._ask, self._follow = site.device.ask, site.device.follow
        self._route.sites[name] = Site(self, site.pager)  # type: ignore[arg-type]
        self._stepped = self._stepper.plan, self._stepper._apply
        self._stepper.plan = self._plan  # type: ignore[method-assign]
        self._stepper._apply = self._apply  # type: ignore[method-assign]

    async def ask(self, message: object) -> object:
        """In place of the device: what is before and after a step's call is our own time."""
        if isinstance(message, Step):
            self.own_s[-1] += perf_counter() - self._asked_s
        reply: object = await self._ask(message)  # type: ignore[arg-type]
        self._came_s = perf_counter()
        return reply

    async def follow(self, message: object) -> AsyncIterator[object]:
        """The same for steps that are answered in parts."""
        self.own_s[-1] += perf_counter() - self._asked_s
        async for part in self._follow(message):  # type: ignore[arg-type, var-annotated]
            self._came_s = perf_counter()
            yield part

    def _plan(self) -> tuple[Span, ...]:
        self._asked_s = perf_counter()
        self.own_s.append(0.0)
        return self._stepped[0]()

    def _apply(
        self, spans: Iterable[Span], done: StepDone, now_s: float
    ) -> list[tuple[Reply, Delta]]:
        ended = self._stepped[1](spans, done, now_s)
        self.own_s[-1] += perf_counter() - self._came_s
        return ended


@pytest.mark.bench
async def test_a_step_of_many_sequences_costs_half_a_millisecond_of_python() -> None:
    budget = Budget(rows=NUM_SEQUENCES, tokens=512, outputs=NUM_SEQUENCES)
    async with Runtime() as runtime:
        device = await runtime.spawn(NullDevice(), "device")
        scheduler = TimedScheduler(route_to(device), budget, context_tokens=4096, vocab=1000)
        sites = {NAME: Site(device, device)}
        client = Client(await runtime.spawn(scheduler, "scheduler"), sites, nothing)
        request = Request(tuple(range(20)), max_tokens=NUM_STEPS + 100)
        await asyncio.gather(*(drained(client, request) for _ in range(NUM_SEQUENCES)))
    own_ms = [1e3 * s for s in scheduler.own_s[50 : 50 + NUM_STEPS]]
    print(f"\n{NUM_SEQUENCES} sequences: p50 {median(own_ms):.3f} ms of Python a step")
    assert median(own_ms) <= 0.5


async def nothing() -> None:
    """Nothing is to be stopped."""


async def drained(engine: Engine, request: Request) -> None:
    """Read a reply to its end."""
    async for delta in engine.generate(request):
        assert delta.error is None


@pytest.mark.bench
async def test_a_newcomer_with_a_long_prompt_slows_replies_down_within_bounds(
    gemma_model: Path,
) -> None:
    async with opened(gemma_model) as model:
        engine, stop = model.engine, asyncio.Event()
        arrivals: list[list[float]] = [[] for _ in range(8)]
        readers = [
            asyncio.create_task(watched(engine, seed, arrivals[seed], stop)) for seed in range(8)
        ]
        while min(map(len, arrivals)) < 150:  # noqa: ASYNC110 - eight readers, no event
            await asyncio.sleep(0.01)
        began_s = perf_counter()
        prompt = tuple(1000 + 7 * i % 50_000 for i in range(2000))
        async for delta in engine.generate(Request(prompt, max_tokens=1)):
            assert delta.error is None
        first_s = perf_counter() - began_s
        stop.set()
        await asyncio.gather(*readers)
    before = gaps(arrivals, began_s - 10, began_s)[len(arrivals) * 20 :]
    during = gaps(arrivals, began_s, began_s + first_s)
    typical = median(before)
    ratio, worst = median(during) / typical, max(during) / typical
    print(
        f"\nfirst token after {first_s:.2f} s; gaps {1e3 * typical:.1f} ms before, "
        f"max {max(before) / typical:.2f}x; meanwhile "
        f"p50 {ratio:.2f}x, p99 {sorted(during)[-len(during) // 100] / typical:.2f}x, "
        f"max {worst:.2f}x; {len(during)} gaps"
    )
    if max(before) > MAX_STALL * typical:
        pytest.skip("rejected: the machine stalls without a newcomer too")
    assert ratio <= 2
    assert worst <= 4


async def watched(engine: Engine, seed: int, arrivals: list[float], stop: asyncio.Event) -> None:
    """When each token of a reply came."""
    async for delta in engine.generate(Request((2, 100 + seed), max_tokens=4000)):
        arrivals.append(perf_counter())
        assert delta.error is None
        if stop.is_set():
            return


def gaps(arrivals: list[list[float]], start_s: float, stop_s: float) -> list[float]:
    """Seconds between neighbouring tokens within a time."""
    return [
        later - earlier
        for times in arrivals
        for earlier, later in zip(times, times[1:], strict=False)
        if start_s <= earlier and later <= stop_s
    ]
