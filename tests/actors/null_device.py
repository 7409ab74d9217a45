"""A device that computes nothing: it counts, promises room, and samples made-up tokens.

Keys and values take a byte a position. What it is asked is written down.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from actors.actor import Actor, Ref
from actors.messages.device import (
    Close,
    Cut,
    DeviceMessage,
    DeviceStats,
    DeviceStatsRequest,
    Open,
    Opened,
    Outcome,
    Own,
    Recall,
    Refused,
    Shrink,
    Step,
    StepDone,
    Steps,
)
from actors.messages.pager import SetBudget
from actors.parts import Parts
from actors.route import Route, Site
from jitllm.memory.prefix import reusable
from jitllm.schedule.placement import Placement
from jitllm.schedule.step import Span, SpanResult
from tests.actors.outcomes import outcome_of

NAME = "cpu:0"


def route_to(device: Ref) -> Route:
    """A model of two blocks on one device, which is its own pager too."""
    return Route({NAME: Site(device, device)}, Placement.all_on(NAME, 2), 1 << 30)


@dataclass
class NullDevice(Actor):
    """room: positions that sequences may be promised in all. page_tokens: 0 shares no prefixes.

    gate: steps wait for it, when it is there.
    """

    room: int = 1 << 40
    page_tokens: int = 0
    gate: asyncio.Semaphore | None = None
    promised: dict[int, int] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)
    steps: list[tuple[Span, ...]] = field(default_factory=list)
    known: dict[bytes, int] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    async def receive(self, message: DeviceMessage | SetBudget) -> object:
        """See `actors.messages`."""
        match message:
            case Open():
                return self._open(message)
            case Close():
                for sequence in message.sequences:
                    self.promised.pop(sequence, None)
                return None
            case Step():
                return await self._step(message)
            case Steps():
                return await self._steps(message)
            case Cut() | Recall() | Shrink() | Own() | SetBudget():
                return None
            case DeviceStatsRequest():
                kv_bytes = sum(self.promised.values())
                return DeviceStats(kv_bytes, 0, 0, 1, 0, 1, "null", 1 << 20, 0, 0.0)
            case _:
                raise NotImplementedError(message)

    def _open(self, message: Open) -> Opened | Refused:
        room = self.room - sum(self.promised.values())
        if message.promised_tokens > room and not message.must_fit:
            return Refused(message.promised_tokens, room)
        self.promised[message.sequence] = message.promised_tokens
        self.opened.append(message.sequence)
        self.tokens[message.sequence] = list(message.tokens)
        if not self.page_tokens:
            return Opened(message.sequence)
        names = reusable(message.tokens, self.page_tokens)
        hits = next((i for i, name in enumerate(names) if name not in self.known), len(names))
        return Opened(message.sequence, hits * self.page_tokens)

    async def _steps(self, message: Steps) -> Parts[Outcome]:
        """One step at a time: whoever watches the steps of this device sees every one."""
        outcomes: Parts[Outcome] = Parts()
        done = await self.receive(message.first)
        assert isinstance(done, StepDone)
        outcomes.put(outcome_of(message.first.spans, done))
        outcomes.end()
        return outcomes

    async def _step(self, message: Step) -> StepDone:
        if self.gate is not None:
            await self.gate.acquire()
        self.steps.append(message.spans)
        if self.page_tokens:
            self._publish(message.spans)
        # The token says where it stands: a reply that lost or repeated one would show it.
        results = tuple(
            SpanResult(span.sequence, span.stop % 1000 if span.sample else None, -1.0)
            for span in message.spans
        )
        return StepDone(message.step_id, results, ())

    def _publish(self, spans: tuple[Span, ...]) -> None:
        for span in spans:
            assert span.sequence in self.promised
            names = reusable([*self.tokens[span.sequence], 0], self.page_tokens)
            for name in names[: span.stop // self.page_tokens]:
                self.known[name] = span.sequence
