"""Weights of a device that has memory of its own: copied there through a pager's frames.

The host's frames are given back at once, and its budget is charged with one block at a time. Knows
the pager and what the device holds. Knows no sequence and no step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

from actors.actor import Ref
from actors.messages.device import Brought, DeviceMemory
from actors.messages.pager import (
    Acquire,
    AcquireExperts,
    ExpertLease,
    Forget,
    Frame,
    Lease,
    Located,
    Place,
    Release,
    Reserve,
    Reserved,
    Unreadable,
)
from jitllm.devices import memory
from jitllm.devices.memory import Handle
from jitllm.devices.vulkan.arena import Arena
from jitllm.devices.vulkan.runner import VulkanRunner
from jitllm.memory.device_experts import DeviceExperts
from jitllm.memory.device_pages import DevicePages
from jitllm.memory.device_weights import DeviceWeights, Load
from jitllm.memory.throttle import Abandoned, Throttle
from jitllm.memory.use import Phase

MIN_SPARE_BYTES = 4 << 20
"""Left beside slots for what sequences take before they are charged: page tables, histories."""


class CopiedWeights:
    """Weights in a device's own memory, copied there through the frames of a pager.

    dense: the handle of the dense region. has_dense: it stays where it is, for other devices of the
    node. located: where the pager's frames lie. owned: what ends with the device. host: the pager
    that what it holds counts at, where its memory is the host's. expert_places: where a block's
    experts begin in it, and bytes from one to the next.
    """

    def __init__(
        self,
        pager: Ref,
        located: Located,
        dense: Handle,
        weights: DeviceWeights,
        pages: DevicePages,
        arena: Arena,
        runner: VulkanRunner,
        owned: ExitStack,
        *,
        has_dense: bool,
        host: Ref | None = None,
        expert_places: Mapping[int, tuple[int, int]],
    ) -> None:
        self._expert_places = expert_places
        self._pager = pager
        self._has_dense = has_dense
        self._weights = weights
        self._pages = pages
        self._arena = arena
        self._runner = runner
        self._dense = owned.enter_context(memory.attach(dense))
        self._frames = owned.enter_context(memory.attach(located.blocks))
        self._offsets = located.offsets
        self._name = ""
        self.place_name, self.remedy = arena.name, arena.remedy
        self._turn = asyncio.Lock()
        self._throttle: Throttle | None = None
        self._parts: frozenset[int] = frozenset()
        self._streamed: frozenset[int] = frozenset()
        self._spilled_bytes = 0
        self._host_pager = host
        self._host_bytes = 0
        self._over_host_bytes = 0
        self._coming: asyncio.Task[None] | None = None
        self._phase: Phase | None = None  # of the step that blocks pass through for

    async def begin(self, me: Ref, host_bytes: int) -> None:
        """See `Supply`."""
        self._name = me.name
        await self._pager.ask(Forget(me))
        await self._pager.ask(Place((), dense=False))
        await self._pager.ask(Reserve("scratch", host_bytes, self._name))

    async def acquire(self, start: int, stop: int, phase: Phase) -> Lease:
        """See `Supply`; blocks that stay need none."""
        if not self._weights.slots.blocks:
            return Lease(-1, start, stop, is_standing=True)
        self._phase = phase
        await self._pass_through(start)
        self._bring_next(start, is_busy=True)
        return Lease(-1, start, self._stop_of_run(start, stop))

    async def release(self, lease: Lease) -> None:
        """See `Supply`."""
        if not lease.is_standing:
            self._bring_next(lease.start, is_busy=False)

    async def let_go(self) -> None:
        """See `Supply`."""

    def has_all(self, num_blocks: int) -> bool:
        """See `Supply`."""
        return self._weights.stays(range(num_blocks))

    # --- blocks that pass through ------------------------------------------------------------

    def stream(self, blocks: frozenset[int]) -> bool:
        """See `Supply`."""
        changes, self._streamed = blocks != self._streamed, blocks
        return changes

    async def _pass_through(self, block: int) -> None:
        """Have a block that takes turns where it is computed."""
        await self._quiet()
        slots = self._weights.slots
        if block in slots.blocks and not slots.has(block):
            await self._bring_in(block)

    def _stop_of_run(self, start: int, stop: int) -> int:
        """Up to where blocks are there and stay while those before them are computed."""
        slots = self._weights.slots
        for block in slots.blocks:
            if start < block < stop and (slots.takes_turns(block) or not slots.has(block)):
                return block
        return stop

    def _bring_next(self, block: int, *, is_busy: bool) -> None:
        """Begin to bring who has the next turn, beside what is computed."""
        if self._coming is not None and not self._coming.done():
            return
        if (following := self._weights.slots.next(block, is_busy=is_busy)) is not None:
            self._coming = asyncio.create_task(self._bring_in(following), name=f"next {following}")

    async def _bring_in(self, block: int) -> None:
        """Copy a block into its slot; who moves in the meantime hurries, for replies wait."""
        if self._throttle is not None:
            self._throttle.hurry()
        async with self._turn:
            await self._copy([self._weights.pass_through(block)], None, Throttle(), self._phase)

    async def _quiet(self) -> None:
        """Nobody comes in; if that failed, whoever needs the block tries again, and says so."""
        if (coming := self._coming) is not None:
            await asyncio.wait([coming])
            self._coming = None
            if not coming.cancelled():
                coming.exception()

    def _rearranged(self, *others: int) -> None:
        """Blocks that pass through, and others, lie elsewhere."""
        for block in {*self._weights.slots.blocks, *others}:
            self._runner.moved(block)

    # --- blocks that stay --------------------------------------------------------------------

    async def place(self, held: frozenset[int], wanted: frozenset[int]) -> int:
        """See `Supply`. What was handed over stays until it is dropped: it may come back."""
        gone = self._parts - held
        if gone and self._throttle is not None:
            self._throttle.abandon()
        await self._quiet()
        slots = self._weights.slots
        async with self._turn:
            before = slots.blocks, slots.num_slots
            served = self._weights.experts.blocks
            missing = self._weights.hold(held, self._streamed & held)
            parts = self._parts - gone if missing else held
            for part in parts ^ self._parts:
                self._runner.moved(part)
            self._parts = parts
            if before != (slots.blocks, slots.num_slots):
                self._rearranged(*before[0])
                await self._place(slots.blocks)
            elif served != self._weights.experts.blocks:
                await self._place(slots.blocks)
        await self._charge_host(0)
        return missing

    async def _place(self, blocks: Iterable[int], *, dense: bool = False) -> None:
        """Have the pager serve these, and the experts that come one by one."""
        experts = self._weights.experts.blocks
        await self._pager.ask(Place(tuple(sorted(blocks)), dense=dense, experts=experts))

    async def _charge_host(self, kv_bytes: int) -> int:
        """Where it is the host's memory: what is taken of it, and what keys and values will take;
        by how much that is too much."""
        num_bytes = self._arena.allocated_bytes + max(kv_bytes - self._pages.num_bytes, 0)
        if self._host_pager is not None and num_bytes != self._host_bytes:
            self._host_bytes = num_bytes
            charge = Reserve("memory", num_bytes, self._name)
            reserved: Reserved = await self._host_pager.ask(charge)
            self._over_host_bytes = reserved.over_budget_bytes
        return self._over_host_bytes

    async def charge(self, kv_bytes: int, spilled_bytes: int) -> Reserved:
        """See `Supply`: what is beyond their budget is in memory of the host."""
        slots, experts = self._weights.slots, self._weights.experts
        experts.narrow(kv_bytes - self._room_bytes)
        lacking = kv_bytes - self._room_bytes
        if slots.blocks and (lacking > 0 or not kv_bytes):
            await self._quiet()
            spare_bytes = max(slots.slot_bytes, MIN_SPARE_BYTES)
            if slots.narrow(lacking) if kv_bytes else slots.widen(spare_bytes):
                self._rearranged()
        if experts.blocks and not kv_bytes:
            experts.widen(MIN_SPARE_BYTES)
        room = self._room_bytes
        over_budget_bytes = max(kv_bytes - room, 0) or await self._charge_host(kv_bytes)
        if spilled_bytes != self._spilled_bytes:
            self._spilled_bytes = spilled_bytes
            host: Reserved = await self._pager.ask(Reserve("kv", spilled_bytes, self._name))
            over_budget_bytes += host.over_budget_bytes if spilled_bytes else 0
        return Reserved(
            room_bytes=max(room, 0),
            frames=self._weights.num_blocks,
            over_budget_bytes=over_budget_bytes,
            spare_bytes=max(room - kv_bytes, 0),
        )

    @property
    def _room_bytes(self) -> int:
        """For keys and values, those that are there included."""
        return self._arena.room_bytes + self._pages.num_bytes

    def room_bytes(self) -> int:
        """See `Supply`; slots and frames of experts that are more than enough give way."""
        weights = self._weights
        return self._arena.room_bytes + weights.slots.spare_bytes + weights.experts.spare_bytes

    async def bring(self, block: int, source: Frame | None, share: float) -> Brought:
        """See `Supply`."""
        async with self._turn:
            loads = self._weights.loads(block) if block in self._parts else []
            if not loads:
                return Brought(0, "here" if self._weights.has([block]) else "none")
            with ExitStack() as attached:
                frame = None
                if source is not None:
                    frame = attached.enter_context(memory.attach(source.handle)) + source.offset
                throttle = self._throttle = Throttle(share)
                try:
                    async with self._host(loads, has_frame=frame is not None):
                        num_bytes = await self._copy(loads, frame, throttle)
                except Abandoned:  # it is not wanted any more
                    return Brought(0, "none")
                finally:
                    self._throttle = None
        return Brought(num_bytes, "container" if frame is None else "frames")

    async def complete(self, blocks: Iterable[int]) -> None:
        """See `Supply`."""
        async with self._turn:
            parts = sorted(blocks)
            loads = [load for part in parts for load in self._weights.loads(part)]
            async with self._host(loads, has_frame=False):
                for part in parts:  # which may have tensors in common
                    await self._copy(self._weights.loads(part), None, Throttle())

    @asynccontextmanager
    async def _host(self, loads: Iterable[Load], *, has_frame: bool) -> AsyncIterator[None]:
        """Within it, the pager serves what is about to be copied from its memory."""
        needs_dense = not self._has_dense and any(load.block is None for load in loads)
        blocks = {load.block for load in loads if load.block is not None}
        if has_frame:
            blocks.clear()
        if not blocks and not needs_dense:
            yield
            return
        try:
            blocks |= set(self._weights.slots.blocks)
            await self._place(blocks, dense=needs_dense)
            yield
        finally:
            await self._place(self._weights.slots.blocks)

    async def _copy(
        self,
        loads: Iterable[Load],
        frame: int | None,
        throttle: Throttle,
        phase: Phase | None = None,
    ) -> int:
        """Copy what is missing, block's bytes from `frame` if given; how many bytes it was.

        phase: of the step that waits for it, if one does.
        """
        num_bytes = 0
        for load in loads:
            async with AsyncExitStack() as leased:
                if load.block is None:
                    address = self._dense + load.offset
                elif frame is not None:
                    address = frame
                else:
                    await leased.enter_async_context(self._leased(load.block, phase))
                    address = self._frames + self._offsets[load.block]
                await self._runner.load(load.span, address, throttle.pieces)
            self._weights.filled(load)
            num_bytes += load.span.num_bytes
        return num_bytes

    @asynccontextmanager
    async def _leased(self, block: int, phase: Phase | None) -> AsyncIterator[None]:
        lease: Lease = await self._pager.ask(Acquire(block, block + 1, self._name, phase))
        try:
            yield
        finally:
            await self._pager.tell(Release(lease))

    # --- experts that come one by one --------------------------------------------------------

    @property
    def experts(self) -> DeviceExperts:
        """Their frames."""
        return self._weights.experts

    async def bring_expert(self, lease: ExpertLease, index: int) -> None:
        """Copy one of those that the pager leased to its frame."""
        block, expert, place = lease.block, lease.experts[index], lease.places[index]
        first, stride = self._expert_places[block]
        address = self._frames + self._offsets[block] + first + place * stride
        await self._runner.load(self.experts.span(block, expert), address, Throttle().pieces)

    async def acquire_experts(
        self, block: int, experts: tuple[int, ...], phase: Phase
    ) -> ExpertLease | Unreadable:
        """A lease of some of these experts in the host's memory."""
        return await self._pager.ask(AcquireExperts(block, experts, self._name, phase))

    async def release_experts(self, lease: ExpertLease) -> None:
        """They are copied."""
        await self._pager.tell(Release(lease))

    def memory(self) -> DeviceMemory:
        """See `Supply`."""
        return DeviceMemory(
            budget_bytes=self._arena.budget_bytes,
            used_bytes=self._arena.used_bytes,
            allocated_bytes=self._arena.allocated_bytes,
            weight_bytes=self._weights.num_bytes,
            blocks=self._weights.num_blocks,
            expert_hits=self.experts.residency.num_hits,
        )

    async def close(self) -> None:
        """See `Supply`."""
        if self._coming is not None:
            self._coming.cancel()
        await self._quiet()
