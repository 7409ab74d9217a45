"""Memory that one device computes on: an arena cut into spans.

The arena takes memory from the driver in chunks and lends spans of them, named by addresses that
kernels use as they are. Its ledger counts what the driver really took. Knows no blocks, no pages.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import Any

from jitllm.devices.grammar import more_memory
from jitllm.devices.vulkan.api import VulkanError
from jitllm.devices.vulkan.device import Device
from jitllm.errors import JitllmError
from jitllm.units import format_size

CHUNK_BYTES = 64 << 20
"""Taken from the driver at once, for the spans that are smaller."""

ALIGN = 256
"""Spans begin at multiples of it: 16-byte loads need 16, copies on some devices like 256."""


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """`num_bytes` at the device address `address`; `offset` of it in its chunk."""

    address: int
    num_bytes: int
    chunk: _Chunk
    offset: int

    def part(self, start: int, num_bytes: int) -> DeviceSpan:
        """Some bytes of it, as a span that is not to be given back."""
        return DeviceSpan(self.address + start, num_bytes, self.chunk, self.offset + start)


class _Chunk:
    """One buffer with its memory, and the pieces of it that nobody has."""

    def __init__(self, device: Device, num_bytes: int, *, is_host: bool) -> None:
        self._device = device
        vulkan = device.api
        wanted, liked = vulkan.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, 0
        if is_host:
            wanted, liked = host_properties(device)
        self.buffer, self._memory, self.allocated_bytes = allocate(device, num_bytes, wanted, liked)
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


def host_properties(device: Device) -> tuple[int, int]:
    """What memory of the host that the device sees has to have, and what it should have."""
    vulkan = device.api
    visible = vulkan.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT
    coherent = vulkan.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
    return visible | coherent, vulkan.VK_MEMORY_PROPERTY_HOST_CACHED_BIT


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
    """Spans of a device's memory, at most `budget_bytes` of it by the driver's count.

    name: what people call the device; by default the driver's name. is_host: it is memory of the
    host that the device sees.
    """

    def __init__(
        self,
        device: Device,
        budget_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        name: str = "",
        *,
        is_host: bool = False,
    ) -> None:
        self.name = name or device.physical.name
        self.device = device
        self.budget_bytes = budget_bytes
        self._is_host = is_host
        self._chunk_bytes = min(chunk_bytes, device.physical.max_allocation_bytes)
        self._chunks: list[_Chunk] = []
        self.used_bytes = 0

    @property
    def allocated_bytes(self) -> int:
        """What the driver took for it, its rounding included."""
        return sum(chunk.allocated_bytes for chunk in self._chunks)

    @property
    def room_bytes(self) -> int:
        """What the budget leaves, if none of it is lost between spans."""
        return self.budget_bytes - self.used_bytes

    @property
    def remedy(self) -> str:
        """How to give it more."""
        return more_memory(self.name)

    def refusal(self, what: str, num_bytes: int) -> JitllmError:
        """That there is no room for something that a model cannot do without."""
        return JitllmError(
            f"{self.name} has no room for {what}: {format_size(num_bytes)} beside "
            f"{format_size(self.used_bytes)} in a budget of {format_size(self.budget_bytes)}",
            self.remedy,
        )

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
        """A chunk with room for `size` bytes: a whole one, else as much of one as there is."""
        halves = (self._chunk_bytes >> i for i in range(self._chunk_bytes.bit_length()))
        for num_bytes in (*(half for half in halves if half > size), size):
            if num_bytes > self.device.physical.max_allocation_bytes:
                continue
            if self.allocated_bytes + num_bytes > self.budget_bytes:
                continue
            try:
                chunk = _Chunk(self.device, num_bytes, is_host=self._is_host)
            except VulkanError as error:
                if not error.is_out_of_memory:
                    raise
                continue
            if self.allocated_bytes + chunk.allocated_bytes <= self.budget_bytes:
                self._chunks.append(chunk)
                return chunk
            chunk.close()
        return None

    def owns(self, span: DeviceSpan) -> bool:
        """Whether a span is of this arena."""
        return span.chunk in self._chunks

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
