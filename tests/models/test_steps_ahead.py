"""Steps that the device begins before it is asked: the same answers, at once, and none too many."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from actors.decode import results
from actors.messages.device import Close, Open, Opened, Recall, Shrink, Step, Steps
from actors.messages.scheduler import SchedulerStatsRequest
from actors.parts import Parts
from jitllm.compose import Loaded
from jitllm.devices.host import HostProgram
from jitllm.engine import Delta, Finish, Request, Sampling, SchedulerStats
from jitllm.schedule import pace, plan
from jitllm.schedule.step import Span, SpanOutputs, SpanResult
from tests.conftest import TinyModel
from tests.models.native import opened

PROMPT = (1, 259, 75, 260, 269)
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=11, repeat_penalty=1.1)
PAGE_TOKENS = 16
WAIT_S = 10
SHRINK = Shrink(1 << 40)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", "q8_0")


@dataclass
class Native:
    """What is computed, seen from inside. Runs that are held begin, and stand until let go."""

    num_runs: int = 0
    num_ahead: int = 0
    fails_at: int = -1
    is_held: bool = False
    began: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    goes: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    async def next(self) -> None:
        """Until a held run has begun."""
        assert await asyncio.to_thread(self.began.acquire, timeout=WAIT_S)

    def release(self) -> None:
        """No run is held any more."""
        self.is_held = False
        self.goes.release(1000)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    seen = Native()
    run, send = HostProgram.run, Parts.send

    def watched(*args: Any, **choices: Any) -> None:
        seen.num_runs += 1
        if 0 <= seen.fails_at <= seen.num_runs:
            raise MemoryError("as a test wants it")
        if seen.is_held:
            seen.began.release()
            assert seen.goes.acquire(timeout=WAIT_S)
        run(*args, **choices)

    def sent(parts: Parts[Any], *args: Any) -> None:
        seen.num_ahead += 1
        send(parts, *args)

    monkeypatch.setattr(pace, "MAX_STEP_S", 1e9)  # every machine is quick enough
    monkeypatch.setattr(HostProgram, "run", watched)
    monkeypatch.setattr(Parts, "send", sent)
    return seen


@asynccontextmanager
async def serving(model: Path, **choices: Any) -> AsyncIterator[Loaded]:
    settings = {"threads": 1, "page_size_tokens": PAGE_TOKENS, "strict": True, **choices}
    async with opened(model, **settings) as loaded:
        await reply(loaded, Request((1,), max_tokens=1))  # so that all blocks are there
        yield loaded


async def reply(loaded: Loaded, request: Request) -> list[Delta]:
    """All deltas but what they cost; one that brings an error raises it."""
    deltas = []
    async for delta in loaded.engine.generate(request):
        if delta.error is not None:
            raise delta.error
        deltas.append(replace(delta, usage=None))
    return deltas


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


async def steps(loaded: Loaded) -> SchedulerStats:
    """What the scheduler knows, whatever the device does."""
    engine: Any = loaded.engine
    stats: SchedulerStats = await engine._scheduler.ask(SchedulerStatsRequest())
    return stats


# --- what is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_requests", [1, 3])
async def test_answers_are_the_same_and_nothing_is_computed_in_vain(
    num_requests: int, model: Path, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        Request(PROMPT[: 2 + n], max_tokens=50 + 9 * n, sampling=SEEDED, logprobs=True)
        for n in range(num_requests)
    ]
    async with serving(model) as loaded:
        native.num_runs, before = 0, (await steps(loaded)).steps
        ahead = await asyncio.gather(*(reply(loaded, request) for request in requests))
        assert native.num_ahead > 40
        in_vain = native.num_runs - (await steps(loaded)).steps + before
        assert in_vain <= num_requests - 1  # one for a newcomer
    monkeypatch.setattr(plan, "goes_on", lambda *_: False)
    native.num_ahead = 0
    async with serving(model) as loaded:
        asked = await asyncio.gather(*(reply(loaded, request) for request in requests))
    assert native.num_ahead == 0
    assert ahead == asked


async def test_a_stop_id_ends_it(model: Path, native: Native) -> None:
    async with serving(model) as loaded:
        request = Request(PROMPT, max_tokens=40, sampling=SEEDED)
        whole = tokens(await reply(loaded, request))
        index = next(i for i in range(10, 40) if whole[i] not in whole[:i])
        native.num_runs, before = 0, (await steps(loaded)).steps
        ended = await reply(loaded, replace(request, stop_ids=frozenset({whole[index]})))
        assert (tokens(ended), ended[-1].finish) == (whole[:index], Finish.STOP)
        assert native.num_runs == (await steps(loaded)).steps - before == index + 1


# --- when it is heard of --------------------------------------------------------------------------


def flight(loaded: Loaded) -> Any:
    """What the device computes at the moment, if that may be followed at once."""
    engine: Any = loaded.engine
    return engine._sites["cpu:0"].device._cell._actor._compute._flight


async def until(is_so: Callable[[], bool]) -> None:
    """Let everyone else go on until it is."""
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 - nobody would set an event
            await asyncio.sleep(0)


@asynccontextmanager
async def held(
    loaded: Loaded, native: Native
) -> AsyncIterator[tuple[AsyncGenerator[Delta, None], int]]:
    """A reply in whose middle a step stands still, and how many tokens of it were seen."""
    deltas = cast(
        "AsyncGenerator[Delta, None]", loaded.engine.generate(Request((1,), max_tokens=14))
    )
    async with aclosing(deltas):
        num_tokens = 0
        native.is_held = True
        for _ in range(3):
            native.goes.release()
            num_tokens += len((await anext(deltas)).tokens)
            await native.next()
        await native.next()
        await until(lambda: flight(loaded).goes_on)
        try:
            yield deltas, num_tokens
        finally:
            native.release()


async def test_tokens_come_one_by_one(model: Path, native: Native) -> None:
    async with serving(model) as loaded:
        native.num_runs = 0
        async with held(loaded, native) as (deltas, num_tokens):
            for _ in range(3):
                native.goes.release()
                await native.next()  # the next step has begun, and stands still
                while num_tokens < native.num_runs - 1:
                    num_tokens += len((await asyncio.wait_for(anext(deltas), WAIT_S)).tokens)
                assert num_tokens == native.num_runs - 1


async def test_no_step_follows_a_cancel(model: Path, native: Native) -> None:
    async with serving(model) as loaded:
        async with held(loaded, native) as (deltas, _):
            await deltas.aclose()
            await until(lambda: not flight(loaded).goes_on)
            num_runs = native.num_runs
            native.release()
            while (await steps(loaded)).running:
                pass
        assert native.num_runs == num_runs
        assert len(tokens(await reply(loaded, Request(PROMPT, max_tokens=9)))) == 9


async def test_a_newcomer_is_in_the_next_step(model: Path, native: Native) -> None:
    async with serving(model) as loaded:
        alone = await reply(loaded, Request(PROMPT, max_tokens=2))
        async with held(loaded, native) as (deltas, num_tokens):
            newcomer = asyncio.create_task(reply(loaded, Request(PROMPT, max_tokens=2)))
            await until(lambda: not flight(loaded).goes_on)
            num_runs = native.num_runs
            native.goes.release()
            await native.next()
            stats = await steps(loaded)
            assert (stats.running, stats.waiting) == (2, 0)
            assert native.num_runs == num_runs + 1
            native.release()
            assert await newcomer == alone
            assert sum([len(delta.tokens) async for delta in deltas]) == 14 - num_tokens


async def test_a_step_that_fails_without_being_asked_for_ends_the_reply(
    model: Path, native: Native
) -> None:
    async with serving(model) as loaded:
        request = Request((1,), max_tokens=12)
        whole = await reply(loaded, request)
        native.fails_at = native.num_runs + 7
        with pytest.raises(MemoryError):
            await reply(loaded, request)
        native.fails_at = -1
        assert await reply(loaded, request) == whole


async def test_closing_does_not_wait_for_the_end(model: Path, native: Native) -> None:
    async with serving(model) as loaded:
        deltas = loaded.engine.generate(Request((1,), max_tokens=200))
        for _ in range(4):
            await anext(deltas)
        await loaded.close()
        assert native.num_runs < 100


# --- the device alone -----------------------------------------------------------------------------


async def test_steps_go_on_from_the_first_one_where_all_blocks_fit(model: Path) -> None:
    async with serving(model) as loaded:
        engine: Any = loaded.engine
        device = engine._sites["cpu:0"].device
        await device.ask(Open(1, (), 60, 60, SEEDED, False, 0, must_fit=True))  # gives leases back
        span = Span(1, 0, tuple(PROMPT), SpanOutputs.LAST, sample=True)
        steps = Steps(Step(1, (span,), 0, loaded.graph.num_blocks, has_head=True))
        outcomes = [outcome async for outcome in device.follow(steps)]
        await device.ask(Close((1,)))
    assert len(outcomes) > 1


@pytest.mark.parametrize("other", [Recall(), SHRINK, Close((5,)), "another step", None])
async def test_what_comes_between_steps_that_go_on_changes_nothing(other: Any, model: Path) -> None:
    async with serving(model) as loaded:
        engine: Any = loaded.engine
        device = engine._sites["cpu:0"].device
        num_blocks = loaded.graph.num_blocks

        async def decode(sequence: int, between: Any, *, goes_on: bool) -> list[int]:
            def span(start: int, *tokens: int) -> Span:
                return Span(sequence, start, tokens, SpanOutputs.LAST, sample=True)

            opened: Opened = await device.ask(
                Open(sequence, (), 60, 60, SEEDED, False, 0, must_fit=True)
            )
            assert opened.num_cached == 0
            step, ids = span(0, *PROMPT), []

            async def take(result: SpanResult) -> None:
                nonlocal step
                token = result.token
                assert token is not None
                ids.append(token)
                step = span(step.stop, token)
                if between == "another step":
                    await device.ask(Step(2, (step,), 0, num_blocks, has_head=True))
                elif between is not None:
                    await device.ask(between)

            while len(ids) < 50:
                first = Step(1, (step,), 0, num_blocks, has_head=True)
                if goes_on:
                    async for outcome in device.follow(Steps(first)):
                        await take(*results((step,), outcome))
                else:
                    await take(*(await device.ask(first)).results)
            await device.ask(Close((sequence,)))
            return ids

        alone = await decode(1, None, goes_on=False)
        assert (await decode(2, other, goes_on=True))[:50] == alone
