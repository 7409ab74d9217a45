"""Packing: what ggml's bytes mean is what our tiles mean, to the bit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from jitllm.formats import layout, tiles
from jitllm.kernels.layout import FORMATS, TILE_ROWS, FormatCode
from jitllm.kernels.matmul.reference import dequantise, read_floats, read_integers

CODES = [pytest.param(code, id=code.name) for code in FormatCode]
QUANTIZED = [pytest.param(c, id=c.name) for c in FormatCode if FORMATS[c].is_quantized]
ROWS = 37


def cols_of(code: FormatCode) -> int:
    form = FORMATS[code]
    return 512 if form.super_cols else 96 if form.is_quantized else 77


def raw_of(code: FormatCode, rows: int = ROWS, seed: int = 1) -> NDArray[np.uint8]:
    """A matrix of random bits in ggml's bytes, its f16 scales finite."""
    rng = np.random.default_rng(seed)
    cols, source = cols_of(code), layout.ggml_type(code)
    if not FORMATS[code].is_quantized:
        values = rng.standard_normal((rows, cols), np.float32)
        return quants.quantize(values, GGMLQuantizationType[code.name]).view(np.uint8).reshape(-1)
    size = rows * cols // source.group_size * source.group_bytes
    raw = rng.integers(0, 256, size, np.uint8).reshape(-1, source.group_bytes)
    for at in SCALES[code]:
        halves = rng.uniform(-2, 2, len(raw)).astype(np.float16)
        halves[::7] = 6e-8  # denormal
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return raw.reshape(-1)


SCALES = {
    FormatCode.Q4_0: (0,),
    FormatCode.Q4_1: (0, 2),
    FormatCode.Q5_0: (0,),
    FormatCode.Q5_1: (0, 2),
    FormatCode.Q8_0: (0,),
    FormatCode.Q2_K: (80, 82),
    FormatCode.Q3_K: (108,),
    FormatCode.Q4_K: (0, 2),
    FormatCode.Q5_K: (0, 2),
    FormatCode.Q6_K: (208,),
}
"""Where the f16 scales stand in a group of ggml's."""


def expected(code: FormatCode, raw: NDArray[np.uint8], rows: int = ROWS) -> NDArray[np.float32]:
    """The independent reader's weights, f32 [rows, cols]."""
    if code is FormatCode.F32:
        return raw.view(np.float32).reshape(rows, -1)
    return quants.dequantize(raw.reshape(rows, -1), GGMLQuantizationType[code.name])


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("rows", [1, 16, ROWS])
def test_weights_are_ggmls(code: FormatCode, rows: int) -> None:
    """Bit for bit; where there are mins, with the two roundings that ggml's reader has."""
    raw, form, cols = raw_of(code, rows), FORMATS[code], cols_of(code)
    packed = layout.pack(code, raw, rows, cols)
    assert packed.size == form.matrix_bytes(rows, cols)
    parts = tiles.take_apart(form, packed, rows, cols)
    if form.has_min:
        scale, low = (
            np.repeat(v, form.scale_cols, axis=1)
            for v in (tiles.scales(form, parts), tiles.mins(form, parts))
        )
        product = tiles.integers(form, parts).astype(np.float32) * scale
        got = product + low if form.min_is_added else product - low
        assert np.allclose(layout.unpack(code, packed, rows, cols), got, rtol=1e-5, atol=1e-4)
    else:
        got = layout.unpack(code, packed, rows, cols)
    assert (got.view(np.uint32) == expected(code, raw, rows).view(np.uint32)).all()


@pytest.mark.parametrize("code", CODES)
def test_tiles_come_apart_as_they_were_put_together(code: FormatCode) -> None:
    parts = layout.split(code, raw_of(code), ROWS, cols_of(code))
    packed = tiles.assemble(FORMATS[code], parts)
    back = tiles.take_apart(FORMATS[code], packed.tobytes(), ROWS, cols_of(code))
    for name in ("q", "scales", "mins", "d", "dmin"):
        was, now = getattr(parts, name), getattr(back, name)
        assert (was is None) == (now is None)
        assert was is None or (was.dtype == now.dtype and (was == now).all())


@pytest.mark.parametrize("code", QUANTIZED)
def test_the_kernels_reader_sees_the_same(code: FormatCode) -> None:
    """The matrix product's reference reads tiles by itself."""
    form, cols, raw = FORMATS[code], cols_of(code), raw_of(code)
    packed = layout.pack(code, raw, ROWS, cols).tobytes()
    parts = tiles.take_apart(form, packed, ROWS, cols)
    seen = read_integers(form, packed, ROWS, cols)
    assert (seen.q.reshape(ROWS, -1) == tiles.integers(form, parts)).all()
    assert (seen.scale.reshape(ROWS, -1) == tiles.scales(form, parts)).all()
    got = dequantise(code, packed, ROWS, cols)
    assert np.allclose(got, expected(code, raw), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("code", [FormatCode.F32, FormatCode.F16, FormatCode.BF16])
def test_the_kernels_reader_sees_the_same_floats(code: FormatCode) -> None:
    cols = cols_of(code)
    packed = layout.pack(code, raw_of(code), ROWS, cols).tobytes()
    seen = read_floats(FORMATS[code], packed, ROWS, cols)
    assert (seen[:, :cols] == expected(code, raw_of(code))).all()
    assert (seen[:, cols:] == 0).all()


@pytest.mark.parametrize("code", CODES)
def test_pieces_of_rows_are_pieces_of_the_whole(code: FormatCode) -> None:
    raw, cols = raw_of(code), cols_of(code)
    row_bytes = raw.size // ROWS
    whole = layout.pack(code, raw, ROWS, cols)
    cuts = [0, TILE_ROWS, 2 * TILE_ROWS, ROWS]
    pieces = [
        layout.pack(code, raw[a * row_bytes : b * row_bytes], b - a, cols)
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    assert (np.concatenate(pieces) == whole).all()


@pytest.mark.parametrize("code", CODES)
def test_padding_rows_are_zeros(code: FormatCode) -> None:
    rows, cols = 17, cols_of(code)
    packed = layout.pack(code, raw_of(code, rows), rows, cols)
    assert (layout.unpack(code, packed, 32, cols)[rows:] == 0).all()


@pytest.mark.parametrize("code", QUANTIZED)
def test_every_bit_counts(code: FormatCode) -> None:
    """No bit of the source is lost: each one changes the tiles."""
    raw, cols = raw_of(code, 1), cols_of(code)
    whole = layout.pack(code, raw, 1, cols)
    for bit in range(8 * layout.ggml_type(code).group_bytes):
        other = raw.copy()
        other[bit // 8] ^= 1 << (bit % 8)
        assert (layout.pack(code, other, 1, cols) != whole).any(), bit


def test_fma_rounds_once() -> None:
    """Against rational arithmetic; the first half are ties but for a trifle."""
    rng = np.random.default_rng(1)
    a, b, c = (
        (rng.standard_normal(2000) * 2.0 ** rng.integers(-30, 30, 2000)).astype(np.float32)
        for _ in range(3)
    )
    a[:500] = b[:500] = 1 + 2.0**-12  # the product ends in half a step of f32
    a[500:1000], b[500:1000] = 1 + 2.0**-11, 1 + 3 * 2.0**-13
    c[:1000] = rng.choice([0, 2.0**-90, -(2.0**-90)], 1000)  # beyond what a sum in f64 can hold
    rounded_once = tiles.fma(a, b, c)
    for x, y, z, r in zip(*(v.tolist() for v in (a, b, c, rounded_once)), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        for side in (-np.inf, np.inf):
            neighbour = Fraction(float(np.nextafter(np.float32(r), np.float32(side))))
            assert abs(neighbour - exact) >= abs(Fraction(r) - exact)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="no Q4_0 matrix of 2 x 32"):
        layout.split(FormatCode.Q4_0, bytes(35), 2, 32)
    with pytest.raises(ValueError, match="no Q4_K matrix"):
        layout.split(FormatCode.Q4_K, bytes(144), 8, 32)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_vectors(name: str) -> None:
    values = np.random.default_rng(1).standard_normal((1, 45)).astype(np.float32)
    raw = quants.quantize(values, GGMLQuantizationType[name]).tobytes()
    got = layout.vector(layout.ggml_type(FormatCode[name]), raw)
    assert got.dtype == np.float32
    assert np.allclose(got, values[0], rtol=1e-2)
