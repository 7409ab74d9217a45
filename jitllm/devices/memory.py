"""Host memory: spans of address space that cost nothing until they are touched.

Knows addresses, pages of 4 KiB and huge pages of 2 MiB. Knows no blocks, no budget, no file. Pages
go back to the system when they are released, and the address stays: whoever kept it may read the
span again once it is filled again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from types import TracebackType
from typing import Protocol, Self

from jitllm.errors import JitllmError
from jitllm.units import format_size

PAGE_BYTES = 4096
"""What a span is given back in, and what direct reads align to."""
HUGE_PAGE_BYTES = 2 << 20

_MAP_NORESERVE = 0x4000  # Linux, the same on x86 and Arm; the mmap module has no name for it
_MADV = {"release": 4, "huge": 14, "small": 15}  # MADV_DONTNEED, MADV_HUGEPAGE, MADV_NOHUGEPAGE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def round_up(num_bytes: int, unit: int = PAGE_BYTES) -> int:
    """`num_bytes` to the next multiple of `unit`."""
    return -(-num_bytes // unit) * unit


class Memory(Protocol):
    """Where an actor's memory comes from."""

    def reserve(self, num_bytes: int, *, huge_pages: bool = True) -> Span:
        """`num_bytes` of zeroed memory at an address that is a multiple of `HUGE_PAGE_BYTES`.

        Only what is touched is taken from the system, in huge pages if it likes; without
        `huge_pages` in small ones, but for what `Span.use_huge_pages` names. Raises `JitllmError`
        when the address space is too small for it.
        """
        ...


class HostMemory:
    """Private anonymous mappings of this process."""

    def reserve(self, num_bytes: int, *, huge_pages: bool = True) -> Span:
        """See `Memory.reserve`."""
        span = Span(num_bytes)
        if huge_pages:
            span.use_huge_pages(0, num_bytes)
        return span


class Span:
    """A reservation: `num_bytes` at `address`; `close` it, or use it in a `with`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._is_closed = False
        # The system aligns to small pages only: reserve one huge page more and begin inside.
        mapped = max(round_up(num_bytes), PAGE_BYTES) + HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, mapped, flags=flags)
        except (OSError, OverflowError) as error:
            raise JitllmError(
                f"no address space for {format_size(num_bytes)}: {error}",
                "raise the limit (ulimit -v) or run a smaller model",
            ) from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = round_up(start, HUGE_PAGE_BYTES)
        """Of the first byte; it never changes."""
        self._skipped = self.address - start
        # A huge page that reaches past the end of a block would take more than the block is
        # charged for, so nothing becomes one unasked.
        self._advise("small", 0, num_bytes)

    def use_huge_pages(self, offset: int, num_bytes: int) -> None:
        """Back `[offset, offset + num_bytes)` by huge pages where a whole one fits."""
        start = round_up(offset, HUGE_PAGE_BYTES)
        stop = (offset + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if start < stop:
            self._advise("huge", start, stop - start)

    def view(self, offset: int = 0, num_bytes: int | None = None) -> memoryview:
        """The writable bytes `[offset, offset + num_bytes)`; by default up to the end."""
        stop = self.num_bytes if num_bytes is None else offset + num_bytes
        if not 0 <= offset <= stop <= self.num_bytes:
            raise ValueError(f"[{offset}, {stop}) is outside of {self.num_bytes} bytes")
        return memoryview(self._map)[self._skipped + offset : self._skipped + stop]

    def release(self, offset: int, num_bytes: int) -> None:
        """Give the pages of `[offset, offset + num_bytes)` back; they read as zeros again.

        `offset` is a multiple of `PAGE_BYTES`; the last page goes back even when it is in part
        beyond the range.
        """
        self._advise("release", offset, num_bytes)

    def close(self) -> None:
        """Give everything back; the address must not be used any more."""
        if self._is_closed:
            return
        self.release(0, self.num_bytes)
        self._is_closed = True
        # While somebody keeps a view there is an error, and the bare address space goes with it.
        with contextlib.suppress(BufferError):
            self._map.close()

    def _advise(self, what: str, offset: int, num_bytes: int) -> None:
        if offset % PAGE_BYTES or not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise ValueError(f"[{offset}, {offset + num_bytes}) of {self.num_bytes} bytes")
        if self._is_closed:
            raise ValueError("the span is closed")
        # Through ctypes and not mmap.madvise, which would hold the GIL while pages are freed.
        if num_bytes and _libc.madvise(self.address + offset, num_bytes, _MADV[what]):
            code = ctypes.get_errno()
            # Without transparent huge pages in the kernel, advice about them means nothing.
            if what == "release" or code != errno.EINVAL:
                raise OSError(code, f"madvise: {os.strerror(code)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
