"""Matrix products in NumPy, for tests: its own reader of the tile layout, and the same rounding.

`tile_dtype` is the layout as a record type: what it names can be filled with anything and read
back, so tests make tiles of random integers and scales without any packer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitllm.kernels.layout import (
    ACT_RECORD_BYTES,
    ACT_SCALE,
    ACT_SUM,
    ACT_SUM_HI,
    ACT_SUM_LO,
    FORMATS,
    GROUP,
    TILE_ROWS,
    Format,
    FormatCode,
    num_tiles,
)
from jitllm.kernels.sample import NUM_PEAKS

F32s = NDArray[np.float32]


def fma(a: F32s, b: F32s, c: F32s) -> F32s:
    """a * b + c, all but always rounded once: the product is exact in f64, the sum is not."""
    product = a.astype(np.float64) * b.astype(np.float64)
    return (product + c.astype(np.float64)).astype(np.float32)


def tile_dtype(fmt: Format) -> np.dtype[Any]:
    """One group of a tile, or one super-group under super-scales.

    Fields of a group: plane0, plane1 ("<u4" [words, 16]) or floats ([32, 16] or [16, 16, 2]);
    scale and min ([scales a group, 16]). Of a super-group: d, dmin ("<f2" [16]), groups [8].
    """
    small: Any = ("i1" if fmt.scale_signed else "u1") if fmt.super_cols else "<f2"
    fields: list[tuple[Any, ...]] = [
        (f"plane{i}", "<u4", (bits, TILE_ROWS)) for i, bits in enumerate(fmt.planes)
    ]
    if fmt.float_bytes:
        per_word = 4 // fmt.float_bytes
        kinds = {FormatCode.F32: "<f4", FormatCode.F16: "<f2", FormatCode.BF16: "<u2"}
        fields.append(("floats", kinds[fmt.code], (GROUP // per_word, TILE_ROWS, per_word)))
    else:
        fields += [(n, small, (fmt.scales_per_group, TILE_ROWS)) for n in _scale_names(fmt)]
    group = np.dtype(fields)
    if not fmt.super_cols:
        return group
    heads = [("d", "<f2", TILE_ROWS), ("dmin", "<f2", TILE_ROWS)][: 1 + fmt.has_min]
    return np.dtype([*heads, ("groups", group, fmt.super_cols // GROUP)])


def _scale_names(fmt: Format) -> list[str]:
    return ["scale", "min"] if fmt.has_min else ["scale"]


def random_tiles(fmt: Format, rows: int, cols: int, rng: np.random.Generator) -> bytes:
    """A matrix of random weights in its tiles, about 1 in size; rows beyond `rows` are zero."""
    dtype = tile_dtype(fmt)
    tile = fmt.tile_bytes(cols)
    data = rng.integers(0, 256, (num_tiles(rows), tile), np.uint8)
    records = data.view(dtype).reshape(num_tiles(rows), -1)
    for name in ("d", "dmin", "scale", "min", "floats"):
        group = records["groups"] if fmt.super_cols and name in ("scale", "min") else records
        if name not in (group.dtype.names or ()) or group.dtype[name].base.kind in "iu":
            continue
        values = rng.uniform(0.2, 1, group[name].shape) * _magnitude(fmt)
        group[name] = values * rng.choice([-1, 1], values.shape)
    if fmt.code is FormatCode.BF16:
        values = rng.standard_normal(records["floats"].shape).astype(np.float32)
        records["floats"] = values.view(np.uint32) >> 16
    _blank(records, fmt, rows, cols)
    return data.tobytes()


def _magnitude(fmt: Format) -> float:
    largest_scale = {False: 255.0, True: 128.0}[fmt.scale_signed] if fmt.super_cols else 1.0
    return 1.0 / ((1 << fmt.bits) / 2 * largest_scale)


def _blank(records: NDArray[Any], fmt: Format, rows: int, cols: int) -> None:
    """Zero the rows of the last tile that the matrix lacks and the columns up to the padding."""
    spare = num_tiles(rows) * TILE_ROWS - rows
    for name in records.dtype.names or ():
        field = records[-1:][name]
        if records.dtype[name].base.names:
            _blank(field, fmt, rows, cols)
        elif spare:
            axis = -2 if name == "floats" else -1
            index = [slice(None)] * field.ndim
            index[axis] = slice(TILE_ROWS - spare, None)
            field[tuple(index)] = 0
    if fmt.float_bytes and (tail := cols % GROUP):
        flat = records["floats"][:, -1].swapaxes(-1, -2).reshape(len(records), GROUP, TILE_ROWS)
        flat[:, tail:] = 0
        shape = (len(records), -1, 4 // fmt.float_bytes, TILE_ROWS)
        records["floats"][:, -1] = flat.reshape(shape).swapaxes(-1, -2)


@dataclass(frozen=True)
class Integers:
    """A quantised matrix: integers with the bias taken off, i32 [rows, groups, scales, weights];
    scale and min f32 [rows, groups, scales]. min is what is added to q * scale, sign included."""

    q: NDArray[np.int32]
    scale: F32s
    min: F32s | None

    def dequantise(self) -> F32s:
        """Weights, f32 [rows, cols], as `kernels/embed` defines them."""
        if self.min is None:
            weights = self.q.astype(np.float32) * self.scale[..., None]
        else:
            shape = self.q.shape
            scale = np.broadcast_to(self.scale[..., None], shape)
            weights = fma(
                self.q.astype(np.float32), scale, np.broadcast_to(self.min[..., None], shape)
            )
        return weights.reshape(len(weights), -1)


def read_integers(fmt: Format, data: bytes, rows: int, cols: int) -> Integers:
    """A matrix of a quantised format out of its tiles."""
    records = np.frombuffer(data, tile_dtype(fmt)).reshape(num_tiles(rows), -1)
    groups = records["groups"] if fmt.super_cols else records[..., None]
    bits = sum(
        _plane(groups[f"plane{i}"], width) << sum(fmt.planes[:i])
        for i, width in enumerate(fmt.planes)
    )  # [tiles, supers, groups, 32, 16]
    q = _by_row(np.asarray(bits, np.int32) - fmt.bias, rows)
    scale = groups["scale"].astype(np.float32)
    minimum = groups["min"].astype(np.float32) if fmt.has_min else None
    if fmt.super_cols:
        scale = records["d"].astype(np.float32)[:, :, None, None] * scale
        if minimum is not None:
            minimum = records["dmin"].astype(np.float32)[:, :, None, None] * minimum
    if minimum is not None and not fmt.min_is_added:
        minimum = -minimum
    return Integers(
        q.reshape(rows, -1, fmt.scales_per_group, fmt.scale_cols),
        _by_row(scale, rows),
        None if minimum is None else _by_row(minimum, rows),
    )


def _plane(words: NDArray[np.uint32], bits: int) -> NDArray[np.int32]:
    """Words [..., bits, 16] of a plane to its integers [..., 32, 16]."""
    integers = [
        (words[..., w, :] >> (8 * byte + bits * i)) & ((1 << bits) - 1)
        for w in range(bits)
        for i in range(8 // bits)
        for byte in range(4)
    ]
    return np.stack(integers, axis=-2).astype(np.int32)


def _by_row(values: NDArray[Any], rows: int) -> NDArray[Any]:
    """[tiles, supers, groups, n, 16] to [rows, groups, n]."""
    tiles, supers, groups, n, lanes = values.shape
    rolled = np.moveaxis(values, -1, 1).reshape(tiles * lanes, supers * groups, n)
    return rolled[:rows]


def read_floats(fmt: Format, data: bytes, rows: int, cols: int) -> F32s:
    """A matrix of a float format, f32 [rows, padded cols]."""
    raw = np.frombuffer(data, tile_dtype(fmt)).reshape(num_tiles(rows), -1)["floats"]
    if fmt.code is FormatCode.BF16:
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    # [tiles, groups, words, 16, per word] to [rows, cols]
    values = np.moveaxis(raw.astype(np.float32), 3, 1)
    return values.reshape(num_tiles(rows) * TILE_ROWS, -1)[:rows]


def dequantise(format: FormatCode, data: bytes, rows: int, cols: int) -> F32s:
    """Any matrix as f32 [rows, cols]."""
    fmt = FORMATS[format]
    if fmt.is_quantized:
        return read_integers(fmt, data, rows, cols).dequantise()[:, :cols]
    return read_floats(fmt, data, rows, cols)[:, :cols]


def matmul(
    format: FormatCode,
    data: bytes,
    rows: int,
    cols: int,
    src: NDArray[Any],
    bias: F32s | None = None,
    add: F32s | None = None,
    scale: float = 1.0,
) -> F32s:
    """The product f32 [tokens, rows]. src: records uint8 [tokens, groups * 64], or f32
    [tokens, cols] for float formats. bias: f32 [rows]. add: f32 [tokens, rows]."""
    fmt = FORMATS[format]
    if fmt.is_quantized:
        total = _integer_product(fmt, read_integers(fmt, data, rows, cols), src)
    else:
        total = _float_product(read_floats(fmt, data, rows, cols)[:, :cols], src)
    if bias is not None:
        total = total + bias
    total = total * np.float32(scale)
    return total if add is None else total + add


def peaks(product: F32s) -> F32s:
    """What `MatMul.peaks` holds of a product f32 [outputs, weight rows]: pairs, as f32 [outputs,
    2 * NUM_PEAKS] of which every other one is an i32."""
    num_rows, num_ids = product.shape
    width = -(-num_tiles(num_ids) // NUM_PEAKS) * TILE_ROWS
    pairs = np.zeros((num_rows, NUM_PEAKS), np.dtype([("id", "<i4"), ("value", "<f4")]))
    pairs["id"], pairs["value"] = num_ids, -np.inf
    for row, start in np.ndindex(num_rows, -(-num_ids // width)):
        values = product[row, start * width : (start + 1) * width]
        if not np.isnan(values).all():
            largest = np.nanmax(values)
            pairs[row, start] = (start * width + np.argmax(values == largest), largest)
    return pairs.view(np.float32)


def _integer_product(fmt: Format, weights: Integers, src: NDArray[np.uint8]) -> F32s:
    records = np.ascontiguousarray(src).reshape(len(src), -1, ACT_RECORD_BYTES)
    a = records[..., :GROUP].view(np.int8).astype(np.int32)
    floats = records.view("<f4")
    sum_at = (ACT_SUM,) if fmt.scales_per_group == 1 else (ACT_SUM_LO, ACT_SUM_HI)
    total = np.zeros((len(src), len(weights.q)), np.float32)
    for g in range(records.shape[1]):
        a_scale = floats[:, g, ACT_SCALE // 4][:, None]
        for s in range(fmt.scales_per_group):
            span = slice(s * fmt.scale_cols, (s + 1) * fmt.scale_cols)
            dot = (a[:, g, span] @ weights.q[:, g, s].T).astype(np.float32)
            total = fma(dot, weights.scale[:, g, s][None] * a_scale, total)
            if weights.min is not None:
                a_sum = floats[:, g, sum_at[s] // 4][:, None]
                total = fma(weights.min[:, g, s][None], a_sum, total)
    return total


def _float_product(weights: F32s, src: F32s) -> F32s:
    total = np.zeros((len(src), len(weights)), np.float32)
    for c in range(weights.shape[1]):
        total = fma(weights[:, c][None], src[:, c][:, None], total)
    return total
