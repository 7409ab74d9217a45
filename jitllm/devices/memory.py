"""Host memory: spans of address space that cost nothing until they are touched.

Knows addresses, pages of 4 KiB and huge pages of 2 MiB. Knows no blocks, no budget, no container.
Pages go back to the system when they are released, and the address stays: whoever kept it may read
the span again once it is filled again. Pages that are wanted elsewhere in the span can go there
instead, which saves the system from zeroing others.

Memory is private to the process, or shared with others of its node: then a handle names a span, and
`attach` maps it elsewhere. Shared memory is a file without a name: it ends with its last process.

With $JITLLM_POISON set to 1, spans overwrite what is released and keep it, so that whoever reads it
afterwards, or takes it for zeros, is found out. For tests: such memory never goes back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakValueDictionary

from jitllm.errors import JitllmError
from jitllm.units import format_size

PAGE_BYTES = 4096
"""What a span is given back in, and what direct reads align to."""
HUGE_PAGE_BYTES = 2 << 20

_SHARED_START = HUGE_PAGE_BYTES
"""Where in its file a shared span begins."""

POISON_VARIABLE = "JITLLM_POISON"
POISON = 0xFF
"""Each byte of memory that was released: NaN as f16, f32 and bf16, so also as the scale of a group
of weights. Attention leaves out keys that no row sees by selection, never by a product, and so a
NaN in what is still to be written of a page does no harm."""

_MAP_NORESERVE = 0x4000  # Linux, the same on x86 and Arm; the mmap module has no name for it
# MADV_DONTNEED, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_COLLAPSE
_MADV = {"release": 4, "huge": 14, "small": 15, "collapse": 25}

_MREMAP = 7  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
_PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_MAP_FAILED = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int),
    ctypes.c_void_p,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_PROT_NONE, _MAP_FIXED = 0, 0x10
_libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int64),
)


def round_up(num_bytes: int, unit: int = PAGE_BYTES) -> int:
    """`num_bytes` to the next multiple of `unit`."""
    return -(-num_bytes // unit) * unit


class Memory(Protocol):
    """Where an actor's memory comes from."""

    def reserve(self, num_bytes: int, *, huge_pages: bool = True) -> Span:
        """`num_bytes` of zeroed memory at an address that is a multiple of `PAGE_BYTES`.

        Only what is touched is taken from the system, in huge pages if it likes; without
        `huge_pages` in small ones, but for what `Span.use_huge_pages` names. Raises `JitllmError`
        when the address space is too small for it.
        """
        ...


class HostMemory:
    """Private anonymous mappings of this process, at multiples of `HUGE_PAGE_BYTES`."""

    def reserve(self, num_bytes: int, *, huge_pages: bool = True) -> Span:
        """See `Memory.reserve`."""
        span = Span(num_bytes)
        if huge_pages:
            span.use_huge_pages(0, num_bytes)
        return span


class SharedMemory:
    """Mappings that other processes of this node can attach to."""

    def reserve(self, num_bytes: int, *, huge_pages: bool = True) -> Span:
        """See `Memory.reserve`."""
        span = SharedSpan(num_bytes)
        if huge_pages:
            span.use_huge_pages(0, num_bytes)
        return span


@dataclass(frozen=True, slots=True)
class Handle:
    """Names a span to the processes of its node; good for as long as the span is open.

    address: where it lies in its own process. fd: the file behind it there, -1 when it is private.
    """

    pid: int
    address: int
    num_bytes: int
    fd: int = -1


@contextmanager
def attach(handle: Handle) -> Iterator[int]:
    """Within it, the address of a span in this process; in another one than its own, to be read
    only. Whoever closes the span meanwhile leaves zeros there, and the address stays good. Raises
    `JitllmError` when it cannot be had here.
    """
    if handle.pid == os.getpid():
        with _own_view(handle):
            yield handle.address
        return
    mapped, address, num_bytes = _map_foreign(handle)
    try:
        yield address
    finally:
        _libc.munmap(mapped, num_bytes)


def holds(handle: Handle) -> bool:
    """Whether a span of this process still holds what was written to it; true of any other's.

    Where who attached may outlive who reserved it, ask after reading.
    """
    return handle.pid != os.getpid() or handle.address in _spans


def _own_view(handle: Handle) -> memoryview:
    """What keeps the pages of a span of this process mapped."""
    span = _spans.get(handle.address)
    try:
        if span is not None:
            return span.view()
    except ValueError:  # it is being closed
        pass
    raise JitllmError(f"no view of {format_size(handle.num_bytes)}: they were given back")


def punch(fd: int, offset: int, num_bytes: int) -> None:
    """Give back what `[offset, offset + num_bytes)` of a file takes; it reads as zeros then. Raises
    `OSError`, also where the filesystem cannot do it."""
    if _libc.fallocate(fd, _PUNCH_HOLE, offset, num_bytes):
        code = ctypes.get_errno()
        raise OSError(code, f"fallocate: {os.strerror(code)}")


def _map_foreign(handle: Handle) -> tuple[int, int, int]:
    """Start of a mapping, address of the span in it, and bytes of the mapping."""
    problem = f"no view of {format_size(handle.num_bytes)} of process {handle.pid}"
    if handle.fd < 0:
        raise JitllmError(f"{problem}: they are private")
    try:
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY)
    except OSError as error:
        raise JitllmError(f"{problem}: {error.strerror}", "is it on this node?") from error
    try:
        length = max(round_up(handle.num_bytes), PAGE_BYTES)
        # A huge page of the file is one here where both begin at a multiple of its size.
        total = length + HUGE_PAGE_BYTES
        mapped = _libc.mmap(None, total, _PROT_NONE, _NOTHING, -1, 0)
        address = mapped
        if mapped != _MAP_FAILED:
            start, flags = mapped + -mapped % HUGE_PAGE_BYTES, mmap.MAP_SHARED | _MAP_FIXED
            address = _libc.mmap(start, length, mmap.PROT_READ, flags, fd, _SHARED_START)
    finally:
        os.close(fd)
    if address == _MAP_FAILED:
        raise JitllmError(f"{problem}: {os.strerror(ctypes.get_errno())}")
    return int(mapped), int(address), total


class Span:
    """A reservation: `num_bytes` at `address`; `close` it, or use it in a `with`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._is_closed = False
        self._is_poisoned = os.environ.get(POISON_VARIABLE) == "1"
        try:
            self._map, self._skipped = self._reserve()
        except (OSError, OverflowError) as error:
            raise JitllmError(
                f"no address space for {format_size(num_bytes)}: {error}",
                "raise the limit (ulimit -v) or run a smaller model",
            ) from error
        self.address = _start_of(self._map) + self._skipped
        """Of the first byte; it never changes."""
        _spans[self.address] = self
        # A huge page that reaches past the end of a block would take more than the block is
        # charged for, so nothing becomes one unasked.
        self._advise("small", 0, num_bytes)

    def _reserve(self) -> tuple[mmap.mmap, int]:
        """A mapping, and where in it the span begins."""
        # The system aligns to small pages only: reserve one huge page more and begin inside.
        mapped = max(round_up(self.num_bytes), PAGE_BYTES) + HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        mapping = mmap.mmap(-1, mapped, flags=flags)
        return mapping, -_start_of(mapping) % HUGE_PAGE_BYTES

    def handle(self) -> Handle:
        """What names the span elsewhere."""
        return Handle(os.getpid(), self.address, self.num_bytes)

    def use_huge_pages(self, offset: int, num_bytes: int) -> None:
        """Back `[offset, offset + num_bytes)` by huge pages where a whole one fits."""
        start = round_up(offset, HUGE_PAGE_BYTES)
        stop = (offset + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if start < stop:
            self._advise("huge", start, stop - start)

    def settle(self) -> None:
        """All of it was written, and stays for long: have it in the huge pages that were asked for,
        if the system gives them to memory of this kind only when told."""

    def view(self, offset: int = 0, num_bytes: int | None = None) -> memoryview:
        """The writable bytes `[offset, offset + num_bytes)`; by default up to the end."""
        stop = self.num_bytes if num_bytes is None else offset + num_bytes
        if not 0 <= offset <= stop <= self.num_bytes:
            raise ValueError(f"[{offset}, {stop}) is outside of {self.num_bytes} bytes")
        return memoryview(self._map)[self._skipped + offset : self._skipped + stop]

    def release(self, offset: int, num_bytes: int) -> None:
        """Give the pages of `[offset, offset + num_bytes)` back; what they hold is lost.

        `offset` is a multiple of `PAGE_BYTES`; the last page goes back even when it is in part
        beyond the range. They read as zeros again, or as `POISON` where that is asked for.
        """
        self._check(offset, num_bytes)
        if self._is_poisoned:
            _libc.memset(self.address + offset, POISON, round_up(num_bytes))
        else:
            self._give_back(offset, num_bytes)

    def hand_over(self, offset: int, num_bytes: int, to: int, to_bytes: int) -> None:
        """`release` where `[to, to + to_bytes)`, which holds nothing, is written next: as much of
        its pages as can be goes there, and the rest back to the system.

        What the destination holds is undefined. Both offsets are multiples of `PAGE_BYTES`.
        """
        self._check(offset, num_bytes)
        self._check(to, to_bytes)
        moved = 0
        if not self._is_poisoned:
            moved = self._move(offset, to, min(num_bytes, to_bytes) // PAGE_BYTES * PAGE_BYTES)
        if moved < num_bytes:
            self.release(offset + moved, num_bytes - moved)

    def _move(self, offset: int, to: int, num_bytes: int) -> int:
        """How many bytes from the start went to `to`, page by page, and are gone here."""
        # A call moves what is of one mapping, and every move makes another one: within pieces that
        # begin where huge pages do there is no bound of any.
        unit = HUGE_PAGE_BYTES if (offset - to) % HUGE_PAGE_BYTES == 0 else PAGE_BYTES
        whole = num_bytes // unit * unit
        if not self._moved(offset, to, whole):
            for at in range(0, whole, unit):
                if not self._moved(offset + at, to + at, unit):
                    return at
        is_rest_moved = self._moved(offset + whole, to + whole, num_bytes - whole)
        return num_bytes if is_rest_moved else whole

    def _moved(self, offset: int, to: int, num_bytes: int) -> bool:
        if not num_bytes:
            return True
        start = self.address
        moved = _libc.mremap(start + offset, num_bytes, num_bytes, _MREMAP, start + to)
        return bool(moved != _MAP_FAILED)

    def _give_back(self, offset: int, num_bytes: int) -> None:
        self._advise("release", offset, num_bytes)

    def close(self) -> None:
        """Give everything back; the address must not be used any more."""
        if self._is_closed:
            return
        del _spans[self.address]  # from here on nobody may count on what it holds
        self._give_back(0, self.num_bytes)
        self._is_closed = True
        # While somebody keeps a view there is an error, and the bare address space goes with it.
        with contextlib.suppress(BufferError):
            self._map.close()

    def _advise(self, what: str, offset: int, num_bytes: int) -> None:
        self._check(offset, num_bytes)
        # Through ctypes and not mmap.madvise, which would hold the GIL while pages are freed.
        if num_bytes and _libc.madvise(self.address + offset, num_bytes, _MADV[what]):
            code = ctypes.get_errno()
            # Without transparent huge pages in the kernel, advice about them means nothing.
            if what != "collapse" and (what == "release" or code != errno.EINVAL):
                raise OSError(code, f"madvise: {os.strerror(code)}")

    def _check(self, offset: int, num_bytes: int) -> None:
        if offset % PAGE_BYTES or not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise ValueError(f"[{offset}, {offset + num_bytes}) of {self.num_bytes} bytes")
        if self._is_closed:
            raise ValueError("the span is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class SharedSpan(Span):
    """A span of a file without a name (memfd), which lives while a process maps it.

    Whether it gets huge pages when it is written is the system's setting (`shmem_enabled`), which
    is mostly that it does not; `settle` is about what was written. It begins at _SHARED_START in
    the file.
    """

    def _reserve(self) -> tuple[mmap.mmap, int]:
        self._fd = os.memfd_create("jitllm", os.MFD_CLOEXEC)
        try:
            length = max(round_up(self.num_bytes), PAGE_BYTES)
            os.ftruncate(self._fd, _SHARED_START + length + HUGE_PAGE_BYTES)
            # Where the system puts a mapping is known once it is there; one of the same size is put
            # in the same place, mostly, and then can begin where in the file it has to.
            mapped, flags = length + HUGE_PAGE_BYTES, mmap.MAP_SHARED | _MAP_NORESERVE
            first = mmap.mmap(self._fd, mapped, flags=flags)
            skipped = -_start_of(first) % HUGE_PAGE_BYTES
            first.close()
            start = _SHARED_START - skipped
            return mmap.mmap(self._fd, mapped, flags=flags, offset=start), skipped
        except BaseException:
            os.close(self._fd)
            raise

    def handle(self) -> Handle:
        """What names the span elsewhere."""
        return Handle(os.getpid(), self.address, self.num_bytes, self._fd)

    def _move(self, offset: int, to: int, num_bytes: int) -> int:
        return 0  # a page of a file has its place in it

    def settle(self) -> None:
        """See `Span.settle`. Not everywhere possible, and of no consequence but for speed."""
        start = -self.address % HUGE_PAGE_BYTES
        stop = (start + self.num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if not start and stop:
            self._advise("collapse", 0, stop)

    def _give_back(self, offset: int, num_bytes: int) -> None:
        # Nobody who attached sees the bytes any more.
        self._check(offset, num_bytes)
        if num_bytes:
            punch(self._fd, _SHARED_START + offset, round_up(num_bytes))

    def close(self) -> None:
        """Give everything back, also what others attached to."""
        if not self._is_closed:
            super().close()
            os.close(self._fd)


# By address: what is mapped in this process, whoever asks. A handle names no object.
_spans: WeakValueDictionary[int, Span] = WeakValueDictionary()


def _start_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
