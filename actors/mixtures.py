"""Steps through blocks whose experts are asked in the middle, once it is known which a step needs.

Part of a device. Knows which stretch of a program comes when, and who computes the products with
experts: this device, as they come one by one, or the host (`actors.hosted`). Knows no sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Executor
from contextlib import closing
from functools import partial
from typing import Any, Protocol, TypeVar

from actors.messages.pager import Unreadable
from actors.supply import LeasedWeights
from jitllm.devices.host import Pass
from jitllm.devices.mixtures import MixtureProgram, Stretch, Stretches
from jitllm.devices.runner import Runner
from jitllm.memory.use import Phase

PassesOf = Callable[[range], Generator[Pass, None, None]]
Work = Callable[[], None]

R = TypeVar("R")


class Experts(Protocol):
    """Who computes the products with experts."""

    async def ask(self, compute: Executor, block: int, phase: Phase, beside: Work | None) -> None:
        """Have what the chosen experts of a block say, of the step that is in the runner.

        compute: the thread that nothing else is done in. phase: of the step. beside: to be done in
        that thread meanwhile. Raises `PageError`, with the rows of the step that need it, for an
        expert that cannot be read.
        """
        ...


class Mixtures:
    """Runs a program stretch by stretch. experts: of each block whose experts are asked."""

    def __init__(
        self, runner: Runner, stretches: Stretches, experts: Mapping[int, Experts]
    ) -> None:
        self._runner = runner
        self._stretches = stretches
        self._experts = experts

    async def run(
        self,
        compute: Executor,
        start: int,
        stop: int,
        passes_of: PassesOf,
        phase: Phase,
        *,
        embeds: bool,
        begins: bool,
        ends: bool,
    ) -> None:
        """`Runner.run` in `compute`, of a step in some phase. passes_of: of the attention of some
        blocks.

        Raises what `Experts.ask` raises.
        """
        loop = asyncio.get_running_loop()
        runs = self._runner.sections(start, stop, embeds=embeds, begins=begins, ends=ends)
        for stretch in self._stretches.of(runs, begins=begins, ends=ends):
            await loop.run_in_executor(compute, self._run, stretch, passes_of)
            if stretch.block is not None:
                beside = partial(self._run_beside, stretch) if stretch.beside else None
                await self._experts[stretch.block].ask(compute, stretch.block, phase, beside)

    def _run(self, stretch: Stretch, passes_of: PassesOf) -> None:
        with closing(passes_of(stretch.begun)) as passes:
            self._runner.run_sections(
                stretch.sections, passes, begins=stretch.begins, ends=stretch.ends
            )

    def _run_beside(self, stretch: Stretch) -> None:
        self._runner.run_sections(stretch.beside, begins=False, ends=False)


async def meanwhile(asked: Coroutine[Any, Any, R], compute: Executor, beside: Work | None) -> R:
    """What was asked for, with `beside` done until then. Whatever fails or is cancelled, the thread
    rests afterwards and nothing is asked for any more: the next step is written where this was."""
    if beside is None:
        return await asked
    coming = asyncio.ensure_future(asked)
    try:
        await asyncio.get_running_loop().run_in_executor(compute, beside)
    except BaseException:
        coming.cancel()
        await asyncio.wait([coming])
        if not coming.cancelled():
            coming.exception()  # the other one is told
        raise
    return await coming


class PagedExperts:
    """Computes with whichever experts are there, while others come."""

    def __init__(self, program: MixtureProgram, weights: LeasedWeights) -> None:
        self._program = program
        self._weights = weights

    async def ask(self, compute: Executor, block: int, phase: Phase, beside: Work | None) -> None:
        """See `Experts`."""
        loop = asyncio.get_running_loop()
        left = self._program.needed()
        found = await meanwhile(self._weights.acquire_experts(block, left, phase), compute, beside)
        while True:
            if isinstance(found, Unreadable):
                found.error.rows = self._program.rows_of(found.expert)
                raise found.error
            ask = partial(self._program.ask, block, found.experts, found.places)
            try:
                await loop.run_in_executor(compute, ask)
            finally:
                await self._weights.release_experts(found)
            left = tuple(expert for expert in left if expert not in found.experts)
            if not left:
                return
            found = await self._weights.acquire_experts(block, left, phase)
