"""Chunks of tiles, unpacked once for all activation rows that meet them: bytes and f32 scales.

`amx.py` and `pairs.py` multiply what is here. Knows no activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.jit.emit import Kernel, Value, f32, f32v, i8, i32, i32v, vec
from jitllm.kernels.layout import TILE_ROWS, WORD_ROW_BYTES, Format
from jitllm.kernels.matmul.groups import OPERANDS, Group

CHUNK_GROUPS = 8
"""Of a super-group, and what fits in the first cache beside activations: 4 KB of bytes a tile, and
on a matrix unit 8 KB of products (16 KB with two scales a group). Twice or three times as many are
no faster."""

GROUP_BYTES = OPERANDS * WORD_ROW_BYTES
"""An unpacked group of a tile."""


class Unpacked:
    """Memory of a chunk of some tiles.

    bytes: i8 [tiles, groups, operands, 16, 4]. scales: f32 [tiles, groups, parts, 16], where parts
    of a group have a scale each. mins: likewise, as they are added; None in formats without them.
    """

    def __init__(self, k: Kernel, fmt: Format, num_tiles: int = 1, *, is_signed: bool) -> None:
        """is_signed: weights are kept without their bias; else they stay unsigned."""
        self.k = k
        self.fmt = fmt
        self.is_signed = is_signed
        self.parts = fmt.scales_per_group
        num_groups = num_tiles * CHUNK_GROUPS
        num_scales = num_groups * self.parts * TILE_ROWS
        self.bytes = k.stack(i32, num_groups * OPERANDS * TILE_ROWS)
        self.scales = k.stack(f32, num_scales)
        self.mins = k.stack(f32, num_scales) if fmt.has_min else None

    def kept(self, group: Group, n: Value) -> Group:
        """The same group, of which all that is asked for is kept as the n-th."""
        return _Kept(self, n, group)

    def group(self, n: Value) -> Group:
        """The n-th group, as it was kept."""
        return _Loaded(self, n)

    def operand_at(self, n: Value, p: int) -> Value:
        """Address of an operand of a group."""
        return self.bytes + n * GROUP_BYTES + p * WORD_ROW_BYTES

    def part_offset(self, n: Value, half: int) -> Value:
        """Where scale and minimum of a part of a group are, from the first ones."""
        return (n * self.parts + half) * WORD_ROW_BYTES


@dataclass(frozen=True, slots=True)
class _Kept:
    """Reads a group and writes it down; n: its number among those of all tiles."""

    memory: Unpacked
    n: Value
    source: Group

    def operand(self, p: int) -> Value:
        words, memory = self.source.operand(p), self.memory
        kept = words
        if memory.is_signed and memory.fmt.bias:
            kept = (words.bits(vec(i8, 4 * TILE_ROWS)) + -memory.fmt.bias).bits(i32v)
        memory.k.store(kept, memory.operand_at(self.n, p), align=64)
        return words

    def scale(self, half: int) -> Value:
        scale, memory = self.source.scale(half), self.memory
        memory.k.store(scale, memory.scales + memory.part_offset(self.n, half), align=64)
        return scale

    def low(self, half: int) -> Value:
        low, memory = self.source.low(half), self.memory
        assert memory.mins is not None
        memory.k.store(low, memory.mins + memory.part_offset(self.n, half), align=64)
        return low


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A group that is kept; n: its number among those of all tiles."""

    memory: Unpacked
    n: Value

    def operand(self, p: int) -> Value:
        memory = self.memory
        offset = p * WORD_ROW_BYTES
        return memory.k.load(memory.operand_at(self.n, 0), i32v, offset=offset, align=64)

    def scale(self, half: int) -> Value:
        memory = self.memory
        return memory.k.load(memory.scales + memory.part_offset(self.n, half), f32v, align=64)

    def low(self, half: int) -> Value:
        memory = self.memory
        assert memory.mins is not None
        return memory.k.load(memory.mins + memory.part_offset(self.n, half), f32v, align=64)
