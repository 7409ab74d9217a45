"""Pages of keys and values in a file: room for every page of every set, whether it is there or not.

The pages of a column lie side by side in the order of their sets, so that sets which were taken one
after the other are read at once. The file is sparse: what was never written takes no disk. Reads
and writes go past the page cache where the filesystem has that, as in `jitllm.formats.reader`.
Knows offsets and addresses. Knows not what is where at the moment.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from jitllm.devices.memory import punch
from jitllm.errors import JitllmError
from jitllm.memory.columns import Columns
from jitllm.memory.nameless import open_nameless, refusal

T = TypeVar("T")

_WHAT = "keys and values beyond -kv-budget"


class PageFile:
    """A file without a name in `folder`. Pages of one set are not for two threads at a time.

    layout: the pages of a set. Raises `JitllmError` for a folder that cannot be used.
    """

    def __init__(self, folder: Path, layout: Columns, capacity: int) -> None:
        self._folder = folder
        self._sizes = [layout.num_bytes((column,)) for column in range(len(layout))]
        self._starts = [capacity * offset for offset in layout.offsets]
        self._capacity = capacity
        self._num_bytes = capacity * layout.stride_bytes
        self._fd = open_nameless(folder, _WHAT)
        try:
            os.truncate(self._fd, self._num_bytes)
        except OSError as error:
            failure = refusal(error, folder, self._fd, _WHAT, self._num_bytes)
            self.close()
            raise failure from error
        self._set_direct(True)

    def write(self, page_set: int, column: int, address: int) -> int:
        """Write a page that lies at an address; how many bytes that were. Raises `DiskFull`, or
        `JitllmError`."""
        size = self._sizes[column]
        offset, rest = self._starts[column] + page_set * size, _view(address, size)
        while rest:
            count = self._attempt(os.pwrite, rest, offset, size)
            offset, rest = offset + count, rest[count:]
        return size

    def read(self, first_set: int, column: int, addresses: Sequence[int]) -> int:
        """Read the pages of a column in neighbouring sets, each to its address; how many bytes
        that were. Raises `JitllmError`."""
        size = self._sizes[column]
        offset = self._starts[column] + first_set * size
        rest = [_view(address, size) for address in addresses]
        while rest:
            count = self._attempt(os.preadv, rest, offset, size)
            if not count:
                raise JitllmError(f"{_WHAT} in {self._folder}: the file was cut short")
            offset += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]
        return size * len(addresses)

    def clear(self) -> None:
        """Nothing in it is wanted any more: its disk space goes back."""
        os.truncate(self._fd, 0)
        os.truncate(self._fd, self._num_bytes)

    def keep_only(self, sets: Set[int]) -> None:
        """Nothing of other sets is wanted any more: their disk space goes back, where the
        filesystem can do that."""
        edges = [-1, *sorted(sets), self._capacity]
        gaps = [(start + 1, stop) for start, stop in pairwise(edges) if start + 1 < stop]
        with suppress(OSError):
            for start, stop in gaps:
                for first, size in zip(self._starts, self._sizes, strict=True):
                    punch(self._fd, first + start * size, (stop - start) * size)

    def close(self) -> None:
        """Give everything back. Twice is as good as once."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _attempt(
        self, call: Callable[[int, T, int], int], data: T, offset: int, num_bytes: int
    ) -> int:
        """One system call for a page, without O_DIRECT from now on where that is refused."""
        try:
            return call(self._fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise refusal(error, self._folder, self._fd, _WHAT, num_bytes) from error
        self._set_direct(False)
        return self._attempt(call, data, offset, num_bytes)

    def _set_direct(self, is_direct: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
            self._is_direct = is_direct
        except OSError:  # the filesystem has no such reads
            self._is_direct = False


def _view(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")
