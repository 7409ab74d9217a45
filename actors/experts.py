"""Experts that come one by one: read when a step needs them, and kept while there is room.

Part of a pager. Knows leases and reads in flight. Which expert goes when another comes is
`jitllm.memory.experts`'s to say, where it lies `jitllm.memory.weights`'s.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from actors.actor import Context
from actors.mailbox import Lost
from actors.messages.pager import AcquireExperts, ExpertLease, Unreadable
from jitllm.errors import JitllmError, PageError
from jitllm.memory.expert_frames import ExpertFrames
from jitllm.memory.experts import Admitted, Expert, ExpertResidency
from jitllm.memory.use import ExpertUse, Phase, ReadUse
from jitllm.memory.weights import Weights

Found = ExpertLease | Unreadable

_NUM_READS = 8  # at once; large ones are cut into several reads each


@dataclass(slots=True, eq=False)
class _Holder:
    """A device, and what is kept for it: `wanted` until it is leased, then under `leases`."""

    block: int = -1
    wanted: set[int] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)
    is_gone: bool = False


class ExpertPager:
    """The experts of the blocks that are placed here.

    used: experts that a token needs in a block. context, use: of the pager. reads: those in flight.
    """

    def __init__(
        self,
        weights: Weights,
        used: int,
        context: Context,
        use: ReadUse,
        reads: MutableMapping[Expert, asyncio.Future[float]],
    ) -> None:
        self._weights = weights
        self._residency = ExpertResidency(weights.expert_bytes, 0, used)
        self._context = context
        self._use = use
        self._reads = reads
        self._frames = ExpertFrames(weights.num_experts, weights.release_place)
        self._executor = ThreadPoolExecutor(_NUM_READS, "jitllm-experts")
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._holders: dict[str, _Holder] = {}
        self._leases: dict[int, tuple[ExpertLease, _Holder]] = {}
        self._num_leases = 0
        self._bytes_read = 0
        self._read_s = 0.0
        self._wait_s = 0.0
        self.largest_bytes = 0
        """What the largest expert takes that may be needed here; 0 where there is none."""
        self.all_bytes = 0
        """What all that may be needed here take."""

    def has(self, block: int) -> bool:
        """Whether a block has experts that come one by one."""
        return block in self._residency.expert_bytes

    def serves(self, block: int) -> bool:
        """Whether experts of a block may be needed here."""
        return self._residency.is_placed(block)

    @property
    def use(self) -> ExpertUse:
        """What is held, and what was done so far."""
        residency = self._residency
        return ExpertUse(
            room_bytes=residency.room_bytes,
            all_bytes=self.all_bytes,
            resident=residency.num_resident,
            held_bytes=residency.held_bytes,
            hits=residency.num_hits,
            reads=residency.num_reads,
            bytes_read=self._bytes_read,
            read_s=self._read_s,
            wait_s=self._wait_s,
        )

    def place(self, blocks: Iterable[int]) -> None:
        """Experts of these blocks may be needed here, and no others."""
        sizes, counts = self._residency.expert_bytes, self._weights.num_experts
        placed = sizes.keys() & set(blocks)
        self.largest_bytes = max((sizes[block] for block in placed), default=0)
        self.all_bytes = sum(counts[block] * sizes[block] for block in placed)
        self._give_back(self._residency.place(placed))

    def resize(self, room_bytes: int) -> None:
        """Keep to so many bytes, as far as leases allow."""
        self._give_back(self._residency.resize(room_bytes))

    def forget(self, device: str) -> None:
        """A device begins, perhaps after a death: what it held it holds no more."""
        if (holder := self._holders.pop(device, None)) is None:
            return
        holder.is_gone = True
        for lease_id in tuple(holder.leases):
            self.release(self._leases[lease_id][0])
        self._let_go(holder)

    # ----------------------------------------------------------------------------------- leases

    def acquire(self, message: AcquireExperts) -> ExpertLease | asyncio.Future[Found]:
        """See `AcquireExperts`. Raises `JitllmError` for what cannot be meant."""
        block, experts = message.block, message.experts
        count = self._weights.num_experts.get(block, 0)
        if not experts or not all(0 <= expert < count for expert in experts):
            raise JitllmError(f"no experts {experts} in block {block}, which has {count}")
        holder = self._holders.setdefault(message.device, _Holder())
        if holder.block != block or not holder.wanted <= set(experts):
            self._let_go(holder)  # of a step that failed
        holder.block = block
        found = self._admit(holder, experts)
        if lease := self._grant(holder, found.present):
            return lease
        return self._context.later(self._wait(holder, message), f"experts of {block}")

    async def _wait(self, holder: _Holder, message: AcquireExperts) -> Found:
        """A lease once half of what is on its way has come."""
        began_s = perf_counter()
        try:
            while True:
                found = self._admit(holder, message.experts)
                is_half = 2 * len(found.present) >= len(holder.wanted)
                if is_half and (lease := self._grant(holder, found.present)):
                    return lease
                if unreadable := await self._news(message):
                    self._let_go(holder)
                    return unreadable
                if holder.is_gone:
                    raise Lost(message.device, "it began again, and knows nothing of before")
        except BaseException:
            self._let_go(holder)
            raise
        finally:
            self._wait_s += perf_counter() - began_s

    async def _news(self, message: AcquireExperts) -> Unreadable | None:
        """One of these experts has come, or cannot be read, or there is room."""
        reads = {
            expert: read
            for expert in message.experts
            if (read := self._reads.get(Expert(message.block, expert)))
        }
        if not reads:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
            return None
        await asyncio.wait(reads.values(), return_when=asyncio.FIRST_COMPLETED)
        for expert, read in reads.items():
            if read.done() and isinstance(error := read.exception(), PageError):
                return Unreadable(expert, error)
            if read.done():
                read.result()
        return None

    def _admit(self, holder: _Holder, experts: tuple[int, ...]) -> Admitted:
        found = self._residency.admit(holder.block, experts)
        victims = list(found.evicted)
        for num_left, expert in zip(range(len(found.reads), 0, -1), found.reads, strict=True):
            num = -(-len(victims) // num_left)
            self._use.fault()
            self._begin_read(Expert(holder.block, expert), victims[:num])
            del victims[:num]
        holder.wanted.update(found.present, found.coming, found.reads)
        return found

    def _grant(self, holder: _Holder, experts: tuple[int, ...]) -> ExpertLease | None:
        if not experts:
            return None
        places = tuple(self._frames.place(Expert(holder.block, expert)) for expert in experts)
        lease = ExpertLease(self._num_leases, holder.block, experts, places)
        self._num_leases += 1
        self._leases[lease.lease_id] = lease, holder
        holder.leases.add(lease.lease_id)
        holder.wanted.difference_update(experts)
        return lease

    def release(self, lease: ExpertLease) -> None:
        """See `Release`."""
        granted = self._leases.pop(lease.lease_id, None)
        if granted is None:
            return
        granted[1].leases.remove(lease.lease_id)
        self._unpin(lease.block, lease.experts)

    def _let_go(self, holder: _Holder) -> None:
        """Nothing is kept for it that is not leased."""
        wanted, holder.wanted = holder.wanted, set()
        self._unpin(holder.block, wanted)

    def _unpin(self, block: int, experts: Iterable[int]) -> None:
        if self.has(block):
            self._residency.release(block, experts)
        self.resize(self._residency.room_bytes)
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)

    # ------------------------------------------------------------------------------------ reads

    def _give_back(self, victims: Iterable[Expert]) -> None:
        for victim in victims:
            self._frames.drop(victim)

    def _begin_read(self, expert: Expert, victims: Iterable[Expert]) -> None:
        loop, place = asyncio.get_running_loop(), self._frames.take(expert, victims)
        read = self._reads[expert] = loop.run_in_executor(self._executor, self._read, expert, place)
        read.add_done_callback(partial(self._end_read, expert, self._use.begin()))

    def _read(self, expert: Expert, place: int) -> float:
        """Seconds that it took. Runs in a thread of the executor."""
        began_s = perf_counter()
        self._weights.read_expert(*expert, place)
        return perf_counter() - began_s

    def _end_read(self, expert: Expert, phase: Phase, read: asyncio.Future[float]) -> None:
        del self._reads[expert]
        if read.cancelled() or read.exception() is not None:
            self._use.end(phase, 0)
            self._residency.fail(*expert)
            self._frames.drop(expert)
            return
        num_bytes = self._residency.expert_bytes[expert.block]
        self._use.end(phase, num_bytes)
        self._residency.arrive(*expert)
        self._bytes_read += num_bytes
        self._read_s += read.result()

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown()
