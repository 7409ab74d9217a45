"""The memory that a model's weights are read into: the dense region, and a place for each block.

Knows extents, spans and addresses. Knows no budget and no order of use. All blocks lie in one
reservation, each at an address that never changes: an absent block has addresses and no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from jitllm.devices.memory import HUGE_PAGE_BYTES, Handle, Memory, round_up
from jitllm.formats.jlm import Container
from jitllm.formats.reader import Reader


class Weights:
    """One container's weights; `close` them, or use them in a `with`.

    Reads may run in several threads at once, one for a block.
    """

    def __init__(self, container: Container, memory: Memory, *, direct: bool = True) -> None:
        """Reserve every address; nothing is read yet.

        Raises `JitllmError` when the address space is too small, `PageError` when the file cannot
        be opened.
        """
        self._dense = container.header.dense
        self._extents = container.header.blocks
        self.dense_bytes = round_up(self._dense.length)
        """What the dense region takes."""
        self.block_bytes = tuple(extent.length for extent in self._extents)
        """What each block uses while it is there, without the rest of its last page: a budget of
        so many times the largest extent holds so many blocks."""
        self._frame_bytes = tuple(map(round_up, self.block_bytes))
        self._offsets, total = _lay_out(self._frame_bytes)
        self._is_verified = bytearray(len(self._extents))
        with ExitStack() as owned:
            self.reader = owned.enter_context(Reader(container.path, direct=direct))
            self._dense_span = owned.enter_context(memory.reserve(self.dense_bytes))
            self._span = owned.enter_context(memory.reserve(total, huge_pages=False))
            for offset, num_bytes in zip(self._offsets, self._frame_bytes, strict=True):
                self._span.use_huge_pages(offset, num_bytes)
            self._owned = owned.pop_all()

    @property
    def dense_handle(self) -> Handle:
        """Of the dense region."""
        return self._dense_span.handle()

    @property
    def blocks_handle(self) -> Handle:
        """Of the memory for all blocks."""
        return self._span.handle()

    @property
    def block_offsets(self) -> tuple[int, ...]:
        """Where in it the extent of each block begins, to be read while it is there."""
        return self._offsets

    def read_dense(self) -> None:
        """Bring the dense region in. Raises `PageError`."""
        self.reader.read_extent(self._dense, self._dense_span.view())

    def read_block(self, block: int) -> None:
        """Bring `block` in; the first time, its checksum is compared.

        Raises `PageError`; the block has no memory then.
        """
        view = self._span.view(self._offsets[block], self._frame_bytes[block])
        verify = not self._is_verified[block]
        try:
            self.reader.read_extent(self._extents[block], view, verify=verify)
        except BaseException:
            self.release(block)
            raise
        self._is_verified[block] = True

    def release(self, block: int) -> None:
        """Give the memory of `block` back to the system."""
        self._span.release(self._offsets[block], self._frame_bytes[block])

    def close(self) -> None:
        """Give file and memory back; no address may be used any more."""
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _lay_out(frame_bytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The offset of each block, large ones where huge pages begin, and the length of it all."""
    offsets, end = [], 0
    for num_bytes in frame_bytes:
        if num_bytes >= HUGE_PAGE_BYTES:
            end = round_up(end, HUGE_PAGE_BYTES)
        offsets.append(end)
        end += num_bytes
    return tuple(offsets), end
