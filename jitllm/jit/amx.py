"""Matrix products of bytes in the tile registers of Intel's AMX.

Exact in i32, as every dot product of bytes here is. Knows the expression layer and the unit's
registers; knows no weight format, and not whether a processor has them (`trial.py`).
"""

from __future__ import annotations

import struct

from jitllm.jit.emit import Kernel, Value, i8, i32, i64

ROWS = 16
"""Rows of a left matrix, and columns of a right one."""

PRODUCT_BYTES = ROWS * ROWS * 4

_PRODUCT, _LEFT, _RIGHT = range(3)
"""Tile registers."""

_LINE_BYTES = 64


class Amx:
    """The matrix unit in one kernel, for products over `depth` bytes, a multiple of 4 up to 64."""

    def __init__(self, k: Kernel, depth: int) -> None:
        self.k = k
        self._config = k.lanes(struct.unpack("<16i", _configuration(depth)), i32)
        self._is_on = k.var(0, i64)

    def switch_on(self) -> None:
        """The registers are ours from here on; once in a call of the kernel is enough."""
        k = self.k
        with k.if_(self._is_on.get().eq(0)):
            config = k.stack(i32, 16)
            k.store(self._config, config, align=_LINE_BYTES)
            k.intrinsic("llvm.x86.ldtilecfg", k.pointer(config))
            self._is_on.set(1)

    def switch_off(self) -> None:
        """Give the registers back before the kernel returns: what runs next in the thread finds
        them as they were, and the system has nothing of them to keep when it switches threads."""
        with self.k.if_(self._is_on.get().ne(0)):
            self.k.intrinsic("llvm.x86.tilerelease")

    def multiply(self, left: Value, stride: Value, right: Value, to: Value) -> None:
        """to, i32 [16, 16] = left, i8 [16, depth], times right, i8 [depth / 4, 16, 4]: byte
        [p, n, i] is row 4p + i of column n.

        All of them are addresses; rows of left are `stride` bytes apart.
        """
        product, left_tile, right_tile = (self.k.const(n, i8) for n in (_PRODUCT, _LEFT, _RIGHT))
        line = self.k.const(_LINE_BYTES)
        self._do("tilezero", product)
        self._do("tileloadd64", left_tile, self.k.pointer(left), stride)
        self._do("tileloadd64", right_tile, self.k.pointer(right), line)
        self._do("tdpbssd", product, left_tile, right_tile)
        self._do("tilestored64", product, self.k.pointer(to), line)

    def _do(self, name: str, *operands: Value) -> None:
        self.k.intrinsic(f"llvm.x86.{name}", *operands)


def _configuration(depth: int) -> bytes:
    """What LDTILECFG reads: palette 1, then bytes of a row and rows of each register."""
    row_bytes, rows = [0] * 16, [0] * 16
    for tile, bytes_, rows_ in (
        (_PRODUCT, ROWS * 4, ROWS),
        (_LEFT, depth, ROWS),
        (_RIGHT, ROWS * 4, depth // 4),
    ):
        row_bytes[tile], rows[tile] = bytes_, rows_
    return struct.pack("<16B16H16B", 1, *[0] * 15, *row_bytes, *rows)
