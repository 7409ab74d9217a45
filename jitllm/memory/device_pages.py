"""KV pages of a device without virtual memory: spans of its arena for as long as they are held."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from jitllm.devices.vulkan.arena import DeviceSpan
from jitllm.devices.vulkan.mirror import Mirror, Mirrors
from jitllm.memory.columns import Columns


class DevicePages:
    """`PageMemory` of a device. page_bytes: bytes of one page of each block. give_back: where a
    span goes that is not used any more.
    """

    def __init__(
        self,
        page_bytes: Sequence[int],
        mirrors: Mirrors,
        give_back: Callable[[DeviceSpan], None],
    ) -> None:
        self.layout = Columns(page_bytes)
        self._bytes = tuple(page_bytes)
        self._mirrors = mirrors
        self._give_back = give_back
        self._spans: dict[tuple[int, int], DeviceSpan] = {}
        self.num_bytes = 0
        """What all pages take."""

    def entries(self, count: int) -> Mirror | None:
        """See `PageMemory`."""
        return self._mirrors.make(array("Q", bytes(8 * count)))

    def take(self, page_set: int, columns: Iterable[int]) -> bool:
        """See `PageMemory`."""
        taken: list[int] = []
        for column in columns:
            if (span := self._mirrors.arena.take(self._bytes[column])) is None:
                self.give(page_set, taken)
                return False
            self._spans[page_set, column] = span
            self.num_bytes += self._bytes[column]
            taken.append(column)
        return True

    def addresses(self, page_set: int) -> array[int]:
        """See `PageMemory`."""
        spans = (self._spans.get((page_set, column)) for column in range(len(self._bytes)))
        return array("Q", [0 if span is None else span.address for span in spans])

    def give(self, page_set: int, columns: Iterable[int]) -> None:
        """See `PageMemory`."""
        for column in columns:
            self._give_back(self._spans.pop((page_set, column)))
            self.num_bytes -= self._bytes[column]
