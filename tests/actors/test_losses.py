"""A device that dies: its sequences catch up on its successor, and no reply changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.departures import MAX_LOSSES
from actors.mailbox import Lost
from actors.messages.device import Close, DeviceMessage, Open, Step, StepDone, Steps
from jitllm.engine import Finish, Outputs, Request
from jitllm.schedule.step import SpanOutputs, SpanResult
from tests.actors.null_device import NullDevice
from tests.actors.test_scheduler import all_of, scheduling, tokens

Dies = Callable[[DeviceMessage], bool]


@dataclass
class MortalDevice(NullDevice):
    """Dies of messages that `dies` says; its successor, which is itself, knows nothing.

    late: it dies after the step, and before anyone hears of it.
    """

    dies: Dies = lambda _: False
    late: bool = False
    num_deaths: int = 0
    computed: dict[int, int] = field(default_factory=dict)

    async def receive(self, message: DeviceMessage) -> object:
        """See `actors.messages`."""
        if isinstance(message, Steps):
            return await self._steps(message)
        dies = self.dies(message)
        reply: Any = None
        if not dies or self.late:
            if isinstance(message, Open):
                self.computed[message.sequence] = 0
            if isinstance(message, Step):
                self._check(message)
            reply = await super().receive(message)
            if isinstance(reply, StepDone):
                reply = self._with_logprobs(message, reply)
        if not dies:
            return reply
        self.num_deaths += 1
        self.promised.clear()
        self.computed.clear()
        raise Lost("device")

    def _check(self, message: Step) -> None:
        """Every step goes on where the one before it ended, since the last opening."""
        for span in message.spans:
            assert self.computed[span.sequence] == span.start
            self.computed[span.sequence] = span.stop

    def _with_logprobs(self, message: Any, done: StepDone) -> StepDone:
        """Where outputs of a whole prompt are asked for, its positions as log-probabilities."""
        results = []
        for span, result in zip(message.spans, done.results, strict=True):
            known: tuple[float, ...] = ()
            if span.outputs is SpanOutputs.ALL:
                stop = span.stop if span.target >= 0 else span.stop - 1
                known = tuple(map(float, range(span.start, stop)))
            results.append(SpanResult(result.sequence, result.token, result.logprob, known))
        return StepDone(done.step_id, tuple(results), ())


def at(kind: type[DeviceMessage], *numbers: int) -> Dies:  # type: ignore[valid-type]
    """Of the messages of a kind with these numbers, counted from 1."""
    count = 0

    def dies(message: DeviceMessage) -> bool:
        nonlocal count
        count += isinstance(message, kind)
        return isinstance(message, kind) and count in numbers

    return dies


def ever(dice: random.Random, within: int) -> Dies:
    """As often as a request survives, at some of so many messages of any kind."""
    numbers, count = {dice.randrange(1, within) for _ in range(MAX_LOSSES)}, 0

    def dies(_: DeviceMessage) -> bool:
        nonlocal count
        count += 1
        return count in numbers

    return dies


REQUESTS = tuple(Request((1,) * n, max_tokens=12, chunk_tokens=3) for n in range(1, 9))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [Open, Step, Close])
@pytest.mark.parametrize("number", [1, 2, 5])
async def test_no_reply_changes(kind: Any, number: int, late: bool) -> None:
    device = MortalDevice(dies=at(kind, number), late=late)
    async with scheduling(device) as (client, _):
        replies = await asyncio.gather(*(all_of(client, request) for request in REQUESTS))
    for request, deltas in zip(REQUESTS, replies, strict=True):
        start = len(request.prompt)
        assert tokens(deltas) == list(range(start, start + 12))
        assert deltas[-1].finish is Finish.LENGTH
    assert device.num_deaths == 1
    assert device.promised == {}


@pytest.mark.parametrize("seed", range(10))
async def test_no_reply_changes_whenever_it_dies(seed: int) -> None:
    dice = random.Random(seed)
    device = MortalDevice(dies=ever(dice, 60), late=dice.random() < 0.5)
    async with scheduling(device) as (client, _):
        replies = await asyncio.gather(*(all_of(client, request) for request in REQUESTS))
    for request, deltas in zip(REQUESTS, replies, strict=True):
        start = len(request.prompt)
        assert tokens(deltas) == list(range(start, start + 12))
    assert device.promised == {}


async def test_what_was_told_of_a_prompt_is_not_told_again() -> None:
    device = MortalDevice(dies=at(Step, 3, 6))
    request = Request((1,) * 20, max_tokens=4, outputs=Outputs.ALL, chunk_tokens=4)
    async with scheduling(device) as (client, _):
        deltas = await all_of(client, request)
    told = [number for delta in deltas for number in delta.prompt_logprobs]
    assert told == list(map(float, range(19)))
    assert tokens(deltas) == [20, 21, 22, 23]


async def test_a_request_that_kills_devices_is_given_up_and_others_live() -> None:
    def dies(message: DeviceMessage) -> bool:
        return isinstance(message, Step) and any(666 in s.tokens for s in message.spans)

    device = MortalDevice(dies=dies)
    async with scheduling(device) as (client, _):
        poison = await all_of(client, Request((666,), max_tokens=4))
        assert isinstance(poison[-1].error, Lost)
        assert device.num_deaths == MAX_LOSSES + 1
        sound = await all_of(client, Request((1,), max_tokens=4))
        assert tokens(sound) == [1, 2, 3, 4]
