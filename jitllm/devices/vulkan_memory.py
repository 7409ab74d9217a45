"""One device's memory: an arena cut into spans, and the way of bytes to and from it.

The arena takes memory from the driver in chunks and lends spans of them, named by addresses that
kernels use as they are. Its ledger counts what the driver really took. Staging is host memory that
the device copies from and to. Knows no blocks and no pages.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jitllm.devices.vk import VulkanError
from jitllm.devices.vulkan import Device, Moment, Queue

CHUNK_BYTES = 64 << 20
"""Taken from the driver at once, for the spans that are smaller."""

ALIGN = 256
"""Spans begin at multiples of it: 16-byte loads need 16, copies on some devices like 256."""

STAGE_BYTES = 8 << 20
"""Of each half of the staging buffer: while one is copied by the device, the other is filled."""


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """`num_bytes` at the device address `address`; `offset` of it in its chunk."""

    address: int
    num_bytes: int
    chunk: _Chunk
    offset: int


class _Chunk:
    """One buffer with its memory, and the pieces of it that nobody has."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self.buffer, self._memory, self.allocated_bytes = allocate(
            device, num_bytes, device.api.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT
        )
        vulkan = device.api
        info = vulkan.struct("VkBufferDeviceAddressInfo", buffer=self.buffer)
        # Not through `make`: this function returns its value.
        self.address = int(vulkan.call("vkGetBufferDeviceAddress", device.handle, info))
        self.num_bytes = num_bytes
        self.free = [(0, num_bytes)]

    def take(self, num_bytes: int) -> int | None:
        """Offset of a piece, the first that is large enough."""
        for i, (start, stop) in enumerate(self.free):
            if stop - start >= num_bytes:
                self.free[i : i + 1] = (
                    [(start + num_bytes, stop)] if stop - start > num_bytes else []
                )
                return start
        return None

    def give(self, start: int, stop: int) -> None:
        """A piece is free again."""
        insort(self.free, (start, stop))
        joined: list[tuple[int, int]] = []
        for piece in self.free:
            if joined and joined[-1][1] == piece[0]:
                joined[-1] = (joined[-1][0], piece[1])
            else:
                joined.append(piece)
        self.free = joined

    @property
    def is_empty(self) -> bool:
        """Nobody has a piece of it."""
        return self.free == [(0, self.num_bytes)]

    def close(self) -> None:
        """Give it back to the driver."""
        self._device.destroy("vkDestroyBuffer", self.buffer)
        self._device.destroy("vkFreeMemory", self._memory)


def allocate(device: Device, num_bytes: int, wanted: int, liked: int = 0) -> tuple[Any, Any, int]:
    """A buffer, its memory with the `wanted` properties (and those `liked`, if some has them), and
    the bytes that the driver takes for it."""
    vulkan = device.api
    usage = (
        vulkan.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
        | vulkan.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
        | vulkan.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        | vulkan.VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT
    )
    shared = len(device.families) > 1
    buffer = device.make(
        "vkCreateBuffer",
        "VkBufferCreateInfo",
        size=num_bytes,
        usage=usage,
        sharingMode=int(shared and vulkan.VK_SHARING_MODE_CONCURRENT),
        queueFamilyIndexCount=len(device.families) if shared else 0,
        pQueueFamilyIndices=list(device.families) if shared else [],
    )
    try:
        needs = vulkan.ffi.new("VkMemoryRequirements*")
        vulkan.call("vkGetBufferMemoryRequirements", device.handle, buffer, needs)
        flags = vulkan.struct(
            "VkMemoryAllocateFlagsInfo", flags=vulkan.VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT
        )
        info = vulkan.struct(
            "VkMemoryAllocateInfo",
            pNext=flags,
            allocationSize=needs.size,
            memoryTypeIndex=_memory_type(device, int(needs.memoryTypeBits), wanted, liked),
        )
        null = vulkan.ffi.NULL
        memory = vulkan.make("vkAllocateMemory", "VkDeviceMemory", device.handle, info, null)
    except BaseException:
        device.destroy("vkDestroyBuffer", buffer)
        raise
    vulkan.call("vkBindBufferMemory", device.handle, buffer, memory, 0)
    return buffer, memory, int(needs.size)


def _memory_type(device: Device, allowed: int, wanted: int, liked: int) -> int:
    """The memory type with the wanted properties that has most of the liked ones, in the largest
    heap: the host often sees a small window of a device's memory as a heap of its own."""
    found = device.api.ffi.new("VkPhysicalDeviceMemoryProperties*")
    device.api.call("vkGetPhysicalDeviceMemoryProperties", device.physical_handle, found)
    types = [found.memoryTypes[i] for i in range(found.memoryTypeCount)]
    flags = [int(one.propertyFlags) for one in types]
    heap_bytes = [int(found.memoryHeaps[one.heapIndex].size) for one in types]
    fit = [i for i, f in enumerate(flags) if allowed >> i & 1 and f & wanted == wanted]
    if not fit:
        raise VulkanError("vkAllocateMemory", "VK_ERROR_OUT_OF_DEVICE_MEMORY")
    return max(fit, key=lambda i: ((flags[i] & liked).bit_count(), heap_bytes[i], -i))


class Arena:
    """Spans of a device's memory, at most `budget_bytes` of it by the driver's count."""

    def __init__(self, device: Device, budget_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self._chunk_bytes = min(chunk_bytes, device.physical.max_allocation_bytes)
        self._chunks: list[_Chunk] = []
        self.used_bytes = 0

    @property
    def allocated_bytes(self) -> int:
        """What the driver took for it, its rounding included."""
        return sum(chunk.allocated_bytes for chunk in self._chunks)

    def take(self, num_bytes: int) -> DeviceSpan | None:
        """A span, or None where the budget or the device has no room. Its bytes are anything.

        A span is one address range, so none is larger than the device's largest allocation.
        """
        size = max(-(-num_bytes // ALIGN) * ALIGN, ALIGN)
        for chunk in self._chunks:
            if (offset := chunk.take(size)) is not None:
                break
        else:
            if (new := self._grow(size)) is None:
                return None
            chunk, offset = new, new.take(size) or 0
        self.used_bytes += size
        return DeviceSpan(chunk.address + offset, num_bytes, chunk, offset)

    def _grow(self, size: int) -> _Chunk | None:
        """A chunk with room for `size` bytes: a whole one, else one of just that size."""
        for num_bytes in dict.fromkeys((max(size, self._chunk_bytes), size)):
            if num_bytes > self.device.physical.max_allocation_bytes:
                continue
            if self.allocated_bytes + num_bytes > self.budget_bytes:
                continue
            try:
                chunk = _Chunk(self.device, num_bytes)
            except VulkanError as error:
                if not error.is_out_of_memory:
                    raise
                continue
            if self.allocated_bytes + chunk.allocated_bytes <= self.budget_bytes:
                self._chunks.append(chunk)
                return chunk
            chunk.close()
        return None

    def give(self, span: DeviceSpan) -> None:
        """A span comes back; nothing on the device may be using it. Empty chunks go at once."""
        size = max(-(-span.num_bytes // ALIGN) * ALIGN, ALIGN)
        span.chunk.give(span.offset, span.offset + size)
        self.used_bytes -= size
        if span.chunk.is_empty:
            self._chunks.remove(span.chunk)
            span.chunk.close()

    def check(self) -> None:
        """The ledger is what the spans and holes say."""
        free = sum(stop - start for chunk in self._chunks for start, stop in chunk.free)
        held = sum(chunk.num_bytes for chunk in self._chunks)
        assert held - free == self.used_bytes, (held, free, self.used_bytes)

    def close(self) -> None:
        """Give everything back; no span may be used any more."""
        for chunk in self._chunks:
            chunk.close()
        self._chunks.clear()
        self.used_bytes = 0


class Staging:
    """Host memory that the device sees, in two halves: one is filled while the other is copied.

    queue: where copies are submitted; those of the compute queue are in order with kernels, those
    of the other run beside them. The bytes belong to the host; `allocated_bytes` says how many.
    """

    def __init__(
        self, device: Device, half_bytes: int = STAGE_BYTES, queue: Queue | None = None
    ) -> None:
        self._device = device
        self._queue = queue or device.compute
        self._half_bytes = half_bytes
        vulkan = device.api
        visible = (
            vulkan.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | vulkan.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
        )
        cached = vulkan.VK_MEMORY_PROPERTY_HOST_CACHED_BIT
        self._buffer, self._memory, self.allocated_bytes = allocate(
            device, 2 * half_bytes, visible, cached
        )
        pointer = vulkan.make(
            "vkMapMemory", "void*", device.handle, self._memory, 0, 2 * half_bytes, 0
        )
        self._bytes = memoryview(vulkan.ffi.buffer(pointer, 2 * half_bytes))
        self._half = 0
        self._busy: list[tuple[Moment, Any] | None] = [None, None]

    def upload(
        self,
        pairs: Iterable[tuple[DeviceSpan, memoryview | bytes]],
        after: Iterable[Moment] = (),
    ) -> Moment:
        """Copy bytes to the beginnings of spans; returns when they are there, as a moment.

        Comes back once everything is in staging: the host bytes may change at once. after: what
        may still use the spans, on another queue.
        """
        waits = tuple(after)
        for span, data in pairs:
            view = memoryview(data).cast("B")
            for start in range(0, len(view), self._half_bytes):
                part = view[start : start + self._half_bytes]
                half, base = self._next_half()
                self._bytes[base : base + len(part)] = part
                target = (span.chunk.buffer, span.offset + start)
                self._copy(half, (self._buffer, base), target, len(part), waits)
        return self._queue.last

    def download(
        self,
        span: DeviceSpan,
        into: memoryview,
        offset: int = 0,
        after: Iterable[Moment] = (),
    ) -> None:
        """Copy `len(into)` bytes from `offset` of a span; waits for them."""
        view, waits = into.cast("B"), tuple(after)
        for start in range(0, len(view), self._half_bytes):
            part = view[start : start + self._half_bytes]
            half, base = self._next_half()
            source = (span.chunk.buffer, span.offset + offset + start)
            self._copy(half, source, (self._buffer, base), len(part), waits)
            self._settle(half)
            part[:] = self._bytes[base : base + len(part)]

    def clear(self, span: DeviceSpan) -> Moment:
        """Zeros for a whole span, rounded up to its alignment."""
        vulkan, queue = self._device.api, self._queue
        size = -(-span.num_bytes // ALIGN) * ALIGN
        half, _ = self._next_half()
        with queue.recording(once=True) as commands:
            self._device.barrier(commands)
            vulkan.call("vkCmdFillBuffer", commands, span.chunk.buffer, span.offset, size, 0)
            self._device.barrier(commands)
        moment = queue.submit(commands)
        self._busy[half] = moment, commands
        return moment

    def _next_half(self) -> tuple[int, int]:
        """The half that is used next, free, and where it begins."""
        half, self._half = self._half, self._half ^ 1
        self._settle(half)
        return half, half * self._half_bytes

    def _copy(
        self,
        half: int,
        source: tuple[Any, int],
        target: tuple[Any, int],
        num_bytes: int,
        after: tuple[Moment, ...],
    ) -> None:
        vulkan, queue = self._device.api, self._queue
        region = vulkan.struct(
            "VkBufferCopy", srcOffset=source[1], dstOffset=target[1], size=num_bytes
        )
        with queue.recording(once=True) as commands:
            self._device.barrier(commands)
            vulkan.call("vkCmdCopyBuffer", commands, source[0], target[0], 1, region)
            self._device.barrier(commands)
        self._busy[half] = queue.submit(commands, after=after), commands

    def _settle(self, half: int) -> None:
        """Wait until the device is done with a half."""
        if (busy := self._busy[half]) is not None:
            moment, commands = busy
            self._queue.wait(moment)
            self._queue.free(commands)
            self._busy[half] = None

    def close(self) -> None:
        """Give the memory back."""
        for half in (0, 1):
            self._settle(half)
        self._bytes.release()
        self._device.api.call("vkUnmapMemory", self._device.handle, self._memory)
        self._device.destroy("vkDestroyBuffer", self._buffer)
        self._device.destroy("vkFreeMemory", self._memory)
