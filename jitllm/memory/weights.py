"""The memory that a model's weights are read into: the dense region, and a place for each block.

Knows extents, spans and addresses. Knows no budget and no order of use. All blocks lie in one
reservation, each at an address that never changes: an absent block has addresses and no memory. Its
experts lie behind it as in the file, and come with it or one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container as Set
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from jitllm.devices.memory import HUGE_PAGE_BYTES, Handle, Memory, round_up
from jitllm.errors import JitllmError
from jitllm.formats.jlm import Container
from jitllm.formats.jlm_head import runs
from jitllm.formats.reader import Reader, Sums


class Weights:
    """One container's weights; `close` them, or use them in a `with`.

    Reads may run in several threads at once, one for a block or an expert.
    """

    def __init__(
        self, container: Container, memory: Memory, *, direct: bool = True, apart: Set[int] = ()
    ) -> None:
        """Reserve every address; nothing is read yet. apart: blocks whose experts come one by one.

        Raises `JitllmError` when the address space is too small, `PageError` when the file cannot
        be opened.
        """
        self._dense = container.header.dense
        whole = runs(container.header.blocks, container.header.experts)
        numbered = tuple(enumerate(whole))
        self._runs = tuple(run[:1] if block in apart else run for block, run in numbered)
        self._experts = tuple(run[1:] if block in apart else () for block, run in numbered)
        self.dense_bytes = round_up(self._dense.length)
        """What the dense region takes."""
        self.block_bytes = tuple(Sums(extents).length for extents in self._runs)
        """What each block uses while it is there, without the rest of its last page: a budget of
        so many times the largest extent holds so many blocks."""
        self._frame_bytes = tuple(map(round_up, self.block_bytes))
        self._offsets, total = _lay_out([round_up(Sums(run).length) for run in whole])
        self._is_verified = bytearray(len(self._runs))
        self._verified_experts: set[tuple[int, int]] = set()
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

    @property
    def expert_bytes(self) -> dict[int, int]:
        """What an expert takes, of each block that has some which come one by one."""
        return {
            block: max(round_up(extent.length) for extent in experts)
            for block, experts in enumerate(self._experts)
            if experts
        }

    @property
    def num_experts(self) -> dict[int, int]:
        """How many of them each such block has."""
        return {block: len(experts) for block, experts in enumerate(self._experts) if experts}

    def read_dense(self) -> None:
        """Bring the dense region in. Raises `PageError`; it has no memory then."""
        try:
            self.reader.read_extent(self._dense, self._dense_span.view())
            self._dense_span.settle()
        except BaseException:
            self.release_dense()
            raise

    def read_block(self, block: int, pieces: Iterable[range] | None = None) -> None:
        """Bring `block` in, at once or in `pieces`; the first time, its checksum is compared.

        Raises `PageError`, or what `pieces` raises; the block has no memory then.
        """
        verify = not self._is_verified[block]
        with self._filling(block) as view:
            self.reader.read_run(self._runs[block], view, verify=verify, pieces=pieces)

    def copy_block(self, block: int, address: int, pieces: Iterable[range]) -> None:
        """Bring `block` in, in `pieces`, from `address`, where another one's frame of it lies.

        Its checksum is compared every time: who owns the frame may have given it up meanwhile.
        Raises `JitllmError` then, or what `pieces` raises; the block has no memory then.
        """
        into, sums = self._span.address + self._offsets[block], Sums(self._runs[block])
        with self._filling(block) as view:
            for piece in pieces:
                ctypes.memmove(into + piece.start, address + piece.start, len(piece))
                sums.update(piece.start, view[piece.start : piece.stop])
            if sums.wrong():
                raise JitllmError(f"the frame of block {block} changed while it was copied")

    def release_dense(self) -> None:
        """Give the memory of the dense region back to the system."""
        self._dense_span.release(0, self.dense_bytes)

    def release(self, block: int) -> None:
        """Give the memory of `block` back to the system."""
        self._span.release(self._offsets[block], self._frame_bytes[block])

    def hand_over(self, block: int, to: int) -> None:
        """`release` a block where `to`, which has no memory, is read next: it gets that of `block`,
        as far as it can."""
        num_bytes, to_bytes = self._frame_bytes[block], self._frame_bytes[to]
        self._span.hand_over(self._offsets[block], num_bytes, self._offsets[to], to_bytes)

    def read_expert(self, block: int, expert: int, place: int) -> None:
        """Bring one expert in, to where the one with the number `place` lies in the file; the first
        time, its checksum is compared.

        Raises `PageError`; what the place holds is then undefined.
        """
        extent, verify = self._experts[block][expert], (block, expert) not in self._verified_experts
        view = self._span.view(self._place_offset(block, place), round_up(extent.length))
        self.reader.read_extent(extent, view, verify=verify)
        self._verified_experts.add((block, expert))

    def release_place(self, block: int, place: int) -> None:
        """Give the memory of a place for an expert back to the system."""
        num_bytes = round_up(self._experts[block][place].length)
        self._span.release(self._place_offset(block, place), num_bytes)

    def _place_offset(self, block: int, place: int) -> int:
        begin = self._runs[block][0].offset
        return self._offsets[block] + self._experts[block][place].offset - begin

    @contextmanager
    def _filling(self, block: int) -> Iterator[memoryview]:
        """The memory of `block`, which holds what it should in the end, or is given back."""
        try:
            yield self._span.view(self._offsets[block], self._frame_bytes[block])
        except BaseException:
            self.release(block)
            raise
        self._is_verified[block] = True

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
