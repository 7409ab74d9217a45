"""Steps through blocks whose experts come one by one, once it is known which of them a step needs.

Part of a CPU device. Knows which stretch of a program follows which lease. Knows no sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import closing
from functools import partial

from actors.messages.pager import Unreadable
from actors.supply import LeasedWeights
from jitllm.devices.host import Pass
from jitllm.devices.mixtures import MixtureProgram, Stretch

PassesOf = Callable[[range], Generator[Pass, None, None]]


class Mixtures:
    """Computes with whichever experts are there, while others come."""

    def __init__(self, program: MixtureProgram, weights: LeasedWeights) -> None:
        self._program = program
        self._weights = weights

    async def run(
        self,
        compute: Executor,
        start: int,
        stop: int,
        passes_of: PassesOf,
        *,
        embeds: bool,
        begins: bool,
        ends: bool,
    ) -> None:
        """`Runner.run` in `compute`, for leased blocks. passes_of: of the attention of some blocks.

        Raises `PageError`, with the rows of the step that need it, for an expert that cannot be
        read.
        """
        loop = asyncio.get_running_loop()
        stretches = self._program.stretches(start, stop, embeds=embeds, begins=begins, ends=ends)
        for stretch in stretches:
            await loop.run_in_executor(compute, self._run, stretch, passes_of)
            if stretch.block is not None:
                await self._ask_experts(compute, stretch, stretch.block)

    def _run(self, stretch: Stretch, passes_of: PassesOf) -> None:
        with closing(passes_of(stretch.begun)) as passes:
            self._program.run(stretch, passes)

    async def _ask_experts(self, compute: Executor, stretch: Stretch, block: int) -> None:
        loop = asyncio.get_running_loop()
        left = self._program.needed()
        coming = self._weights.acquire_experts(block, left)
        if stretch.beside:
            beside = loop.run_in_executor(compute, self._program.run_beside, stretch)
            found, _ = await asyncio.gather(coming, beside)
        else:
            found = await coming
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
            found = await self._weights.acquire_experts(block, left)
