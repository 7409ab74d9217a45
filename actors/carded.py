"""Experts of a block on a GPU that come to it one by one, as steps need them.

From the frames of its pager, which reads what is not there, to frames of the device. Knows leases.
Which expert goes for another is `jitllm.memory.device_experts`'s to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from actors.copied_weights import CopiedWeights
from actors.messages.pager import Unreadable
from actors.mixtures import Work
from jitllm.devices.vulkan.mixtures import VulkanMixture
from jitllm.memory.use import Phase


class CardedExperts:
    """Computes with those that are there, while others come."""

    def __init__(self, program: VulkanMixture, weights: CopiedWeights) -> None:
        self._program = program
        self._weights = weights

    async def ask(self, compute: Executor, block: int, phase: Phase, beside: Work | None) -> None:
        """See `Experts`."""
        loop = asyncio.get_running_loop()
        left: Sequence[int] = await loop.run_in_executor(compute, self._program.needed)
        while left:
            found = self._weights.experts.admit(block, left)
            bring = self._bring(block, found.reads, phase)
            coming = asyncio.create_task(bring, name=f"experts {block}")
            try:
                if beside is not None:
                    await loop.run_in_executor(compute, beside)
                    beside = None
                if found.present:
                    ask = partial(self._program.ask, block, found.present)
                    await loop.run_in_executor(compute, ask)
                await coming
                if found.reads:
                    ask = partial(self._program.ask, block, found.reads)
                    await loop.run_in_executor(compute, ask)
            finally:
                coming.cancel()
                await asyncio.wait([coming])  # nothing is on its way to a frame after this
                if not coming.cancelled():
                    coming.exception()  # which another one may have come before
                held = (*found.present, *found.reads)
                self._weights.experts.residency.release(block, held)
            left = found.left

    async def _bring(self, block: int, experts: tuple[int, ...], phase: Phase) -> None:
        """Have them in their frames; none that could not be brought holds one any more."""
        experts_here, left = self._weights.experts, experts
        try:
            while left:
                lease = await self._weights.acquire_experts(block, left, phase)
                if isinstance(lease, Unreadable):
                    lease.error.rows = self._program.rows_of(lease.expert)
                    raise lease.error
                try:
                    for index, expert in enumerate(lease.experts):
                        await self._weights.bring_expert(lease, index)
                        experts_here.residency.arrive(block, expert)
                        left = tuple(one for one in left if one != expert)
                finally:
                    await self._weights.release_experts(lease)
        finally:
            for expert in left:
                experts_here.fail(block, expert)
