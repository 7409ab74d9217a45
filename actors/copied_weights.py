"""Weights of a device that has memory of its own: copied there through a pager's frames.

The host's frames are given back at once, and its budget is charged with one block at a time. Knows
the pager and what the device holds. Knows no sequence and no step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

from actors.actor import Ref
from actors.messages import (
    Acquire,
    Brought,
    DeviceMemory,
    Forget,
    Frame,
    Lease,
    Located,
    Place,
    Release,
    Reserve,
    Reserved,
)
from jitllm.devices import memory
from jitllm.devices.memory import Handle
from jitllm.devices.vulkan.arena import Arena
from jitllm.devices.vulkan.runner import VulkanRunner
from jitllm.memory.device_pages import DevicePages
from jitllm.memory.device_weights import DeviceWeights, Load
from jitllm.memory.throttle import Abandoned, Throttle


class CopiedWeights:
    """Weights in a device's own memory, copied there through the frames of a pager.

    dense: the handle of the dense region. has_dense: it stays where it is, for other devices of the
    node. located: where the pager's frames lie. owned: what ends with the device.
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
    ) -> None:
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

    async def begin(self, me: Ref, host_bytes: int) -> None:
        """See `Supply`."""
        self._name = me.name
        await self._pager.ask(Forget(me))
        await self._pager.ask(Place((), dense=False))
        await self._pager.ask(Reserve("scratch", host_bytes, self._name))

    async def acquire(self, start: int, stop: int) -> Lease:
        """See `Supply`: all of it is here and stays."""
        return Lease(-1, start, stop, is_standing=True)

    async def release(self, lease: Lease) -> None:
        """See `Supply`."""

    async def let_go(self) -> None:
        """See `Supply`."""

    def has_all(self, num_blocks: int) -> bool:
        """See `Supply`."""
        return self._weights.has(range(num_blocks))

    async def place(self, held: frozenset[int], wanted: frozenset[int]) -> int:
        """See `Supply`. What was handed over stays until it is dropped: it may come back."""
        gone = self._parts - held
        if gone and self._throttle is not None:
            self._throttle.abandon()
        async with self._turn:
            missing = self._weights.hold(held)
            parts = self._parts - gone if missing else held
            for part in parts ^ self._parts:
                self._runner.moved(part)
            self._parts = parts
        return missing

    async def charge(self, kv_bytes: int) -> Reserved:
        """See `Supply`."""
        arena = self._arena
        room = arena.budget_bytes - (arena.used_bytes - self._pages.num_bytes)
        return Reserved(
            room_bytes=max(room, 0),
            frames=self._weights.num_blocks,
            over_budget_bytes=max(kv_bytes - room, 0),
            spare_bytes=max(room - kv_bytes, 0),
        )

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
                try:
                    async with self._host(loads, has_frame=frame is not None):
                        num_bytes = await self._copy(loads, frame, Throttle(share))
                except Abandoned:  # it is not wanted any more
                    return Brought(0, "none")
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
            await self._pager.ask(Place(tuple(sorted(blocks)), dense=needs_dense))
            yield
        finally:
            await self._pager.ask(Place((), dense=False))

    async def _copy(self, loads: Iterable[Load], frame: int | None, throttle: Throttle) -> int:
        """Copy what is missing, block's bytes from `frame` if given; how many bytes it was."""
        num_bytes, self._throttle = 0, throttle
        try:
            for load in loads:
                async with AsyncExitStack() as leased:
                    if load.block is None:
                        address = self._dense + load.offset
                    elif frame is not None:
                        address = frame
                    else:
                        await leased.enter_async_context(self._leased(load.block))
                        address = self._frames + self._offsets[load.block]
                    await self._runner.load(load.span, address, throttle.pieces)
                self._weights.filled(load)
                num_bytes += load.span.num_bytes
        finally:
            self._throttle = None
        return num_bytes

    @asynccontextmanager
    async def _leased(self, block: int) -> AsyncIterator[None]:
        lease: Lease = await self._pager.ask(Acquire(block, block + 1, self._name))
        try:
            yield
        finally:
            await self._pager.tell(Release(lease))

    def memory(self) -> DeviceMemory:
        """See `Supply`."""
        return DeviceMemory(
            budget_bytes=self._arena.budget_bytes,
            used_bytes=self._arena.used_bytes,
            allocated_bytes=self._arena.allocated_bytes,
            weight_bytes=self._weights.num_bytes,
            blocks=self._weights.num_blocks,
        )
