"""Copies between strided memory, a table of them in one native call.

Knows copy records (`kernels/copy`). Knows nothing of what is copied.
"""

from __future__ import annotations

import ctypes
from array import array

from jitllm.jit.cpu import Compiler
from jitllm.kernels.copy import RECORD_WORDS
from jitllm.kernels.op import KernelSpec

_COPY = KernelSpec.of("copy")


class Copier:
    """Runs tables of copies, in the thread that asks, without the GIL."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler  # the code lives as long as it does
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
        self._copy = kind(compiler.build([_COPY])[_COPY])

    def run(self, table: array[int], count: int | None = None) -> None:
        """Do the first `count` copies of a table of records, by default all, in order.

        Everything that they name has to be there: nothing is checked.
        """
        address, num_words = table.buffer_info()
        self._copy(address, num_words // RECORD_WORDS if count is None else count)
