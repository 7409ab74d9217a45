"""Whole matrices into the tiles of `layout.py` and out of them again, in NumPy.

Serves conversion and the kernels' references; no token's arithmetic passes through here. Knows
the layout; knows no source format and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jitllm.kernels.layout import GROUP, TILE_ROWS, Format, num_tiles

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Parts:
    """A matrix [rows, cols] as the numbers that its format stores, row by row.

    q: u8 [rows, cols], the unsigned integers; of float formats their bits, u16 or u32.
    scales, mins: f16 bits, u16 [rows, cols / scale_cols]; under super-scales bytes, u8 (a signed
    byte scale as its bits). None where the format has none.
    d, dmin: f16 bits, u16 [rows, cols / super_cols], or None.
    """

    q: NDArray[Any]
    scales: NDArray[Any] | None = None
    mins: NDArray[Any] | None = None
    d: NDArray[np.uint16] | None = None
    dmin: NDArray[np.uint16] | None = None


def assemble(form: Format, parts: Parts) -> Bytes:
    """The tiles of a matrix: u8 [tiles, tile_bytes]. Rows and columns of padding are zeros."""
    rows, cols = parts.q.shape
    tiles = np.zeros((num_tiles(rows), form.tile_bytes(cols)), np.uint8)
    for field, values in zip(_fields(form, tiles), _stored(form, parts), strict=True):
        field[...] = _by_lane(values, field.shape)
    return tiles


def take_apart(form: Format, data: ArrayLike | bytes, rows: int, cols: int) -> Parts:
    """The numbers in the tiles of a matrix [rows, cols]; inverse of `assemble`."""
    flat = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.asarray(data, np.uint8)
    tiles = flat.reshape(num_tiles(rows), form.tile_bytes(cols))
    fields = [_by_row(field)[:rows] for field in _fields(form, tiles)]
    planes = len(form.planes) or 1
    words, rest = fields[:planes], fields[planes:]
    named = dict(zip(_scale_names(form), rest, strict=True))
    return Parts(_join_planes(form, words)[:, :cols], **named)


def integers(form: Format, parts: Parts) -> NDArray[np.int32]:
    """The integer weights, bias taken off: i32 [rows, cols]. Quantised formats only."""
    return parts.q.astype(np.int32) - form.bias


def scales(form: Format, parts: Parts) -> NDArray[np.float32]:
    """f32 [rows, cols / scale_cols]: what multiplies an integer. Quantised formats only."""
    return _scaled(form, parts.scales, parts.d, form.scale_signed)


def mins(form: Format, parts: Parts) -> NDArray[np.float32] | None:
    """f32 [rows, cols / scale_cols]: what the format's min subtracts (or adds); None without."""
    return _scaled(form, parts.mins, parts.dmin, False) if form.has_min else None


def weights(form: Format, parts: Parts) -> NDArray[np.float32]:
    """f32 [rows, cols] by the one arithmetic: float(q) * s, or fma(float(q), s, -m or +m)."""
    if form.float_bytes == 4:
        return np.ascontiguousarray(parts.q).view(np.float32)
    if form.float_bytes:
        return widen(form, parts.q)
    with np.errstate(all="ignore"):  # damaged scales are infinite or no numbers at all
        s = np.repeat(scales(form, parts), form.scale_cols, axis=1)
        q = integers(form, parts).astype(np.float32)
        m = mins(form, parts)
        if m is None:
            return q * s
        m = np.repeat(m, form.scale_cols, axis=1)
        return fma(q, s, m if form.min_is_added else -m)


def widen(form: Format, bits: NDArray[Any]) -> NDArray[np.float32]:
    """Bits of f16 or bf16 as f32, exactly."""
    if form.name == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return _half(bits)


def fma(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> NDArray[np.float32]:
    """a * b + c in f32, rounded once.

    The product is exact in f64; the sum is rounded to odd there, so that rounding it again to f32
    is as if it had been rounded only once.
    """
    with np.errstate(all="ignore"):
        p, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
        total = p + c
        virtual = total - p
        error = (p - (total - virtual)) + (c - virtual)
        bits = np.ascontiguousarray(total).view(np.int64)
        is_even_and_inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
        towards = np.where((error > 0) == (total > 0), 1, -1)
        odd = np.where(is_even_and_inexact, bits + towards, bits).view(np.float64)
        return odd.astype(np.float32)


# --- where the fields of a tile lie -----------------------------------------------------------


def _fields(form: Format, tiles: Bytes) -> list[NDArray[Any]]:
    """Views into tiles, lanes last: the planes (or floats) as words, then scales, mins, d, dmin.

    Shapes: [tiles, supers, groups a super, words or scales a group, 16] and, for d and dmin,
    [tiles, supers, 1, 1, 16]. A format without super-scales has one group a super.
    """
    head = form.super_header_bytes
    per_super = form.super_cols // GROUP or 1
    supers = tiles.reshape(len(tiles), -1, head + per_super * form.group_bytes)
    groups = supers[..., head:].reshape(*supers.shape[:2], per_super, form.group_bytes)

    def field(source: Bytes, start: int, width: int, count: int) -> NDArray[Any]:
        part = source[..., start : start + width * count * TILE_ROWS].view(f"<u{width}")
        return part.reshape(*part.shape[:-1], count, TILE_ROWS)

    starts = [form.plane_offset(i) for i in range(len(form.planes) or 1)]
    counts = form.planes or (8 * form.float_bytes,)
    found = [field(groups, at, 4, n) for at, n in zip(starts, counts, strict=True)]
    if form.is_quantized:
        width, count = form.scale_bytes, form.scales_per_group
        found.append(field(groups, form.scale_offset, width, count))
        if form.has_min:
            found.append(field(groups, form.min_offset, width, count))
    for at in range(0, head, 2 * TILE_ROWS):
        found.append(field(supers, at, 2, 1)[:, :, None])
    return found


def _scale_names(form: Format) -> tuple[str, ...]:
    """Fields of `Parts` after `q`, in the order of `_fields`."""
    if not form.is_quantized:
        return ()
    names = ("scales", "mins") if form.has_min else ("scales",)
    supers = ("d", "dmin") if form.has_min else ("d",)
    return names + (supers if form.super_cols else ())


def _stored(form: Format, parts: Parts) -> list[NDArray[Any]]:
    """The values of `parts` in the order of `_fields`, row by row: [rows, n]."""
    return [*_split_planes(form, parts.q), *(getattr(parts, n) for n in _scale_names(form))]


def _by_lane(values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """[rows, supers * groups * n] as [tiles, supers, groups, n, 16], the shape of a field."""
    tiles, supers, groups, n, lanes = shape
    if missing := tiles * lanes - len(values):
        values = np.pad(values, ((0, missing), (0, 0)))
    return np.moveaxis(values.reshape(tiles, lanes, supers, groups, n), 1, -1)


def _by_row(field: NDArray[Any]) -> NDArray[Any]:
    """[tiles, supers, groups, n, 16] as [tiles * 16, supers * groups * n]: undoes `_by_lane`."""
    return np.ascontiguousarray(np.moveaxis(field, -1, 1)).reshape(len(field) * TILE_ROWS, -1)


def _split_planes(form: Format, q: NDArray[Any]) -> list[NDArray[np.uint32]]:
    """Each plane's words, u32 [rows, groups * words a group]; of floats all their words."""
    padding = form.padded_cols(q.shape[1]) - q.shape[1]
    padded = np.ascontiguousarray(np.pad(q, ((0, 0), (0, padding))) if padding else q)
    fours: NDArray[np.uint32] = padded.view("<u4")  # of integers: four weights a word, a byte each
    if not form.is_quantized:
        return [fours]
    planes: list[NDArray[np.uint32]] = []
    below = 0
    for bits in form.planes:
        part = ((fours >> np.uint32(below)) & _every_byte(bits)).reshape(len(q), -1, 8 // bits)
        word = part[..., 0].copy()
        for i in range(1, 8 // bits):
            word |= part[..., i] << np.uint32(bits * i)
        planes.append(word)
        below += bits
    return planes


def _join_planes(form: Format, planes: Sequence[NDArray[np.uint32]]) -> NDArray[Any]:
    """Weights as u8, or floats as their bits, [rows, padded cols]; inverse of `_split_planes`."""
    if not form.is_quantized:
        return planes[0].view(f"<u{form.float_bytes}")
    rows, below = len(planes[0]), 0
    fours: Any = 0
    for bits, words in zip(form.planes, planes, strict=True):
        parts = [(words >> (bits * i)) & _every_byte(bits) for i in range(8 // bits)]
        fours = fours | (np.stack(parts, axis=-1).reshape(rows, -1) << below)
        below += bits
    return np.ascontiguousarray(fours).view(np.uint8)


def _every_byte(bits: int) -> np.uint32:
    """A mask of the low bits of each byte of a word."""
    return np.uint32(((1 << bits) - 1) * 0x01010101)


def _scaled(
    form: Format, values: NDArray[Any] | None, supers: NDArray[np.uint16] | None, signed: bool
) -> NDArray[np.float32]:
    """Scales or mins as f32, multiplied by their super-scales where there are some."""
    if values is None:
        raise ValueError(f"{form.name} stores no such scales")
    if supers is None:
        return _half(values)
    numbers = (values.view(np.int8) if signed else values).astype(np.float32)
    return np.repeat(_half(supers), form.super_cols // form.scale_cols, axis=1) * numbers


def _half(bits: NDArray[Any]) -> NDArray[np.float32]:
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
