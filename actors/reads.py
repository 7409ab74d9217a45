"""Blocks on their way into a pager's memory, and what their reads came to.

Part of a pager. Knows reads in flight. Decides about none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from time import perf_counter

from jitllm.devices.memory import round_up
from jitllm.memory.residency import Residency
from jitllm.memory.use import Phase, ReadUse
from jitllm.memory.weights import Weights

Read = asyncio.Future[float]
"""A block on its way; how many seconds it took."""


class Reads:
    """See above. in_flight: by block, of the pager. ended: called with a block once its read is
    over, however it went."""

    def __init__(
        self,
        weights: Weights,
        residency: Residency,
        use: ReadUse,
        executor: Executor,
        in_flight: dict[int, Read],
        ended: Callable[[int], None],
    ) -> None:
        self._weights = weights
        self._residency = residency
        self._use = use
        self._executor = executor
        self._ended = ended
        self.in_flight = in_flight
        self.num_done = 0
        """Blocks that came in."""
        self.read_s = 0.0
        """Time that those took, overlapping or not, without pauses."""

    def begin(self, block: int, tell: Callable[[float], None]) -> Read:
        """Read a block that was given a frame; `tell` how long it took."""
        loop = asyncio.get_running_loop()
        read = loop.run_in_executor(self._executor, self._page_in, block)
        return self.watch(block, read, is_counted=True, tell=tell)

    def watch(
        self,
        block: int,
        read: Read,
        *,
        is_counted: bool,
        tell: Callable[[float], None] | None = None,
    ) -> Read:
        """Know of a read that began. is_counted: it reads the container."""
        phase = self._use.begin() if is_counted else None
        self.in_flight[block] = read
        read.add_done_callback(partial(self._end, block, phase, tell))
        return read

    def _page_in(self, block: int) -> float:
        """Seconds it took to read `block`. Runs in a thread of the executor."""
        began_s = perf_counter()
        self._weights.read_block(block)
        return perf_counter() - began_s

    def _end(
        self,
        block: int,
        phase: Phase | None,
        tell: Callable[[float], None] | None,
        read: Read,
    ) -> None:
        del self.in_flight[block]
        has_failed = read.cancelled() or read.exception() is not None
        if phase is not None:
            num_bytes = 0 if has_failed else round_up(self._residency.block_bytes[block])
            self._use.end(phase, num_bytes)
        if has_failed:
            self._residency.fail(block)
        else:
            self._residency.arrive(block)
            self.num_done += 1
            self.read_s += read.result()
            if tell is not None:
                tell(read.result())
        self._ended(block)
