"""Weight formats: how a matrix lies in the container and in every device's memory.

Knows bytes and bit planes. Knows no files, no kernels and no GGUF: `formats/layout.py` packs into
this layout, every kernel reads it in place. `docs/format.md` draws the pictures.

A matrix of `rows` x `cols` is cut into tiles of 16 rows (the last tile is padded with zero rows).
Within a tile the bytes run group by group along the row. Within a group they run plane by plane,
within a plane word by word: one 32-bit little-endian word of each of the 16 rows, side by side
(64 bytes), so a lane of a vector is a row.

- plane of 8 bits: word w holds weights 4w .. 4w+3, one a byte.
- plane of 4 bits: word w holds weights 8w .. 8w+7; byte j: low nibble weight 8w+j, high nibble
  weight 8w+4+j.
- plane of 2 bits: word w holds weights 16w .. 16w+15; byte j, bits 2i..2i+1: weight 16w+4i+j.
- plane of 1 bit: one word holds weights 0 .. 31; byte j, bit i: weight 4i+j.
- f32: word w is weight w. f16 and bf16: word w is weights 2w (low half) and 2w+1 (high half).

So shifting a word right by `bits * i` and masking every byte gives the four weights of the next
8-bit operand in order. Integers in planes are unsigned; the weight is (q - bias) * scale, or
q * scale - min.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

TILE_ROWS = 16
GROUP = 32
"""Activations are quantised in groups of 32, and every row is padded to a multiple of it."""

WORD_ROW_BYTES = 4 * TILE_ROWS
"""One word of each of the 16 rows: 64 bytes, one 512-bit register."""


class FormatCode(IntEnum):
    """Codes of weight formats in the container. Never reused, never renumbered."""

    F32 = 1
    F16 = 2
    BF16 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 9
    Q3_K = 10
    Q4_K = 11
    Q5_K = 12
    Q6_K = 13


@dataclass(frozen=True, slots=True)
class Format:
    """The bytes of one weight format. Offsets are within a group unless they say otherwise.

    planes: bits of each bit plane, low bits first; a 6-bit weight is (4, 2). Empty for floats.
    bias: subtracted from the unsigned integer; 0 when `has_min`.
    scale_cols: weights that share a scale: 32, or 16 for formats with two scales a group.
    super_cols: weights that share the super-scales `d` (and `dmin`): 256, or 0 for none.
    has_min: the weight is q * scale - min (or q * scale + min where `min_is_added`).

    A group without super-scales ends in f16 scales [16 rows], then f16 mins [16 rows] if any.
    A super-group begins with f16 d [16 rows], then f16 dmin [16 rows] if any; each of its
    8 groups ends in byte scales [scales a group][16 rows], then byte mins likewise. The weight's
    scale is d * byte scale, its min is dmin * byte min. Byte scales are signed where
    `scale_signed`. Q2_K: the byte scale is 0..15, the byte min 0..15.
    """

    code: FormatCode
    planes: tuple[int, ...] = ()
    float_bytes: int = 0
    bias: int = 0
    scale_cols: int = GROUP
    super_cols: int = 0
    has_min: bool = False
    min_is_added: bool = False
    scale_signed: bool = False

    @property
    def name(self) -> str:
        """Upper case, as users know it: Q4_K, F16."""
        return self.code.name

    @property
    def is_quantized(self) -> bool:
        """Meets activations quantised to 8 bits; float formats meet f32 activations."""
        return not self.float_bytes

    @property
    def bits(self) -> int:
        """Bits of one integer weight, 0 for floats."""
        return sum(self.planes)

    @property
    def scales_per_group(self) -> int:
        """1, or 2 where 16 weights share a scale."""
        return GROUP // self.scale_cols

    @property
    def payload_bytes(self) -> int:
        """Bytes of the integer (or float) planes of one group of a tile."""
        per_row = GROUP * self.float_bytes if self.float_bytes else GROUP * self.bits // 8
        return per_row * TILE_ROWS

    def plane_offset(self, plane: int) -> int:
        """Byte offset of a plane in its group."""
        return sum(GROUP * bits // 8 for bits in self.planes[:plane]) * TILE_ROWS

    @property
    def scale_offset(self) -> int:
        """Byte offset of the group's scales (f16, or bytes under super-scales)."""
        return self.payload_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale: 2 (f16), or 1 under super-scales, or 0 for floats."""
        if self.float_bytes:
            return 0
        return 1 if self.super_cols else 2

    @property
    def min_offset(self) -> int:
        """Byte offset of the group's mins."""
        return self.scale_offset + self.scale_bytes * self.scales_per_group * TILE_ROWS

    @property
    def group_bytes(self) -> int:
        """Bytes of one group of a tile."""
        mins = self.scale_bytes * self.scales_per_group * TILE_ROWS if self.has_min else 0
        return self.min_offset + mins

    @property
    def super_header_bytes(self) -> int:
        """Bytes of d (and dmin) before the groups of a super-group of a tile."""
        if not self.super_cols:
            return 0
        return 2 * TILE_ROWS * (2 if self.has_min else 1)

    @property
    def col_multiple(self) -> int:
        """A row's length must be a multiple of this in the source; padded to GROUP for floats."""
        return self.super_cols or (1 if self.float_bytes else GROUP)

    def padded_cols(self, cols: int) -> int:
        """Weights a row occupies: the next multiple of GROUP."""
        return -(-cols // GROUP) * GROUP

    def tile_bytes(self, cols: int) -> int:
        """Bytes of one tile of 16 rows."""
        groups = self.padded_cols(cols) // GROUP
        if not self.super_cols:
            return groups * self.group_bytes
        per_super = self.super_cols // GROUP
        return groups // per_super * (self.super_header_bytes + per_super * self.group_bytes)

    def matrix_bytes(self, rows: int, cols: int) -> int:
        """Bytes of a whole matrix, the padding of the last tile included."""
        return num_tiles(rows) * self.tile_bytes(cols)


def num_tiles(rows: int) -> int:
    """Tiles of 16 rows that hold `rows` rows."""
    return -(-rows // TILE_ROWS)


FORMATS: dict[FormatCode, Format] = {
    f.code: f
    for f in (
        Format(FormatCode.F32, float_bytes=4),
        Format(FormatCode.F16, float_bytes=2),
        Format(FormatCode.BF16, float_bytes=2),
        Format(FormatCode.Q4_0, planes=(4,), bias=8),
        Format(FormatCode.Q4_1, planes=(4,), has_min=True, min_is_added=True),
        Format(FormatCode.Q5_0, planes=(4, 1), bias=16),
        Format(FormatCode.Q5_1, planes=(4, 1), has_min=True, min_is_added=True),
        Format(FormatCode.Q8_0, planes=(8,), bias=128),
        Format(FormatCode.Q2_K, planes=(2,), scale_cols=16, super_cols=256, has_min=True),
        Format(
            FormatCode.Q3_K,
            planes=(2, 1),
            bias=4,
            scale_cols=16,
            super_cols=256,
            scale_signed=True,
        ),
        Format(FormatCode.Q4_K, planes=(4,), super_cols=256, has_min=True),
        Format(FormatCode.Q5_K, planes=(4, 1), super_cols=256, has_min=True),
        Format(
            FormatCode.Q6_K,
            planes=(4, 2),
            bias=32,
            scale_cols=16,
            super_cols=256,
            scale_signed=True,
        ),
    )
}
"""Every format the kernels read, by code."""


# --- quantised activations ------------------------------------------------------------------
#
# One record of 64 bytes per group of 32 activations: a cache line that a matrix product reads
# whole. int8 q[32], then (offsets below) f32 scale, f32 sum, i32 -sum(q), i32 -sum of each half,
# f32 sum of each half, where an f32 sum is float(integer sum) * scale.

ACT_RECORD_BYTES = 64
ACT_SCALE = 32
ACT_SUM = 36
ACT_NEG_ISUM = 40
ACT_NEG_ISUM_LO = 44
ACT_NEG_ISUM_HI = 48
ACT_SUM_LO = 52
ACT_SUM_HI = 56


def activation_row_bytes(cols: int) -> int:
    """Bytes of one quantised activation row of `cols` values (padded to GROUP)."""
    return -(-cols // GROUP) * ACT_RECORD_BYTES
