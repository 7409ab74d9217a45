"""Positioned reads of one file into memory, past the page cache, many in flight.

Knows offsets, lengths and aligned memory. Knows no header and no block. Reads are direct
(O_DIRECT) where the filesystem has them; elsewhere they are buffered and what they left in the page
cache is dropped, so that either way memory holds one copy of what was read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import NamedTuple, Self

import xxhash

from jitllm.devices.memory import PAGE_BYTES, round_up
from jitllm.errors import AnyPath, PageError
from jitllm.formats.jlm_head import Extent

SLICE_BYTES = 1 << 20
NUM_IN_FLIGHT = 8


class _Slice(NamedTuple):
    """`needed` bytes of the file from `offset` into `into`, which may be longer."""

    offset: int
    needed: int
    into: memoryview


class Sums:
    """The checksums of extents that lie one behind the other, taken piece by piece.

    length: from the start of the first to the end of the last.
    """

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._extents = extents
        self._digests = [xxhash.xxh3_64() for _ in extents]
        self.length = extents[-1].offset + extents[-1].length - extents[0].offset

    def update(self, start: int, data: memoryview) -> None:
        """Take the next piece, which begins `start` bytes behind the start of the first extent."""
        base = self._extents[0].offset + start
        for extent, digest in zip(self._extents, self._digests, strict=True):
            first, last = max(extent.offset - base, 0), extent.offset + extent.length - base
            if first < len(data) and last > 0:
                digest.update(data[first : min(last, len(data))])

    def wrong(self) -> Extent | None:
        """The first extent whose bytes are not what was written."""
        pairs = zip(self._extents, self._digests, strict=True)
        return next((extent for extent, d in pairs if d.intdigest() != extent.xxh3), None)


class Reader:
    """An open file, read from any number of threads; `close` it, or use it in a `with`."""

    def __init__(
        self,
        path: AnyPath,
        *,
        direct: bool = True,
        slice_bytes: int = SLICE_BYTES,
        num_in_flight: int = NUM_IN_FLIGHT,
    ) -> None:
        """Open `path`; with `direct=False`, or where the filesystem refuses it, read buffered.

        A read is cut into slices of `slice_bytes` (a multiple of 4096), up to `num_in_flight` of
        them at once. Raises `PageError` when the file cannot be opened.
        """
        self.path = os.fspath(path)
        self.num_reads = 0
        self._bytes_read = 0
        self._lock = threading.Lock()
        self._slice_bytes = slice_bytes
        try:
            self._buffered_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise PageError(path, 0, error.strerror or str(error)) from error
        # Read-ahead of the kernel would fill the page cache with what nobody asked for.
        _advise(self._buffered_fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._direct_fd = self._open_direct() if direct else None
        self.is_direct = self._direct_fd is not None
        """Whether reads go past the page cache."""
        self._helpers = ThreadPoolExecutor(max(num_in_flight - 1, 1), "jitllm-read")

    @property
    def bytes_read(self) -> int:
        """What all reads so far took from the file, in whole pages of 4096 bytes when direct."""
        return self._bytes_read

    def read(self, offset: int, num_bytes: int, into: memoryview) -> None:
        """Fill `into[:num_bytes]` with the bytes of the file at `offset`; returns when they are in.

        `offset` and the address of `into` are multiples of 4096, and `into` is at least as long as
        `num_bytes` rounded up to one: the rest of its last page takes whatever follows in the file.
        Raises `PageError` with the file and the offset after an I/O error or a short read; what
        `into` holds is then undefined.
        """
        if offset % PAGE_BYTES or len(into) < round_up(num_bytes):
            raise ValueError(f"{num_bytes} bytes at {offset} into {len(into)} are not aligned")
        slices = list(self._slices(offset, num_bytes, into))
        left = iter(slices)
        # The calling thread takes slices like everybody: a read never waits for a busy helper.
        helpers = [self._helpers.submit(self._work, left) for _ in slices[1:]]
        try:
            self._work(left)
        finally:
            for helper in helpers:
                helper.cancel()
            wait(helpers)  # nobody may write into the memory once this call is over
        for helper in helpers:
            if not helper.cancelled():
                helper.result()
        self.num_reads += 1
        if not self.is_direct:
            _advise(self._buffered_fd, offset, round_up(num_bytes), os.POSIX_FADV_DONTNEED)

    def read_extent(
        self,
        extent: Extent,
        into: memoryview,
        *,
        verify: bool = True,
        pieces: Iterable[range] | None = None,
    ) -> None:
        """`read` all of `extent`; with `verify`, raise `PageError` for a wrong checksum too.

        pieces: spans of the extent, one after the other, that begin at multiples of 4096; whoever
        makes them may take time between two of them. By default there is one.
        """
        self.read_run((extent,), into, verify=verify, pieces=pieces)

    def read_run(
        self,
        extents: Sequence[Extent],
        into: memoryview,
        *,
        verify: bool = True,
        pieces: Iterable[range] | None = None,
    ) -> None:
        """`read_extent` for extents that lie one behind the other: pieces are counted from the
        first one's start, and between two of them are bytes that belong to none."""
        sums = Sums(extents)
        for piece in pieces or [range(sums.length)]:
            self.read(extents[0].offset + piece.start, len(piece), into[piece.start :])
            if verify:
                sums.update(piece.start, into[piece.start : piece.stop])
        if verify and (wrong := sums.wrong()):
            raise PageError(self.path, wrong.offset, "the checksum is wrong")

    def close(self) -> None:
        """Finish what is in flight and close the file."""
        self._helpers.shutdown()
        for fd in (self._buffered_fd, self._direct_fd):
            if fd is not None:
                os.close(fd)
        self._buffered_fd, self._direct_fd = -1, None

    def _slices(self, offset: int, num_bytes: int, into: memoryview) -> Iterator[_Slice]:
        for start in range(0, num_bytes, self._slice_bytes):
            needed = min(self._slice_bytes, num_bytes - start)
            yield _Slice(offset + start, needed, into[start : start + round_up(needed)])

    def _work(self, left: Iterator[_Slice]) -> None:
        """Read slices until none is left."""
        while True:
            with self._lock:
                piece = next(left, None)
            if piece is None:
                return
            try:
                taken = self._read_slice(piece)
            except OSError as error:
                raise PageError(self.path, piece.offset, f"read failed: {error.strerror}") from None
            with self._lock:
                self._bytes_read += taken

    def _read_slice(self, piece: _Slice) -> int:
        """Bytes that were taken from the file for `piece`."""
        done = taken = 0
        while done < piece.needed:
            got = kept = self._read_once(piece.into[done:], piece.offset + done)
            taken += round_up(got) if self.is_direct else got
            if done + got < piece.needed and self.is_direct:
                kept -= got % PAGE_BYTES  # the rest is read from an aligned offset
            if kept == 0:
                raise PageError(
                    self.path,
                    piece.offset + done + got,
                    f"short read, {piece.needed - done - got} bytes are missing",
                )
            done += kept
        return taken

    def _read_once(self, into: memoryview, offset: int) -> int:
        if self.is_direct and self._direct_fd is not None:
            try:
                return os.preadv(self._direct_fd, [into], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some filesystems open with O_DIRECT and refuse it only here, or align coarser.
                self.is_direct = False
        return os.preadv(self._buffered_fd, [into], offset)

    def _open_direct(self) -> int | None:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _advise(fd: int, offset: int, num_bytes: int, advice: int) -> None:
    """Tell the kernel; a filesystem that does not listen costs cache, not correctness."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, num_bytes, advice)
