"""The pager: brings blocks of a container into memory, lends them to devices, lets them go.

Knows leases, reads in flight and reservations. Knows no tensor and no device. Which block goes when
another comes is `jitllm.memory.residency`'s to say, where it lies `jitllm.memory.weights`'s.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeVar, assert_never

from actors.actor import Actor, Ref
from actors.mailbox import Stopped
from actors.messages import (
    Acquire,
    Forget,
    Lease,
    Locate,
    Located,
    PagerMessage,
    PagerStats,
    PagerStatsRequest,
    Recall,
    Release,
    Reserve,
    Reserved,
    SetBudget,
)
from jitllm.config import ReadAhead
from jitllm.devices.memory import Memory
from jitllm.errors import JitllmError
from jitllm.formats.jlm import Container
from jitllm.memory.frames import Frames
from jitllm.memory.read_ahead import Pace
from jitllm.memory.residency import Residency
from jitllm.memory.weights import Weights

R = TypeVar("R")

DENSE = "dense"
"""The reservation under which the dense region is charged."""

MAX_SPARE_PART = 8
"""One part in so many of the budget may be spent on what is only kept in case it is useful."""

_NUM_PAGE_INS = 4  # at once; each of them has many reads in flight already


class _Granted(NamedTuple):
    lease: Lease
    device: str
    since_s: float


class Pager(Actor):
    """One model's weights on this host."""

    def __init__(
        self,
        container: Container,
        memory: Memory,
        budget_bytes: int,
        read_ahead: ReadAhead = "auto",
        *,
        direct: bool = True,
    ) -> None:
        self._container = container
        self._memory = memory
        self._direct = direct
        self._choice = read_ahead
        self._reads_ahead = read_ahead == "on"
        self._pace = Pace()

        self._frames = Frames(budget_bytes)
        self._reads: dict[int, asyncio.Future[float]] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()

        self._leases: dict[int, _Granted] = {}
        self._devices: dict[str, Ref] = {}
        self._num_leases = 0
        self._last_start = -1

        self._num_page_ins = 0
        self._num_evictions = 0
        self._read_s = 0.0
        self._wait_s = 0.0

    # ------------------------------------------------------------------------------------- life

    async def on_start(self) -> None:
        """Reserve every address and read the dense region.

        Raises `JitllmError` when there is no address space for the model, `PageError` when its
        dense region cannot be read.
        """
        self._owned = ExitStack()
        self._weights = Weights(self._container, self._memory, direct=self._direct)
        self._owned.enter_context(self._weights)
        self._executor = ThreadPoolExecutor(_NUM_PAGE_INS, "jitllm-pager")
        self._owned.enter_context(self._executor)
        self._frames.reserve(DENSE, self._weights.dense_bytes)
        self._residency = Residency(self._weights.block_bytes, self._frames)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._weights.read_dense)

    async def on_stop(self) -> None:
        """Wait for reads in flight, then give file and memory back."""
        if self._reads:
            await asyncio.wait(tuple(self._reads.values()))
        await asyncio.to_thread(self._owned.close)

    # --------------------------------------------------------------------------------- messages

    async def receive(self, message: PagerMessage) -> object:
        """See `actors.messages`."""
        match message:
            case Acquire():
                return self._acquire(message)
            case Release():
                self._release(message.lease)
                return None
            case Locate():
                return self._weights_located()
            case Reserve():
                return self._reserve(message.device, message.name, message.num_bytes)
            case Forget():
                self._forget(message.device)
                return None
            case SetBudget():
                return self._set_budget(message.num_bytes)
            case PagerStatsRequest():
                return self._statistics()
            case _:
                assert_never(message)

    def on_lost(self, message: PagerMessage, reply: object) -> None:
        """A device that was cancelled while it waited holds no lease."""
        if isinstance(reply, Lease):
            self._release(reply)

    def _acquire(self, message: Acquire) -> Lease | asyncio.Future[Lease]:
        start, stop = message.start, message.stop
        if not 0 <= start < stop <= self._residency.num_blocks:
            raise JitllmError(f"no blocks [{start}, {stop}) in {self._residency.num_blocks}")
        self._begin_scan(start)
        if self._residency.is_resident(start):
            return self._grant(start, stop, message.device)
        # Who waits for a read must not keep others from releasing.
        return self.context.later(self._fault(message), f"fault {start}")

    async def _fault(self, message: Acquire) -> Lease:
        began_s = perf_counter()
        await self._pin(message.start)
        self._wait_s += perf_counter() - began_s
        lease = self._grant(message.start, message.stop, message.device)
        self._residency.unpin(message.start)
        return lease

    def _grant(self, start: int, stop: int, device: str) -> Lease:
        """Lease what is resident of `[start, stop)`; its first block is."""
        stop = self._residency.run_stop(start, stop)
        self._residency.pin(start, stop)
        self._residency.use(start, stop)
        # Where everything has room there is nothing to page, and nothing to ask before each step.
        is_whole = stop - start == self._residency.num_blocks
        is_standing = is_whole and device in self._devices and self._frames.fits(0)
        lease = Lease(self._num_leases, start, stop, is_standing)
        self._num_leases += 1
        self._leases[lease.lease_id] = _Granted(lease, device, perf_counter())
        self._look_ahead(stop % self._residency.num_blocks)
        return lease

    def _release(self, lease: Lease) -> None:
        granted = self._leases.pop(lease.lease_id, None)
        if granted is None:
            return
        lease = granted.lease
        self._residency.unpin(lease.start, lease.stop)
        if not lease.is_standing:
            self._pace.computed(lease.stop - lease.start, perf_counter() - granted.since_s)
        self._settle()

    def _weights_located(self) -> Located:
        weights = self._weights
        return Located(weights.dense_handle, weights.blocks_handle, weights.block_offsets)

    def _forget(self, ref: Ref) -> None:
        device = ref.name
        self._devices[device] = ref
        held = [granted.lease for granted in self._leases.values() if granted.device == device]
        for lease in held:
            self._release(lease)
        for name in tuple(self._frames.reservations):
            if name.startswith(_reservation(device, "")):
                self._frames.reserve(name, 0)
        self._settle()

    def _reserve(
        self, device: str, name: str, num_bytes: int
    ) -> Reserved | asyncio.Future[Reserved]:
        if num_bytes < 0:
            raise JitllmError(f"{name} cannot reserve {num_bytes} bytes")
        self._frames.reserve(_reservation(device, name), num_bytes)
        return self._once_given_way(self._reserved)

    def _set_budget(self, num_bytes: int) -> PagerStats | asyncio.Future[PagerStats]:
        if num_bytes < 0:
            raise JitllmError(f"a budget of {num_bytes} bytes is no budget")
        self._frames.budget_bytes = num_bytes
        return self._once_given_way(self._statistics)

    def _once_given_way(self, reply: Callable[[], R]) -> R | asyncio.Future[R]:
        """`reply()` once the budget is kept, as far as leases allow."""
        self._settle()
        kept = [granted for granted in self._leases.values() if granted.lease.is_standing]
        if self._frames.fits(0) or not (self._reads or kept):
            return reply()
        return self.context.later(self._give_way(kept, reply), "give way")

    async def _give_way(self, kept: Sequence[_Granted], reply: Callable[[], R]) -> R:
        for granted in kept:
            try:
                await self._devices[granted.device].tell(Recall())
            except Stopped:
                self._release(granted.lease)
        while any(granted.lease.lease_id in self._leases for granted in kept):
            await self._changed()
        if self._reads:
            await asyncio.wait(tuple(self._reads.values()))
        self._settle()
        return reply()

    def _reserved(self) -> Reserved:
        return Reserved(
            room_bytes=self._frames.room_bytes,
            frames=self._residency.num_frames,
            over_budget_bytes=self._residency.over_budget_bytes,
            spare_bytes=self._spare_bytes,
        )

    @property
    def _spare_bytes(self) -> int:
        return min(self._residency.spare_bytes, self._frames.budget_bytes // MAX_SPARE_PART)

    def _statistics(self) -> PagerStats:
        return PagerStats(
            blocks=self._residency.num_blocks,
            resident=self._residency.num_resident,
            frames=self._residency.num_frames,
            page_ins=self._num_page_ins,
            evictions=self._num_evictions,
            bytes_read=self._weights.reader.bytes_read,
            budget_bytes=self._frames.budget_bytes,
            fixed_bytes=self._frames.fixed_bytes,
            over_budget_bytes=self._residency.over_budget_bytes,
            spare_bytes=self._spare_bytes,
            read_s=self._read_s,
            wait_s=self._wait_s,
            reads_ahead=self._reads_ahead,
            is_direct=self._weights.reader.is_direct,
        )

    # ----------------------------------------------------------------------------------- paging

    async def _pin(self, block: int) -> None:
        """Pin `block`, resident; raises `PageError` when it cannot be read."""
        while True:
            if self._residency.is_resident(block):
                self._residency.pin(block)
                return
            read = self._reads.get(block) or self._begin_read(block, self._residency.admit(block))
            if read is None:
                await self._changed()
                continue
            # The pin is taken now: between the end of the read and our turn others may evict.
            self._residency.pin(block)
            try:
                # Not `await read`: our being cancelled would end it for all, and if it is done
                # we would be ahead of `_end_read`.
                await asyncio.wait([read])
                read.result()
                return
            except BaseException:
                self._residency.unpin(block)
                self._settle()
                raise

    def _look_ahead(self, block: int) -> None:
        """Begin to read `block` while its predecessor is computed, if a frame can be lent."""
        if self._reads_ahead and self._residency.is_absent(block) and not self._waiting:
            self._begin_read(block, self._residency.lend(block))

    def _begin_read(
        self, block: int, victims: tuple[int, ...] | None
    ) -> asyncio.Future[float] | None:
        """The read of a block that was given a frame; None when it was not."""
        if victims is None:
            return None
        self._evict(victims)
        loop = asyncio.get_running_loop()
        read = loop.run_in_executor(self._executor, self._page_in, block)
        self._reads[block] = read
        read.add_done_callback(partial(self._end_read, block))
        return read

    def _page_in(self, block: int) -> float:
        """Seconds it took to read `block`. Runs in a thread of the executor."""
        began_s = perf_counter()
        self._weights.read_block(block)
        return perf_counter() - began_s

    def _end_read(self, block: int, read: asyncio.Future[float]) -> None:
        del self._reads[block]
        if read.cancelled() or read.exception() is not None:
            self._residency.fail(block)
        else:
            self._residency.arrive(block)
            self._num_page_ins += 1
            self._read_s += read.result()
            self._pace.read(read.result())
        self._settle()

    def _evict(self, victims: tuple[int, ...]) -> None:
        for block in victims:
            self._weights.release(block)
        self._num_evictions += len(victims)

    def _settle(self) -> None:
        """Something was let go or has come: keep to the budget, and let those who wait try."""
        self._evict(self._residency.trim())
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)

    async def _changed(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _begin_scan(self, start: int) -> None:
        """The scan may have come round: time to choose whether to read ahead."""
        if start <= self._last_start and self._choice == "auto":
            decision = self._pace.decide(self._residency.num_blocks, self._residency.num_frames)
            if decision is not None:
                self._reads_ahead = decision
        self._last_start = start


def _reservation(device: str, name: str) -> str:
    """Under which name a device is charged; never the dense region's."""
    return f"{device}: {name}"
