"""Keys and values of sequences that wait without pages: in a file, or in host memory.

A history is cut into stretches of positions, and a stretch into what each block has of it, which
lies as `jitllm.memory.history` says. So it can be handed to whoever owns a block when it comes
back, whatever owned it before. A file has no name: it ends with its process, however that ends.
Knows bytes and files. Knows no device and no sequence; what it does may wait for a disk.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from jitllm.errors import JitllmError
from jitllm.memory.nameless import open_nameless, refusal
from jitllm.units import format_size

_WHAT = "a parked history"


class Layout:
    """Where everything of a history lies.

    kv_bytes: bytes of a position, by block. stretch_bytes: most that a stretch takes; one position
    always is one.
    """

    def __init__(self, kv_bytes: Sequence[int], stretch_bytes: int) -> None:
        self._kv_bytes = tuple(kv_bytes)
        *self._before, self.position_bytes = accumulate(self._kv_bytes, initial=0)
        self.stretch_tokens = max(stretch_bytes // max(self.position_bytes, 1), 1)

    def stretches(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Half-open ranges of positions, in order."""
        for start in range(0, num_tokens, self.stretch_tokens):
            yield start, min(start + self.stretch_tokens, num_tokens)

    def runs(self, blocks: Iterable[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of what blocks, in ascending order, have of a stretch; neighbours
        together."""
        count = stop - start
        begin = end = -1
        for block in blocks:
            offset = start * self.position_bytes + count * self._before[block]
            if offset != end:
                if begin < end:
                    yield begin, end - begin
                begin = offset
            end = offset + count * self._kv_bytes[block]
        if begin < end:
            yield begin, end - begin


class Store(Protocol):
    """Bytes that are written once and read later. Not for two threads at a time."""

    def write(self, offset: int, data: memoryview) -> None:
        """Raises `DiskFull` or `JitllmError`."""
        ...

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Raises `JitllmError` for what cannot be read."""
        ...

    def close(self) -> None:
        """Give everything back. Twice is as good as once."""
        ...


class FileStore:
    """A file without a name in `folder`, which is made if there is none; only its user reads it."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder = folder
        self._num_bytes = num_bytes
        self._fd = open_nameless(folder, _WHAT)
        try:
            self._reserve()
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> None:
        """Take the room at once, so that a full disk is found before anything is given up."""
        if not self._num_bytes:
            return
        try:
            os.posix_fallocate(self._fd, 0, self._num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise self._refusal(error) from error

    def write(self, offset: int, data: memoryview) -> None:
        """See `Store.write`."""
        while data:
            try:
                count = os.pwrite(self._fd, data, offset)
            except OSError as error:
                raise self._refusal(error) from error
            offset, data = offset + count, data[count:]

    def read(self, offset: int, num_bytes: int) -> bytes:
        """See `Store.read`."""
        parts = []
        while num_bytes:
            try:
                part = os.pread(self._fd, num_bytes, offset)
            except OSError as error:
                raise self._refusal(error) from error
            if not part:
                raise JitllmError(
                    f"what was parked in {self._folder} ends {format_size(num_bytes)} too early"
                )
            parts.append(part)
            offset, num_bytes = offset + len(part), num_bytes - len(part)
        return b"".join(parts)

    def close(self) -> None:
        """See `Store.close`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _refusal(self, error: OSError) -> JitllmError:
        return refusal(error, self._folder, self._fd, _WHAT, self._num_bytes)


class MemoryStore:
    """Memory of this process, which goes back to the system at the end."""

    def __init__(self, num_bytes: int) -> None:
        try:
            self._map = mmap.mmap(-1, max(num_bytes, 1))
        except (OSError, OverflowError) as error:
            raise JitllmError(
                f"no memory to park {format_size(num_bytes)}: {error}", "park it on disk"
            ) from error

    def write(self, offset: int, data: memoryview) -> None:
        """See `Store.write`."""
        self._map[offset : offset + len(data)] = data

    def read(self, offset: int, num_bytes: int) -> bytes:
        """See `Store.read`."""
        return self._map[offset : offset + num_bytes]

    def close(self) -> None:
        """See `Store.close`."""
        self._map.close()


class Parked:
    """The history of one sequence, its first `num_tokens` positions, in a store of its own."""

    def __init__(self, layout: Layout, num_tokens: int, store: Store, *, where: str) -> None:
        self.num_tokens = num_tokens
        self.num_bytes = num_tokens * layout.position_bytes
        self.where = where
        """"disk" or "memory"."""
        self._layout = layout
        self._store = store

    def stretches(self) -> Iterator[tuple[int, int]]:
        """The ranges of positions that it is put and got in."""
        return self._layout.stretches(self.num_tokens)

    def put(self, blocks: Sequence[int], start: int, stop: int, data: bytes) -> None:
        """Take in what blocks, in ascending order, have of a stretch."""
        rest = memoryview(data)
        for offset, num_bytes in self._layout.runs(blocks, start, stop):
            self._store.write(offset, rest[:num_bytes])
            rest = rest[num_bytes:]
        if rest:
            raise ValueError(f"{len(rest)} bytes too many of blocks {blocks}")

    def get(self, blocks: Sequence[int], start: int, stop: int) -> bytes:
        """What blocks, in ascending order, have of a stretch."""
        runs = self._layout.runs(blocks, start, stop)
        return b"".join(self._store.read(offset, num_bytes) for offset, num_bytes in runs)

    def close(self) -> None:
        """Give everything back. Twice is as good as once."""
        self._store.close()
