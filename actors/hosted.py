"""Experts of a block that is on one device, computed by another: the host.

Both sides of it. What the products need goes over, and what they say comes back, as rows of tokens;
the rest of the block is computed where it is. Knows no sequence and no page.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from actors.actor import Ref
from actors.messages.device import AskExperts, Carried
from actors.mixtures import PagedExperts, Work, meanwhile
from actors.outbox import Outbox
from jitllm.devices.mixtures import Crossing, rows_bytes
from jitllm.devices.runner import Runner
from jitllm.kernels.op import Buffer
from jitllm.memory.use import Phase

Copy = Callable[[Buffer, int, int], None]
"""Copies so many rows of a buffer to an address, or from there."""


@dataclass(frozen=True, slots=True)
class Host:
    """The device that computes experts. is_far: it is on another node than the one that asks."""

    device: Ref
    is_far: bool


class HostedExperts:
    """Asks the host."""

    def __init__(
        self, runner: Runner, outbox: Outbox, host: Host, crossings: Mapping[int, Crossing]
    ) -> None:
        self._runner = runner
        self._outbox = outbox
        self._host = host
        self._crossings = crossings

    async def ask(self, compute: Executor, block: int, phase: Phase, beside: Work | None) -> None:
        """See `Experts`."""
        loop, crossing = asyncio.get_running_loop(), self._crossings[block]
        step, inline = self._runner.step, self._host.is_far
        num_tokens = step.num_tokens
        row_of = tuple(step.row_of[:num_tokens])
        hand = partial(_each, self._runner.hand, crossing.takes, num_tokens)
        await loop.run_in_executor(compute, hand, self._outbox.step_address)
        data = self._outbox.of_step(rows_bytes(crossing.takes, num_tokens), inline=inline)
        asked = self._host.device.ask(AskExperts(block, row_of, phase, data, inline))
        said: Carried = await meanwhile(asked, compute, beside)
        with self._outbox.readable(said) as address:
            take = partial(_each, self._runner.take, crossing.gives, num_tokens)
            await loop.run_in_executor(compute, take, address)


class ExpertHost:
    """Answers those who ask."""

    def __init__(
        self,
        runner: Runner,
        outbox: Outbox,
        experts: PagedExperts,
        crossings: Mapping[int, Crossing],
    ) -> None:
        self._runner = runner
        self._outbox = outbox
        self._experts = experts
        self._crossings = crossings

    async def answer(self, compute: Executor, message: AskExperts) -> Carried:
        """See `AskExperts`. Steps of this device write down anew what this overwrites."""
        crossing, num_tokens = self._crossings[message.block], len(message.row_of)
        step = self._runner.step
        step.row_of[:num_tokens] = array("i", message.row_of)
        step.set_counts(num_tokens, 0)
        with self._outbox.readable(message.data) as address:
            _each(self._runner.take, crossing.takes, num_tokens, address)
        await self._experts.ask(compute, message.block, message.phase, None)
        _each(self._runner.hand, crossing.gives, num_tokens, self._outbox.step_address)
        num_bytes = rows_bytes(crossing.gives, num_tokens)
        return self._outbox.of_step(num_bytes, inline=message.inline)


def _each(copy: Copy, buffers: Iterable[Buffer], num_tokens: int, address: int) -> None:
    """Rows of buffers that lie one behind the other."""
    for buffer in buffers:
        copy(buffer, address, num_tokens)
        address += num_tokens * buffer.stride_bytes
