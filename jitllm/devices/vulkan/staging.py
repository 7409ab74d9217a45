"""The way of bytes to a Vulkan device and back, through host memory that it copies from and to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from jitllm.devices.vulkan.arena import ALIGN, DeviceSpan, allocate, host_properties
from jitllm.devices.vulkan.device import Device, Moment, Queue

STAGE_BYTES = 8 << 20
"""Of each half of the staging buffer: while one is copied by the device, the other is filled."""

_Copy = tuple[tuple[Any, int], tuple[Any, int], int]
"""(buffer, offset) of what is copied, (buffer, offset) where it goes, and how many bytes."""


class Staging:
    """Host memory that the device sees, in two halves: one is filled while the other is copied.

    For any thread, as long as nobody else uses its queue then.
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
        self._buffer, self._memory, self.allocated_bytes = allocate(
            device, 2 * half_bytes, *host_properties(device)
        )
        pointer = vulkan.make(
            "vkMapMemory", "void*", device.handle, self._memory, 0, 2 * half_bytes, 0
        )
        self._bytes = memoryview(vulkan.ffi.buffer(pointer, 2 * half_bytes))
        self._lock = Lock()
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
        with self._lock:
            half, base, filled = *self._next_half(), 0
            copies: list[_Copy] = []
            for span, data in pairs:
                view, start = memoryview(data).cast("B"), 0
                while start < len(view):
                    if filled == self._half_bytes:
                        self._submit(half, copies, waits)
                        half, base, filled = *self._next_half(), 0
                        copies = []
                    part = view[start : start + self._half_bytes - filled]
                    at = base + filled
                    self._bytes[at : at + len(part)] = part
                    target = (span.chunk.buffer, span.offset + start)
                    copies.append(((self._buffer, at), target, len(part)))
                    start, filled = start + len(part), filled + len(part)
            self._submit(half, copies, waits)
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
        with self._lock:
            for start in range(0, len(view), self._half_bytes):
                part = view[start : start + self._half_bytes]
                half, base = self._next_half()
                source = (span.chunk.buffer, span.offset + offset + start)
                self._submit(half, [(source, (self._buffer, base), len(part))], waits)
                self._settle(half)
                part[:] = self._bytes[base : base + len(part)]

    def clear(self, span: DeviceSpan, word: int = 0) -> Moment:
        """Zeros, or a 32-bit word over and over, for a whole span, rounded up to its alignment."""
        size = -(-span.num_bytes // ALIGN) * ALIGN
        with self._lock:
            half, _ = self._next_half()
            with self._recording() as commands:
                target = (span.chunk.buffer, span.offset)
                self._device.api.call("vkCmdFillBuffer", commands, *target, size, word)
            self._busy[half] = self._queue.submit(commands), commands
            return self._queue.last

    def _next_half(self) -> tuple[int, int]:
        """The half that is used next, free, and where it begins."""
        half, self._half = self._half, self._half ^ 1
        self._settle(half)
        return half, half * self._half_bytes

    def _submit(self, half: int, copies: Iterable[_Copy], after: tuple[Moment, ...]) -> None:
        """Start copies from or to a half."""
        vulkan = self._device.api
        with self._recording() as commands:
            for source, target, num_bytes in copies:
                region = vulkan.struct(
                    "VkBufferCopy", srcOffset=source[1], dstOffset=target[1], size=num_bytes
                )
                vulkan.call("vkCmdCopyBuffer", commands, source[0], target[0], 1, region)
        self._busy[half] = self._queue.submit(commands, after=after), commands

    @contextmanager
    def _recording(self) -> Iterator[Any]:
        """Commands behind what was submitted before, and before what will be."""
        with self._queue.recording(once=True) as commands:
            self._device.barrier(commands)
            yield commands
            self._device.barrier(commands)

    def _settle(self, half: int) -> None:
        """Wait until the device is done with a half."""
        if (busy := self._busy[half]) is not None:
            moment, commands = busy
            self._queue.wait(moment)
            self._queue.free(commands)
            self._busy[half] = None

    def close(self) -> None:
        """Give the memory back."""
        self._device.rest()
        self._bytes.release()
        self._device.api.call("vkUnmapMemory", self._device.handle, self._memory)
        self._device.destroy("vkDestroyBuffer", self._buffer)
        self._device.destroy("vkFreeMemory", self._memory)
