"""Blocks that come to a pager ahead of their use, from another pager's frames or the container.

Part of a pager. They come one at a time, in pieces with pauses, and only into free room: whoever
needs that for a reply takes it away. Knows the fetch in flight. Knows no lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Literal, NamedTuple

from actors.messages.pager import Fetch, Fetched, Frame
from actors.reads import Read, Reads
from jitllm.devices.memory import attach
from jitllm.errors import JitllmError
from jitllm.memory.frames import Frames
from jitllm.memory.residency import Residency
from jitllm.memory.throttle import Abandoned, Throttle
from jitllm.memory.weights import Weights


class _Fetching(NamedTuple):
    """The fetch that is in flight, and that nobody waits for yet."""

    block: int
    throttle: Throttle


class Fetches:
    """See above. reads: of the pager. is_short: whether somebody waits for room."""

    def __init__(
        self,
        weights: Weights,
        residency: Residency,
        frames: Frames,
        reads: Reads,
        is_short: Callable[[], bool],
    ) -> None:
        self._weights = weights
        self._residency = residency
        self._frames = frames
        self._reads = reads
        self._is_short = is_short
        self._turn = asyncio.Lock()
        self._fetching: _Fetching | None = None
        # A thread of its own: what pauses between pieces must not keep page-ins from starting.
        self._executor = ThreadPoolExecutor(1, "jitllm-fetch")

    def check(self, message: Fetch) -> None:
        """Raise `JitllmError` for what cannot be meant."""
        if not 0 < message.share <= 1:
            raise JitllmError(f"a share of {message.share} is not in (0, 1]")
        if (frame := message.source) is None:
            return
        num_bytes = self._residency.block_bytes[message.block]
        stop = frame.offset + frame.num_bytes
        if frame.num_bytes != num_bytes or not 0 <= frame.offset <= stop <= frame.handle.num_bytes:
            raise JitllmError(
                f"no frame of block {message.block}, which takes {num_bytes} bytes: {frame}"
            )

    async def fetch(self, message: Fetch) -> Fetched:
        """One at a time: the shares that they may take of the time do not add up."""
        async with self._turn:
            began_s = perf_counter()
            origin = await self._bring(message)
            has_come = origin in ("frames", "container")
            num_bytes = self._residency.block_bytes[message.block] if has_come else 0
            return Fetched(num_bytes, perf_counter() - began_s, origin)

    def hurry(self, block: int) -> bool:
        """Whether a block is the one that is fetched; it is a read like any other from now on."""
        if self._fetching is None or self._fetching.block != block:
            return False
        self._fetching.throttle.hurry()
        self._fetching = None
        return True

    def in_the_way(self, block: int) -> Read | None:
        """The fetch that takes the room that `block` needs; it is given up, and ends soon."""
        fetching = self._fetching
        if fetching is None or self._frames.fits(self._residency.block_bytes[block]):
            return None
        self.abandon()
        return self._reads.in_flight[fetching.block]

    def abandon(self) -> bool:
        """Give up what is fetched; whether there was anything."""
        if self._fetching is None:
            return False
        self._fetching.throttle.abandon()
        return True

    def abandon_unplaced(self) -> None:
        """Give up what is placed no more."""
        if self._fetching is not None and not self._residency.is_placed(self._fetching.block):
            self.abandon()

    def ended(self, block: int) -> None:
        """The read of a block is over."""
        if self._fetching is not None and self._fetching.block == block:
            self._fetching = None

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown()

    async def _bring(self, message: Fetch) -> Literal["here", "frames", "container", "none"]:
        block = message.block
        if (under_way := self._reads.in_flight.get(block)) is not None:
            await asyncio.wait([under_way])
            under_way.result()
        if not self._residency.is_placed(block):
            return "none"  # not any more
        if self._residency.is_resident(block):
            return "here"
        # Room that somebody waits for is not free.
        if self._is_short() or self._residency.fetch(block) is None:
            return "none"
        throttle = Throttle(message.share)
        work = partial(self._bring_in, block, message.source, throttle)
        read = asyncio.get_running_loop().run_in_executor(self._executor, work)
        self._fetching = _Fetching(block, throttle)
        self._reads.watch(block, read, is_counted=message.source is None)
        await asyncio.wait([read])
        try:
            read.result()
        except Abandoned as given_up:
            if given_up.__cause__ is not None:
                raise given_up.__cause__ from None
            return "none"
        return "container" if message.source is None else "frames"

    def _bring_in(self, block: int, source: Frame | None, throttle: Throttle) -> float:
        """Seconds of work that it took. Runs in the thread of fetches.

        Whatever it fails with, who needs the block for a reply is told that it was `Abandoned`,
        and reads it again.
        """
        pieces = throttle.pieces(self._residency.block_bytes[block])
        try:
            if source is None:
                self._weights.read_block(block, pieces)
            else:
                with attach(source.handle) as address:
                    self._weights.copy_block(block, address + source.offset, pieces)
        except Abandoned:
            raise
        except Exception as error:
            raise Abandoned from error
        return throttle.busy_s
