"""Memory at an address of our choice, so that an emulated processor can have it at the same one."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

ADDRESS = 0x20_0000_0000
"""Where no program, library or heap lies, neither here nor in what is emulated."""

SIZE_BYTES = 16 << 30
"""Of addresses: memory is taken when it is touched."""

FIXED_NOREPLACE = 0x100000

_LINE = 64

Scalar = TypeVar("Scalar", bound=np.generic)


class Arena:
    """A file without a name, mapped at ADDRESS; spans are given back when nobody has them."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("arena")
        os.ftruncate(self.fd, SIZE_BYTES)
        call = ctypes.CDLL(None, use_errno=True).mmap
        call.restype, size = ctypes.c_void_p, ctypes.c_size_t
        call.argtypes = (ctypes.c_void_p, size, *[ctypes.c_int] * 3, ctypes.c_long)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | FIXED_NOREPLACE
        found = call(ADDRESS, SIZE_BYTES, protection, flags, self.fd, 0)
        assert found == ADDRESS, os.strerror(ctypes.get_errno())
        self._end = ADDRESS
        self._free: dict[int, list[int]] = {}

    def take(self, size: int) -> NDArray[np.uint8]:
        """Bytes with whatever is in them, aligned to a cache line."""
        room = max(_LINE, 1 << (size - 1).bit_length())
        free = self._free.setdefault(room, [])
        if not free:
            free.append(self._end)
            self._end += room
            assert self._end <= ADDRESS + SIZE_BYTES
        address = free.pop()
        memory = (ctypes.c_uint8 * room).from_address(address)
        weakref.finalize(memory, free.append, address).atexit = False
        return np.frombuffer(memory, np.uint8)[:size]


ARENA = Arena()


def shared(values: NDArray[Scalar]) -> NDArray[Scalar]:
    """A copy in the arena."""
    copy = ARENA.take(values.nbytes).view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy
