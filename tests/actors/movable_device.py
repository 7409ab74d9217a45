"""Devices between which blocks move, with nothing to compute, that fail when they are told to.

Each is its own pager, too. What one does is `tests.null.model_device`'s; so every step finds out
whether each page holds what it should.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from actors.actor import Actor
from actors.client import Client
from actors.local import LocalRef, Runtime
from actors.mailbox import Lost, Stopped
from actors.messages.device import (
    Bring,
    Brought,
    Cut,
    Outcome,
    Recall,
    Refused,
    Shrink,
    Step,
    Steps,
)
from actors.messages.pager import (
    Forget,
    Lend,
    PagerStats,
    PagerStatsRequest,
    Place,
    Release,
    SetBudget,
)
from actors.parts import Parts
from actors.relocate import PARCEL_BYTES
from actors.route import Route, Site
from actors.scheduler import Scheduler
from jitllm.engine import Request
from jitllm.schedule.placement import Placement
from jitllm.schedule.plan import Budget
from jitllm.schedule.step import following
from tests.actors.outcomes import outcome_of
from tests.null.model_device import ModelDevice, next_token

BLOCKS = 3
HEAD = BLOCKS
A, B, C = "cpu:0", "cpu:1", "cpu:2"
SIZES = {A: 4, B: 2, C: 8}
"""Devices, and positions in their pages."""
KV_BYTES = PARCEL_BYTES // 12
"""Of a position in a block: four positions of all blocks make a parcel."""
STATS = PagerStats(BLOCKS, 0, 0, 0, BLOCKS, 0, 0, 0, 1 << 20, 0, 0, 0, 0.0, 0.0, False, False)


@dataclass(frozen=True)
class Fault:
    """What goes wrong with the message of a kind that is the `number`th one, counted from 1.

    how: "dies" before it does what it is asked, "dies after" it; "ends": dies, and no successor
    comes; "hangs": does it, and is taken for dead; "refuses": has no room.
    """

    kind: type
    number: int
    how: str


@dataclass
class MovableDevice(Actor):
    """A successor is the same object, and knows nothing. met: faults that have happened."""

    name: str
    faults: Sequence[Fault] = ()
    budget: int = 1 << 30
    warns: bool = False
    on_step: Callable[[MovableDevice, Step], None] | None = None
    met: list[Fault] = field(default_factory=list)
    seen: Counter[type] = field(default_factory=Counter)
    is_gone: bool = False

    def __post_init__(self) -> None:
        self.begin_again()

    def begin_again(self) -> None:
        """Know nothing."""
        self.model = ModelDevice(
            self.name, BLOCKS, SIZES[self.name], budget=self.budget, warns=self.warns
        )

    async def receive(self, message: Any) -> object:
        """See `actors.messages`."""
        if self.is_gone:
            raise Stopped(self.name)
        fault = self._fault(message)
        if fault is None:
            return await self._handle(message)
        self.met.append(fault)
        match fault.how:
            case "refuses":
                return Refused(1, 0)
            case "dies after":
                await self._handle(message)
            case "hangs":
                await self._handle(message)
                raise Lost(self.name)
        self.begin_again()
        self.is_gone = fault.how == "ends"
        raise Lost(self.name)

    def _fault(self, message: Any) -> Fault | None:
        kind = type(message)
        self.seen[kind] += 1
        found = [f for f in self.faults if f.kind is kind and f.number == self.seen[kind]]
        return found[0] if found else None

    async def _handle(self, message: Any) -> object:
        await asyncio.sleep(0)
        match message:
            case (
                Cut() | Recall() | Shrink() | SetBudget() | Place() | Forget() | Release() | Lend()
            ):
                return None
            case Bring():
                return Brought(1, "container")
            case PagerStatsRequest():
                return STATS
            case Steps():
                return await self._steps(message.first)
            case _:
                if isinstance(message, Step) and self.on_step is not None:
                    self.on_step(self, message)
                return self.model.receive(message)

    async def _steps(self, first: Step) -> Parts[Outcome]:
        """Two at once, and perhaps a death after them."""
        steps: Parts[Outcome] = Parts()
        done = self.model.receive(first)
        steps.put(outcome_of(first.spans, done))
        try:
            spans = following(first.spans, done.results)
            second = Step(first.step_id + 1, spans, first.start, first.stop, first.has_head)
            fault = self._fault(second)
            if fault is not None:
                self.met.append(fault)
                self.begin_again()
                raise Lost(self.name)
        except Lost as error:
            steps.fail(error)
        else:
            steps.end()
        return steps


def reply_to(request: Request) -> list[int]:
    """What every reply has to be."""
    tokens = list(request.prompt)
    for _ in range(request.max_tokens or 0):
        tokens.append(next_token(tokens))
    return tokens[len(request.prompt) :]


@dataclass
class Scene:
    """A model on some devices."""

    runtime: Runtime
    devices: dict[str, MovableDevice]
    route: Route
    client: Client
    scheduler: LocalRef

    def check(self) -> None:
        """Every device that lives owns what the placement says, and holds nothing else."""
        for name, device in self.devices.items():
            if name in self.route.sites:
                device.model.check()
                owned = frozenset(self.route.owned_by(name))
                assert device.model.ownership.owned == owned, (name, self.route.placement)
                assert device.model.ownership.held == owned
                assert not device.model.seats


@asynccontextmanager
async def moving(
    faults: Mapping[str, Sequence[Fault]] = {},
    placement: str = "0000",
    *,
    with_memory: Collection[str] = (),
    budgets: Mapping[str, int] = {},
    gpus_fall_back: bool = True,
    warns: bool = False,
    **choices: Any,
) -> AsyncIterator[Scene]:
    """A model whose blocks, and whose head, are on the devices of these numbers.

    with_memory: devices that are said to have a memory of their own. budgets: pages and parts that
    those have room for, which they warn about; see `ModelDevice`.
    """
    choices = {"context_tokens": 256, "page_tokens": 4, "move_share": 1.0, **choices}
    async with asyncio.timeout(30), Runtime() as runtime:
        devices = {
            name: MovableDevice(name, faults.get(name, ()), budgets.get(name, 1 << 30), warns)
            for name in SIZES
        }
        refs = {name: await runtime.spawn(device, name) for name, device in devices.items()}
        sites = {name: Site(ref, ref, has_memory=name in with_memory) for name, ref in refs.items()}
        owners = [f"cpu:{number}" for number in placement]
        begin = Placement(tuple(owners[:-1]), owners[-1])
        route = Route(sites, begin, 1 << 30, gpus_fall_back=gpus_fall_back)
        scheduler = Scheduler(
            route,
            Budget(rows=4, tokens=16, outputs=4),
            vocab=1000,
            block_bytes=(1,) * (BLOCKS + 1),
            kv_bytes=(KV_BYTES,) * BLOCKS,
            **choices,
        )
        ref = await runtime.spawn(scheduler, "scheduler")

        async def stop() -> None:
            await runtime.stop("scheduler")

        yield Scene(runtime, devices, route, Client(ref, sites, stop), ref)
