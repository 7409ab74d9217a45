"""Arrays that the host writes and a Vulkan device reads: what changed goes over before a step."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from jitllm.devices.vulkan.arena import Arena, DeviceSpan


class Mirrors:
    """The arrays of one device, and which of them it has not seen as they are."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._changed: dict[Mirror, None] = {}

    def make(self, values: array[int]) -> Mirror | None:
        """An array of these numbers to begin with; None where the device has no room for it."""
        span = self.arena.take(len(values) * values.itemsize)
        if span is None:
            return None
        mirror = Mirror(self, values, span)
        self._changed[mirror] = None
        return mirror

    def changes(self) -> Iterator[tuple[DeviceSpan, memoryview]]:
        """What to bring to the device, which has seen it from then on."""
        while self._changed:
            mirror, _ = self._changed.popitem()
            yield mirror.take_change()

    def add(self, mirror: Mirror) -> None:
        """One has changed."""
        self._changed[mirror] = None

    def remove(self, mirror: Mirror) -> None:
        """One is read no more."""
        self._changed.pop(mirror, None)


class Mirror:
    """Numbers in an array here and at `address` on the device."""

    def __init__(self, mirrors: Mirrors, values: array[int], span: DeviceSpan) -> None:
        self.values = values
        self.address = span.address
        self._mirrors = mirrors
        self._span = span
        self._start, self._stop = 0, len(values)

    def write(self, start: int, values: array[int]) -> None:
        """Set the numbers from `start` on."""
        stop = start + len(values)
        self.values[start:stop] = values
        if self._start < self._stop:
            self._start, self._stop = min(self._start, start), max(self._stop, stop)
        else:
            self._start, self._stop = start, stop
        self._mirrors.add(self)

    def take_change(self) -> tuple[DeviceSpan, memoryview]:
        """The part that was written since the last time, there and here."""
        start, stop, size = self._start, self._stop, self.values.itemsize
        self._start = self._stop = 0
        span = self._span.part(start * size, (stop - start) * size)
        return span, memoryview(self.values)[start:stop]

    def __getitem__(self, index: int) -> int:
        return self.values[index]

    def close(self) -> None:
        """Nobody reads it any more."""
        self._mirrors.remove(self)
        self._mirrors.arena.give(self._span)
