"""Page sets of a device that go to the host's memory where a budget has no room for them.

The device reads and writes that memory under addresses of its own, so what is away is at hand for
moves. Attention would read it once for every token and head: so its pages come to frames of the
device first, as many as the longest part of a history has (`kernels.attention.gpu`), and each pass
looks at those. A set's place in a table is the frame that its pages come to, whatever the block;
no table is written in a step. Knows sets, columns and spans. Knows no tokens and no queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence

from jitllm.devices.host import Pass
from jitllm.devices.vulkan.arena import DeviceSpan
from jitllm.kernels.op import ALL_KEYS
from jitllm.memory.device_pages import DevicePages
from jitllm.memory.passes import NO_KEYS, Row
from jitllm.memory.spilling import Spilling

Copy = Callable[[Sequence[tuple[DeviceSpan, DeviceSpan]]], None]
"""Copies the first span of each pair to the second one, behind what the device was told before."""


class HostSpill(Spilling):
    """The sets of `memory` that are in use. copy: also before what the device is told next. wait:
    until that is done. See `Spilling`."""

    keeps_idle = False

    def __init__(
        self,
        memory: DevicePages,
        copy: Copy,
        wait: Callable[[], None],
        budget_sets: int,
        page_tokens: int,
        windows: Sequence[int],
    ) -> None:
        super().__init__(budget_sets, page_tokens, windows)
        self._memory = memory
        self._copy = copy
        self._wait = wait

    def give(self, page_set: int) -> None:
        """See `Spilling`."""
        super().give(page_set)
        self._memory.set_home(page_set, is_home=False)

    def put_away(self, sets: Iterable[int], columns: Collection[int]) -> None:
        """See `Spilling`."""
        for page_set in sets:
            self.bytes_written += self._move(page_set, columns, is_home=True)
            self._went(page_set)

    def bring_back(self, sets: Iterable[int], columns: Collection[int]) -> None:
        """See `Spilling`."""
        for page_set in sets:
            self.bytes_read += self._move(page_set, columns, is_home=False)
            self._came(page_set)

    def _move(self, page_set: int, columns: Collection[int], *, is_home: bool) -> int:
        pairs = self._memory.move(page_set, columns, is_home=is_home)
        self._copy(pairs)
        self._wait()
        self._memory.moved(source for source, _ in pairs)
        return sum(source.num_bytes for source, _ in pairs)

    def passes(
        self, rows: Sequence[Row], blocks: Iterable[int], set_bytes: int
    ) -> Generator[Pass, None, None]:
        """See `Spilling`. The device does them one after the other, and so they may be asked for
        ahead of that."""
        for block in blocks:
            seen = [0] * len(rows)
            for index, row in enumerate(rows):
                for frames, positions in self._pieces(row, self._windows[block]):
                    pairs = [
                        (self._memory.span(row.sets[at], block), self._memory.frame(at, block))
                        for at in positions
                    ]
                    self._copy(pairs)
                    self.bytes_read += sum(source.num_bytes for source, _ in pairs)
                    ranges = [NO_KEYS] * len(rows)
                    ranges[index] = seen[index], (frames + 1) * self._frame_keys
                    seen[index] = ranges[index][1]
                    yield Pass(block, tuple(ranges))
            if any(seen):
                yield Pass(block, tuple((start, ALL_KEYS[1]) for start in seen))

    @property
    def _frame_keys(self) -> int:
        """Keys that all frames together hold."""
        return self._memory.num_frames * self._page_tokens

    def _pieces(self, row: Row, window: int) -> list[tuple[int, list[int]]]:
        """Which pages of a row are away and looked at, as many at once as there are frames."""
        first = max(row.start + 1 - window, 0) // self._page_tokens if window else 0
        stop = -(-row.start // self._page_tokens)
        pieces: dict[int, list[int]] = {}
        for at in range(first, stop):
            if row.sets[at] in self._spilled:
                pieces.setdefault(at // self._memory.num_frames, []).append(at)
        return sorted(pieces.items())
