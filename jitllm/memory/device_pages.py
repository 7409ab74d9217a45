"""KV pages of a device without virtual memory: spans of its arena for as long as they are held.

A set may be at home: its pages are then in memory of the host that the device sees, and come to
frames of the device where attention is to look at them (`jitllm.memory.host_spill`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence

from jitllm.devices.vulkan.arena import Arena, DeviceSpan
from jitllm.devices.vulkan.mirror import Mirror, Mirrors
from jitllm.errors import JitllmError, OverBudget
from jitllm.memory.columns import Columns


class DevicePages:
    """`PageMemory` of a device. page_bytes: bytes of one page of each block. give_back: where a
    span goes that is not used any more.

    host: memory for sets that are at home. num_frames: pages of one block that can be on the device
    then. Raises `JitllmError` where there is no room for those.
    """

    def __init__(
        self,
        page_bytes: Sequence[int],
        mirrors: Mirrors,
        give_back: Callable[[DeviceSpan], None],
        host: Arena | None = None,
        num_frames: int = 0,
    ) -> None:
        self.layout = Columns(page_bytes)
        self.num_frames = num_frames
        self._bytes = tuple(page_bytes)
        self._mirrors = mirrors
        self._give_back = give_back
        self._host = host
        self._spans: dict[tuple[int, int], DeviceSpan] = {}
        self._home: set[int] = set()
        self.num_bytes = 0
        """What all pages on the device take."""
        self._frames: list[DeviceSpan] = []
        for _ in range(num_frames):
            if (span := mirrors.arena.take(max(page_bytes))) is None:
                needed = num_frames * max(page_bytes)
                raise mirrors.arena.refusal("pages that pass through", needed)
            self._frames.append(span)

    def entries(self, count: int) -> Mirror | None:
        """See `PageMemory`."""
        return self._mirrors.make(array("Q", bytes(8 * count)))

    def take(self, page_set: int, columns: Iterable[int]) -> bool:
        """See `PageMemory`."""
        taken: list[int] = []
        for column in columns:
            if (span := self._take(column, is_home=page_set in self._home)) is None:
                self.give(page_set, taken)
                return False
            self._spans[page_set, column] = span
            taken.append(column)
        return True

    def _take(self, column: int, *, is_home: bool) -> DeviceSpan | None:
        arena = self._host if is_home else self._mirrors.arena
        span = None if arena is None else arena.take(self._bytes[column])
        if span is not None and not is_home:
            self.num_bytes += span.num_bytes
        return span

    def address(self, page_set: int, column: int) -> int:
        """See `PageMemory`."""
        return self._spans[page_set, column].address

    def places(self, page_set: int, index: int) -> array[int]:
        """See `PageMemory`: a set at home has the frame that its pages come to."""
        columns = range(len(self._bytes))
        if page_set in self._home:
            return array("Q", [self._frames[index % self.num_frames].address for _ in columns])
        spans = (self._spans.get((page_set, column)) for column in columns)
        return array("Q", [0 if span is None else span.address for span in spans])

    def give(self, page_set: int, columns: Iterable[int]) -> None:
        """See `PageMemory`."""
        for column in columns:
            self._give(self._spans.pop((page_set, column)))

    def _give(self, span: DeviceSpan) -> None:
        if self._host is not None and self._host.owns(span):
            self._host.give(span)
        else:
            self._give_back(span)
            self.num_bytes -= span.num_bytes

    # --- at home -----------------------------------------------------------------------------

    def span(self, page_set: int, column: int) -> DeviceSpan:
        """Where a page is."""
        return self._spans[page_set, column]

    def frame(self, index: int, column: int) -> DeviceSpan:
        """Where the page of a block at an index of a table comes to."""
        return self._frames[index % self.num_frames].part(0, self._bytes[column])

    def set_home(self, page_set: int, *, is_home: bool) -> None:
        """Whether what is taken for a set from now on is at home."""
        (self._home.add if is_home else self._home.discard)(page_set)

    def move(
        self, page_set: int, columns: Collection[int], *, is_home: bool
    ) -> list[tuple[DeviceSpan, DeviceSpan]]:
        """Have other memory for a set, at home or on the device: where each page was and where it
        is. Raises `OverBudget`, and nothing is moved, where there is none."""
        found: list[tuple[int, DeviceSpan]] = []
        for column in columns:
            if (span := self._take(column, is_home=is_home)) is None:
                for _, taken in found:
                    self._give(taken)
                raise self._refusal(columns, is_home=is_home)
            found.append((column, span))
        pairs = [(self._spans[page_set, column], span) for column, span in found]
        self._spans |= {(page_set, column): span for column, span in found}
        self.set_home(page_set, is_home=is_home)
        return pairs

    def _refusal(self, columns: Collection[int], *, is_home: bool) -> JitllmError:
        arena, needed = self._mirrors.arena, self.layout.num_bytes(columns)
        if is_home:
            return OverBudget("keys and values of the host", needed, 0)
        return OverBudget(
            f"keys and values on {arena.name}", needed, arena.room_bytes, arena.remedy
        )

    def moved(self, spans: Iterable[DeviceSpan]) -> None:
        """What was in these spans is where `move` said."""
        for span in spans:
            self._give(span)

    def close(self) -> None:
        """Give the frames back."""
        while self._frames:
            self._mirrors.arena.give(self._frames.pop())
