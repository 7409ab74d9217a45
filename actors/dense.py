"""The dense region of a pager: charged and read while it is needed here, given back when not.

Part of a pager. Knows bytes and a reservation. Knows no block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from jitllm.memory.frames import Frames
from jitllm.memory.use import ReadUse
from jitllm.memory.weights import Weights

DENSE = "dense"
"""The reservation under which it is charged."""


class DenseRegion:
    """See above. give_way: has blocks give way to what was reserved. settle: something was given
    back."""

    def __init__(
        self,
        weights: Weights,
        frames: Frames,
        use: ReadUse,
        executor: Executor,
        give_way: Callable[[], Awaitable[None]],
        settle: Callable[[], None],
    ) -> None:
        self._weights = weights
        self._frames = frames
        self._use = use
        self._executor = executor
        self._give_way = give_way
        self._settle = settle
        self._is_needed = False
        self._is_here = False
        self._turn = asyncio.Lock()

    def need(self, *, is_needed: bool | None) -> bool:
        """Whether it has to be brought; what is not needed goes. None: as before."""
        if is_needed is not None:
            self._is_needed = is_needed
        if self._is_here and not self._is_needed:
            self._drop()
        return self._is_needed and not self._is_here

    async def bring(self) -> None:
        """Charge and read it, unless it is there or not needed any more. Raises `PageError`."""
        async with self._turn:
            if self._is_here or not self._is_needed:
                return
            self._frames.reserve(DENSE, self._weights.dense_bytes)
            try:
                await self._give_way()
                await self._read()
                self._is_here = True
            except Exception:
                self._drop()
                raise
            if not self._is_needed:
                self._drop()

    async def _read(self) -> None:
        phase, num_bytes = self._use.begin(), 0
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._executor, self._weights.read_dense)
            num_bytes = self._weights.dense_bytes
        finally:
            self._use.end(phase, num_bytes)

    def _drop(self) -> None:
        self._is_here = False
        self._weights.release_dense()
        self._frames.reserve(DENSE, 0)
        self._settle()
