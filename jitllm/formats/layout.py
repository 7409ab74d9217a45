"""From ggml's bytes of a weight matrix to our tiles.

ggml stores a row as groups of 32 or 256 weights, each with its scales; here every format's group is
taken apart into the numbers that it holds (`tiles.Parts`), bit for bit, and these are put
into tiles. Nothing is computed with a weight: conversion loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitllm.formats import tiles
from jitllm.formats.ggml import GgmlType
from jitllm.formats.tiles import Bytes, Parts
from jitllm.kernels.layout import FORMATS, FormatCode

Raw = bytes | bytearray | memoryview | Bytes


def pack(code: FormatCode, raw: Raw, rows: int, cols: int) -> Bytes:
    """Tiles, u8 [tiles, tile_bytes], of a matrix [rows, cols] in ggml's bytes of that format.

    A matrix may be packed piece by piece: rows that begin at a multiple of 16 are the tiles that
    begin there. Takes some eight times the memory of the integers of the rows that it is given.
    """
    return tiles.assemble(FORMATS[code], split(code, raw, rows, cols))


def unpack(code: FormatCode, data: Raw, rows: int, cols: int) -> NDArray[np.float32]:
    """The weights in tiles as f32 [rows, cols]. For tests."""
    form = FORMATS[code]
    return tiles.weights(form, tiles.take_apart(form, np.frombuffer(data, np.uint8), rows, cols))


def split(code: FormatCode, raw: Raw, rows: int, cols: int) -> Parts:
    """The numbers in ggml's bytes of a matrix [rows, cols].

    Raises ValueError unless the bytes are that many whole rows.
    """
    form, source = FORMATS[code], ggml_type(code)
    flat = np.frombuffer(raw, np.uint8)
    if (
        cols % source.group_size
        or len(flat) != rows * cols // source.group_size * source.group_bytes
    ):
        raise ValueError(f"{len(flat)} bytes are no {form.name} matrix of {rows} x {cols}")
    if not form.is_quantized:
        return Parts(flat.view(f"<u{form.float_bytes}").reshape(rows, cols))
    groups = flat.reshape(-1, source.group_bytes)
    fields = {name: values.reshape(rows, -1) for name, values in _SPLIT[code](groups).items()}
    return Parts(**fields)


def vector(source: GgmlType, raw: Raw) -> NDArray[np.float32]:
    """f32 values of a vector (norm, bias) stored as F32, F16 or BF16."""
    form = FORMATS[FormatCode[source.name]]
    bits = np.frombuffer(raw, f"<u{form.float_bytes}")
    return bits.view(np.float32) if form.float_bytes == 4 else tiles.widen(form, bits)


def ggml_type(code: FormatCode) -> GgmlType:
    """ggml's type of the same name."""
    return GgmlType[code.name]


# --- one function a format: u8 [groups, group_bytes] to its numbers, [groups, n] each -----------

_Numbers = dict[str, NDArray[Any]]


def _fields(data: Bytes, runs: int, bits: int) -> Bytes:
    """Bit fields of bytes: u8 [groups, n * 8 / bits].

    Each of the `runs` runs of bytes gives the lowest fields of all its bytes, then the next ones.
    """
    run = data.reshape(len(data), runs, 1, -1)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    return ((run >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(data), -1)


def _half(groups: Bytes, at: int) -> NDArray[np.uint16]:
    """The f16 bits at a byte of every group: u16 [groups, 1]."""
    return np.ascontiguousarray(groups[:, at : at + 2]).view("<u2")


def _fifth_bits(groups: Bytes, at: int) -> Bytes:
    """Bit 4 of 32 weights from a word with a bit for each, at its place: u8 [groups, 32]."""
    return np.unpackbits(groups[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """8 scales and 8 mins of 6 bits from the 12 bytes of Q4_K and Q5_K."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    low, high = np.uint8(0x0F), np.uint8(0x30)
    scales = [first & 63, (third & low) | ((first >> 2) & high)]
    mins = [second & 63, (third >> 4) | ((second >> 2) & high)]
    return np.concatenate(scales, axis=1), np.concatenate(mins, axis=1)


def _q4_0(b: Bytes) -> _Numbers:
    return {"q": _fields(b[:, 2:], 1, 4), "scales": _half(b, 0)}


def _q4_1(b: Bytes) -> _Numbers:
    return {"q": _fields(b[:, 4:], 1, 4), "scales": _half(b, 0), "mins": _half(b, 2)}


def _q5_0(b: Bytes) -> _Numbers:
    return {"q": _fields(b[:, 6:], 1, 4) | _fifth_bits(b, 2), "scales": _half(b, 0)}


def _q5_1(b: Bytes) -> _Numbers:
    q = _fields(b[:, 8:], 1, 4) | _fifth_bits(b, 4)
    return {"q": q, "scales": _half(b, 0), "mins": _half(b, 2)}


def _q8_0(b: Bytes) -> _Numbers:
    return {"q": b[:, 2:] ^ np.uint8(0x80), "scales": _half(b, 0)}  # signed -> bias 128


def _q2_k(b: Bytes) -> _Numbers:
    return {
        "q": _fields(b[:, 16:80], 2, 2),
        "scales": b[:, :16] & 0x0F,
        "mins": b[:, :16] >> 4,
        "d": _half(b, 80),
        "dmin": _half(b, 82),
    }


def _q3_k(b: Bytes) -> _Numbers:
    high = _fields(b[:, :32], 1, 1) << np.uint8(2)
    low_scales, high_scales = _fields(b[:, 96:104], 1, 4), _fields(b[:, 104:108], 1, 2)
    return {
        "q": _fields(b[:, 32:96], 2, 2) | high,
        "scales": (low_scales | (high_scales << np.uint8(4))) - np.uint8(32),  # signed
        "d": _half(b, 108),
    }


def _q4_k(b: Bytes) -> _Numbers:
    scales, mins = _six_bit_pairs(b[:, 4:16])
    q = _fields(b[:, 16:], 4, 4)
    return {"q": q, "scales": scales, "mins": mins, "d": _half(b, 0), "dmin": _half(b, 2)}


def _q5_k(b: Bytes) -> _Numbers:
    scales, mins = _six_bit_pairs(b[:, 4:16])
    q = _fields(b[:, 48:], 4, 4) | (_fields(b[:, 16:48], 1, 1) << np.uint8(4))
    return {"q": q, "scales": scales, "mins": mins, "d": _half(b, 0), "dmin": _half(b, 2)}


def _q6_k(b: Bytes) -> _Numbers:
    high = _fields(b[:, 128:192], 2, 2) << np.uint8(4)
    return {
        "q": _fields(b[:, :128], 2, 4) | high,
        "scales": b[:, 192:208],
        "d": _half(b, 208),
    }


_SPLIT: dict[FormatCode, Callable[[Bytes], _Numbers]] = {
    FormatCode.Q4_0: _q4_0,
    FormatCode.Q4_1: _q4_1,
    FormatCode.Q5_0: _q5_0,
    FormatCode.Q5_1: _q5_1,
    FormatCode.Q8_0: _q8_0,
    FormatCode.Q2_K: _q2_k,
    FormatCode.Q3_K: _q3_k,
    FormatCode.Q4_K: _q4_k,
    FormatCode.Q5_K: _q5_k,
    FormatCode.Q6_K: _q6_k,
}
