"""The pager: brings blocks of a container into memory, lends them to devices, lets them go.

Knows reads in flight and reservations. Knows no tensor and no device. Which block goes when another
comes is `jitllm.memory.residency`'s to say, where it lies `jitllm.memory.weights`'s, who holds it
`actors.leases`'s.

It serves the blocks that are placed here; their experts come with them, or one by one
(`actors.experts`). A fetch brings one of them in ahead of its use, also from
the frames of another pager; whatever a reply needs comes before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import TypeVar, assert_never

from actors.actor import Actor, Ref
from actors.dense import DenseRegion
from actors.experts import ExpertPager
from actors.fetches import Fetches
from actors.leases import Leases
from actors.messages.pager import (
    Acquire,
    AcquireExperts,
    ExpertLease,
    Fetch,
    Fetched,
    Forget,
    Frame,
    Lease,
    Lend,
    Lent,
    Locate,
    Located,
    PagerMessage,
    PagerStats,
    PagerStatsRequest,
    Place,
    Release,
    Reserve,
    Reserved,
    SetBudget,
)
from actors.reads import Read, Reads
from jitllm.config import ReadAhead
from jitllm.devices.memory import Memory
from jitllm.errors import JitllmError
from jitllm.formats.jlm import Container
from jitllm.memory.division import expert_room
from jitllm.memory.experts import Expert
from jitllm.memory.frames import Frames
from jitllm.memory.read_ahead import Pace
from jitllm.memory.residency import Residency
from jitllm.memory.throttle import Abandoned
from jitllm.memory.use import ReadUse
from jitllm.memory.weights import Weights

R = TypeVar("R")

EXPERTS = "experts"
"""The one that experts are within where they come one by one, taken or not."""

MAX_SPARE_PART = 8
"""One part in so many of the budget may be spent on what is only kept in case it is useful."""

_NUM_PAGE_INS = 4  # at once; each of them has many reads in flight already


class Pager(Actor):
    """One model's weights on this host; the part of them that is placed here.

    is_empty: nothing is until a `Place`; otherwise everything is. experts_used: experts that a
    token needs in a block, where they come one by one; 0 where a block comes with all of its own.
    apart: the blocks where they do, if not all. hosted: those whose experts are the host's to
    serve, wherever they are placed. is_host: this is the host's.
    """

    def __init__(
        self,
        container: Container,
        memory: Memory,
        budget_bytes: int,
        read_ahead: ReadAhead = "auto",
        *,
        direct: bool = True,
        is_empty: bool = False,
        experts_used: int = 0,
        apart: frozenset[int] | None = None,
        hosted: frozenset[int] = frozenset(),
        is_host: bool = False,
    ) -> None:
        self._container = container
        self._experts_used = experts_used
        self._apart = apart
        self._hosted = hosted
        self._is_host = is_host
        self._memory = memory
        self._direct = direct
        self._is_empty = is_empty
        self._choice = read_ahead
        self._reads_ahead = read_ahead == "on"
        self._pace = Pace()

        self._frames = Frames(budget_bytes)
        self._block_reads: dict[int, Read] = {}
        self._expert_reads: dict[Expert, Read] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()

        self._last_start = -1

        self._use = ReadUse()
        self._num_evictions = 0
        self._wait_s = 0.0

    # ------------------------------------------------------------------------------------- life

    async def on_start(self) -> None:
        """Reserve every address and read the dense region, if it is placed here.

        Raises `JitllmError` when there is no address space for the model, `PageError` when its
        dense region cannot be read.
        """
        self._owned = ExitStack()
        everything = range(len(self._container.header.blocks) if self._experts_used else 0)
        self._weights = Weights(
            self._container,
            self._memory,
            direct=self._direct,
            apart=everything if self._apart is None else self._apart,
        )
        self._owned.enter_context(self._weights)
        self._executor = ThreadPoolExecutor(_NUM_PAGE_INS, "jitllm-pager")
        self._owned.enter_context(self._executor)
        placed = () if self._is_empty else None
        self._residency = Residency(self._weights.block_bytes, self._frames, placed)
        self._leases = Leases(self._residency, self._pace, self._settle)
        self._dense = DenseRegion(
            self._weights, self._frames, self._use, self._executor, self._give_way, self._settle
        )
        self._reads = Reads(
            self._weights,
            self._residency,
            self._use,
            self._executor,
            self._block_reads,
            self._end_read,
        )
        self._fetches = Fetches(
            self._weights,
            self._residency,
            self._frames,
            self._reads,
            is_short=lambda: bool(self._waiting),
        )
        self._owned.callback(self._fetches.close)
        self._experts = ExpertPager(
            self._weights, self._experts_used, self.context, self._use, self._expert_reads
        )
        self._owned.callback(self._experts.close)
        self._place_experts(range(self._residency.num_blocks) if placed is None else placed)
        self._divide()
        if self._dense.need(is_needed=not self._is_empty):
            await self._dense.bring()

    async def on_stop(self) -> None:
        """Wait for reads in flight, then give file and memory back."""
        if self._block_reads:
            self._fetches.abandon()
        if reads := (*self._block_reads.values(), *self._expert_reads.values()):
            await asyncio.wait(reads)
        await asyncio.to_thread(self._owned.close)

    # --------------------------------------------------------------------------------- messages

    async def receive(self, message: PagerMessage) -> object:
        """See `actors.messages`."""
        match message:
            case Acquire():
                return self._acquire(message)
            case AcquireExperts():
                self._check_experts_placed(message.block)
                self._use.phase = message.phase or self._use.phase
                return self._experts.acquire(message)
            case Release():
                self._release(message.lease)
                return None
            case Place():
                return self._place(message)
            case Fetch():
                return self._fetch(message)
            case Lend():
                return self._lend(message)
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
        if isinstance(reply, Lent):
            reply = reply.lease
        if isinstance(reply, Lease | ExpertLease):
            self._release(reply)

    def _acquire(self, message: Acquire) -> Lease | asyncio.Future[Lease]:
        start, stop = message.start, message.stop
        if not 0 <= start < stop <= self._residency.num_blocks:
            raise JitllmError(f"no blocks [{start}, {stop}) in {self._residency.num_blocks}")
        self._check_placed(start)
        self._begin_scan(start)
        if message.phase is not None:
            self._use.phase = message.phase
        if self._residency.is_resident(start):
            return self._grant(start, stop, message.device)
        # Who waits for a read must not keep others from releasing.
        return self.context.later(self._fault(message), f"fault {start}")

    async def _fault(self, message: Acquire) -> Lease:
        began_s = perf_counter()
        if message.phase is not None:
            self._use.fault()
        await self._pin(message.start)
        self._wait_s += perf_counter() - began_s
        lease = self._grant(message.start, message.stop, message.device)
        self._residency.unpin(message.start)
        return lease

    def _grant(self, start: int, stop: int, device: str) -> Lease:
        """Lease what is resident of `[start, stop)`; its first block is."""
        residency = self._residency
        stop = residency.run_stop(start, stop)
        residency.use(start, stop)
        # Where everything has room there is nothing to page, and nothing to ask before each step.
        has_all = residency.is_whole and self._frames.fits(0)
        is_whole = has_all and not self._experts_used
        stands = is_whole and residency.is_run(start, stop) and self._leases.knows(device)
        lease = self._leases.grant(start, stop, device, is_standing=stands, is_kept=stands)
        self._look_ahead(residency.next_placed(stop))
        return lease

    def _release(self, lease: Lease | ExpertLease) -> None:
        if isinstance(lease, ExpertLease):
            self._experts.release(lease)
        else:
            self._leases.release(lease)

    def _check_block(self, block: int) -> None:
        if not 0 <= block < self._residency.num_blocks:
            raise JitllmError(f"no block {block} in {self._residency.num_blocks}")

    def _check_placed(self, block: int) -> None:
        self._check_block(block)
        if not self._residency.is_placed(block):
            raise JitllmError(f"block {block} is not placed in {self.context.me.name}")

    def _check_experts_placed(self, block: int) -> None:
        self._check_block(block)
        if not self._experts.serves(block):
            self._check_placed(block)

    def _place_experts(self, blocks: Iterable[int]) -> None:
        """Serve the experts of placed blocks, but for those that the host serves."""
        own = set(blocks) - self._hosted
        self._experts.place(own | self._hosted if self._is_host else own)

    def _place(self, message: Place) -> asyncio.Future[None] | None:
        for block in message.blocks:
            self._check_block(block)
        self._evict(self._residency.place(message.blocks))
        self._place_experts(message.blocks if message.experts is None else message.experts)
        self._fetches.abandon_unplaced()
        self._settle()
        # Nobody waits for these: who places may be who holds them.
        standing = self._leases.standing()
        if kept := [granted for granted in standing if self._is_in_the_way(granted.lease)]:
            self.context.begin(self._leases.recall(kept), "recall")
        if self._dense.need(is_needed=message.dense):
            return self.context.later(self._dense.bring(), "dense region")
        return None

    def _is_in_the_way(self, lease: Lease) -> bool:
        """Whether what is placed wants a standing lease back."""
        placed = map(self._residency.is_placed, range(lease.start, lease.stop))
        return not (self._residency.has_room and all(placed))

    def _lend(self, message: Lend) -> Lent | None:
        block = message.block
        self._check_block(block)
        is_here = self._residency.is_placed(block) and self._residency.is_resident(block)
        if not is_here or self._experts.has(block):
            return None
        lease = self._leases.grant(block, block + 1, message.device, is_kept=True)
        weights = self._weights
        offset, num_bytes = weights.block_offsets[block], weights.block_bytes[block]
        return Lent(lease, Frame(weights.blocks_handle, offset, num_bytes))

    def _weights_located(self) -> Located:
        weights = self._weights
        return Located(weights.dense_handle, weights.blocks_handle, weights.block_offsets)

    def _forget(self, ref: Ref) -> None:
        device = ref.name
        self._leases.begin(ref)
        self._experts.forget(device)
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
        must_recall = self._leases.standing() and not self._residency.has_room
        if not must_recall and (self._frames.fits(0) or not self._block_reads):
            return reply()
        return self.context.later(self._reply_later(reply), "give way")

    async def _reply_later(self, reply: Callable[[], R]) -> R:
        await self._give_way()
        return reply()

    async def _give_way(self) -> None:
        """Keep to the budget, as far as leases allow.

        No lease stands where not everything that is placed has room, even if all that is there
        does: the next block would find none.
        """
        self._settle()
        kept = [] if self._residency.has_room else self._leases.standing()
        await self._leases.recall(kept)
        while self._leases.has_any(kept):
            await self._changed()
        if self._block_reads and not self._frames.fits(0):
            await asyncio.wait(tuple(self._block_reads.values()))
        self._settle()

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
            placed=self._residency.num_placed,
            placed_bytes=self._residency.placed_bytes,
            resident=self._residency.num_resident,
            frames=self._residency.num_frames,
            page_ins=self._reads.num_done,
            evictions=self._num_evictions,
            bytes_read=self._weights.reader.bytes_read,
            budget_bytes=self._frames.budget_bytes,
            fixed_bytes=self._frames.fixed_bytes - self._frames.reservations.get(EXPERTS, 0),
            over_budget_bytes=self._residency.over_budget_bytes,
            spare_bytes=self._spare_bytes,
            read_s=self._reads.read_s,
            wait_s=self._wait_s,
            reads_ahead=self._reads_ahead,
            is_direct=self._weights.reader.is_direct,
            experts=self._experts.use if self._experts_used else None,
            phases=self._use.phases,
        )

    # ----------------------------------------------------------------------------------- paging

    async def _pin(self, block: int) -> None:
        """Pin `block`, resident; raises `PageError` when it cannot be read."""
        while True:
            self._check_placed(block)
            if self._residency.is_resident(block):
                self._residency.pin(block)
                return
            is_fetched = self._fetches.hurry(block)
            if not is_fetched and (fetch := self._fetches.in_the_way(block)) is not None:
                await asyncio.wait([fetch])
                continue
            read = self._block_reads.get(block)
            if read is None:
                read = self._begin_read(block, self._residency.admit(block))
            if read is None:
                await self._changed()
                continue
            # The pin is taken now: between the end of the read and our turn others may evict.
            self._residency.pin(block)
            try:
                # Not `await read`: our being cancelled would end it for all, and if it is done
                # we would be ahead of its end here.
                await asyncio.wait([read])
                read.result()
                self._check_placed(block)
                return
            except BaseException as error:
                self._residency.unpin(block)
                self._settle()
                if not isinstance(error, Abandoned):
                    raise

    def _look_ahead(self, block: int) -> None:
        """Begin to read `block` while its predecessor is computed, if a frame can be lent."""
        if not self._reads_ahead or self._waiting or not self._residency.is_absent(block):
            return
        if self._fetches.in_the_way(block) is None:
            self._begin_read(block, self._residency.lend(block))

    def _begin_read(self, block: int, victims: tuple[int, ...] | None) -> Read | None:
        """The read of a block that was given a frame; None when it was not."""
        if victims is None:
            return None
        self._evict(victims, heir=block)
        return self._reads.begin(block, self._pace.read)

    def _end_read(self, block: int) -> None:
        self._fetches.ended(block)
        self._settle()

    def _evict(self, victims: tuple[int, ...], heir: int | None = None) -> None:
        """heir: the block that is read in their place; it has the pages of the first of them, which
        most often is the only one, and of the same size."""
        for block in victims:
            if heir is None:
                self._weights.release(block)
            else:
                self._weights.hand_over(block, heir)
                heir = None
        self._num_evictions += len(victims)

    def _settle(self) -> None:
        """Something was let go or has come: keep to the budget, and let those who wait try."""
        self._divide()
        if self._frames.fits(0) or not self._fetches.abandon():  # which ends soon: then again
            self._evict(self._residency.trim())
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)

    def _divide(self) -> None:
        """Give experts what blocks leave of the budget."""
        frames, experts = self._frames, self._experts
        if not experts.largest_bytes:
            frames.reserve(EXPERTS, 0)
            experts.resize(0)
            return
        others = frames.fixed_bytes - frames.reservations.get(EXPERTS, 0)
        room_bytes = expert_room(
            max(frames.budget_bytes - others, 0),
            self._residency.placed_bytes,
            experts.largest_bytes,
            self._experts_used,
            experts.all_bytes,
        )
        frames.reserve(EXPERTS, room_bytes)
        experts.resize(room_bytes)

    async def _changed(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    # ---------------------------------------------------------------------------------- fetches

    def _fetch(self, message: Fetch) -> asyncio.Future[Fetched]:
        self._check_placed(message.block)
        if self._experts.has(message.block):  # no frame is without the experts
            message = replace(message, source=None)
        self._fetches.check(message)
        return self.context.later(self._fetches.fetch(message), f"fetch {message.block}")

    # ------------------------------------------------------------------------------- read ahead

    def _begin_scan(self, start: int) -> None:
        """The scan may have come round: time to choose whether to read ahead."""
        if start <= self._last_start and self._choice == "auto":
            decision = self._pace.decide(self._residency.num_placed, self._residency.num_frames)
            if decision is not None:
                self._reads_ahead = decision
        self._last_start = start


def _reservation(device: str, name: str) -> str:
    """Under which name a device is charged; never the dense region's."""
    return f"{device}: {name}"
