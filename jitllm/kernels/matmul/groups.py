"""Groups of weights in registers: fetched ahead, unpacked to bytes, and their scales.

Knows the bit planes of `kernels/layout.py`; knows no activations.
"""

from __future__ import annotations

from typing import Protocol

from jitllm.jit.emit import Kernel, Value, i8, i32, i32v, vec
from jitllm.kernels.layout import GROUP, TILE_ROWS, WORD_ROW_BYTES, Format

OPERANDS = GROUP // 4
"""Vectors of 16 x 4 weights in a group."""

AHEAD_BYTES = 16 << 10
"""How far ahead weights are fetched, at most. Out of memory and with 8 rows, 1 KB gives 1.3 to 1.5
times the rate at which the processor fetches by itself, 4 KB 1.7 to 2.6 times, 16 KB 2.2 to 3.7
times, and more gives no more; it would be lost where caches are small.

One row reads weights once: they are kept out of the caches behind the first, where they would be
gone before the next step, and all else that is used between two steps stays instead. (A step of one
row is 1.05 times as fast, and what Python does between two of them takes 0.7 of the time, as it
finds its memory in a cache.)"""

LINE_BYTES = 64


def fetch(k: Kernel, fmt: Format, group: Value, num_rows: int) -> None:
    """Fetch the group at an address, for blocks of so many rows."""
    for offset in range(0, fmt.group_bytes, LINE_BYTES):
        k.prefetch(group + offset, is_read_once=num_rows == 1)


class Group(Protocol):
    """A group of the 16 rows of a tile, wherever its bytes are."""

    def operand(self, p: int) -> Value:
        """i32 [16]: unsigned weights 4p .. 4p+3, a byte each."""

    def scale(self, half: int) -> Value:
        """f32 [16]: the scale of the group, or of a half of it where it has two of them."""

    def low(self, half: int) -> Value:
        """f32 [16]: the minimum as it is added, of a format that has them."""


class PackedGroup:
    """A group as it lies in memory, unpacked in registers. d, d_min: of its super-group, if any."""

    def __init__(
        self, k: Kernel, fmt: Format, address: Value, d: Value | None, d_min: Value | None
    ) -> None:
        self.k = k
        self.fmt = fmt
        self.address = address
        self._supers = d, d_min
        self._words: dict[int, Value] = {}

    def operand(self, p: int) -> Value:
        """As `Group.operand`."""
        fmt = self.fmt
        parts: list[Value] = []
        position = 0
        for plane, bits in enumerate(fmt.planes):
            per_word = 8 // bits
            raw = self._word(fmt.plane_offset(plane) + p // per_word * WORD_ROW_BYTES)
            shift = p % per_word * bits - position
            mask = ((1 << bits) - 1) << position
            moved = raw >> shift if shift > 0 else raw << -shift if shift < 0 else raw
            parts.append(moved if bits == 8 else moved & mask * 0x01010101)
            position += bits
        return parts[0] if len(parts) == 1 else parts[0] | parts[1]

    def scale(self, half: int) -> Value:
        """As `Group.scale`."""
        return self._scale(self.fmt.scale_offset, half, self._supers[0])

    def low(self, half: int) -> Value:
        """As `Group.low`."""
        low = self._scale(self.fmt.min_offset, half, self._supers[1])
        return low if self.fmt.min_is_added else -low

    def _word(self, offset: int) -> Value:
        if offset not in self._words:
            self._words[offset] = self.k.load(self.address, i32v, offset=offset)
        return self._words[offset]

    def _scale(self, offset: int, half: int, super_scale: Value | None) -> Value:
        offset += half * TILE_ROWS * self.fmt.scale_bytes
        if super_scale is None:
            return self.k.load_f16(self.address + offset)
        small = self.k.load(self.address, vec(i8), offset=offset)
        wide = small.sext(i32) if self.fmt.scale_signed else small.zext(i32)
        return super_scale * wide.to_float()


def super_scales(k: Kernel, fmt: Format, head: Value) -> tuple[Value | None, Value | None]:
    """f32 [16] each: d and dmin of 16 rows, from the head of a super-group; None where a format has
    no such thing."""
    if not fmt.super_cols:
        return None, None
    return k.load_f16(head), k.load_f16(head + 2 * TILE_ROWS) if fmt.has_min else None
