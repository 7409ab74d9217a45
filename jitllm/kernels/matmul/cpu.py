"""Matrix products on the CPU: one kernel a weight format serves every shape.

A work item is two neighbouring tiles of 16 weight rows against one panel of activations. Where
there are registers for it, both tiles meet several rows at once (`pairs.py`); where there is a
matrix unit, it takes many rows (`amx.py`). Rows that remain are taken tile by tile, in blocks of 8,
4, 2 or 1 rows: a block unpacks each word of weights once and keeps one accumulator a row. A row
meets the same arithmetic in all of them. While tiles are multiplied, those after them are fetched:
memory and arithmetic overlap. Knows no model and no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jitllm.jit.emit import Kernel, Value, Var, f32, f32v, i32, i32v, i64
from jitllm.kernels.layout import (
    ACT_RECORD_BYTES,
    FORMATS,
    GROUP,
    TILE_ROWS,
    WORD_ROW_BYTES,
    Format,
    FormatCode,
    num_tiles,
)
from jitllm.kernels.matmul import MatMul, amx, pairs
from jitllm.kernels.matmul.amx import AmxProduct
from jitllm.kernels.matmul.groups import AHEAD_BYTES, PackedGroup, fetch, super_scales
from jitllm.kernels.matmul.pairs import PAIR_TILES, PairProduct, Source, Write
from jitllm.kernels.matmul.peaks import Peaks, slice_tiles
from jitllm.kernels.matmul.products import add_products
from jitllm.kernels.op import PANEL_TOKENS, Count, Ctx, Env, KernelSpec, Launch, Rows, f32_bits
from jitllm.kernels.sample import NUM_PEAKS, PEAK_ONLY, RECORD_BYTES, Field

SRC, DST, WEIGHT, BIAS, ADD, SRC_STRIDE, DST_STRIDE = range(7)
GROUPS, ROWS, COUNT_WORD, SCALE, PEAKS = range(7, 12)
"""Argument words: addresses (BIAS and ADD may be 0), bytes between rows (ADD's are DST's), groups
of a row, weight rows, the word of the step context that counts the activation rows, the bits of the
scale, and where the peaks of an output head go."""

FAR_BYTES = 8 << 20
"""From this size on results are written past the caches: they are out of them again before anybody
reads them, and a line of theirs would be read from memory only to be written over."""


def launches(op: MatMul, env: Env) -> list[Launch]:
    """One launch: panels times pairs of tiles, or times slices where peaks are wanted."""
    is_outputs = op.src.rows is Rows.OUTPUTS
    tiles = num_tiles(op.weight.rows)
    args = (
        env.buffer(op.src),
        env.buffer(op.dst),
        env.weight(op.weight),
        env.weight(op.bias) if op.bias else 0,
        env.buffer(op.add) if op.add else 0,
        op.src.stride_bytes,
        op.dst.stride_bytes,
        FORMATS[op.weight.format].padded_cols(op.weight.cols) // GROUP,
        op.weight.rows,
        int(Ctx.NUM_OUTPUTS if is_outputs else Ctx.NUM_TOKENS),
        f32_bits(op.scale),
        env.buffer(op.peaks) if op.peaks else 0,
    )
    count = Count.OUTPUT_PANELS if is_outputs else Count.TOKEN_PANELS
    format = op.weight.format.name
    if op.peaks is None:
        num_pairs = -(-tiles // PAIR_TILES)
        return [Launch(KernelSpec.of("matmul", format=format), count, num_pairs, args)]
    assert is_outputs, "peaks are of outputs"
    return [Launch(KernelSpec.of("matmul", format=format, peaks=True), count, NUM_PEAKS, args)]


def emit(k: Kernel, *, format: str, peaks: bool = False) -> None:
    """The kernel of one weight format, or of an output head in it."""
    fmt = FORMATS[FormatCode[format]]
    product = Product(k, fmt, k.arg(GROUPS), SRC_STRIDE)
    tiles = (k.arg(ROWS) + (TILE_ROWS - 1)).udiv(TILE_ROWS)
    num_rows = k.load(k.params[0] + k.arg(COUNT_WORD) * 8, i64)
    is_aligned = ((k.arg(DST) | k.arg(DST_STRIDE)) & (WORD_ROW_BYTES - 1)).eq(0)
    is_far = is_aligned & (num_rows * k.arg(DST_STRIDE) >= FAR_BYTES)

    def multiply(
        tile: Value, end: Value, start: Value, stop: Value, found: Peaks | None = None
    ) -> None:
        product.rows(
            k.arg(WEIGHT) + tile * product.tile_bytes,
            k.min(end - tile, k.const(PAIR_TILES)),
            start,
            stop,
            lambda row: k.arg(SRC) + row * k.arg(SRC_STRIDE),
            lambda t, row, size, sums: _finish(k, tile + t, row, size, sums, is_far, found),
        )

    num_pairs = (tiles + (PAIR_TILES - 1)).udiv(PAIR_TILES)
    per_panel = k.const(NUM_PEAKS) if peaks else num_pairs
    with k.items() as item:
        panel, part = item.udiv(per_panel), item.urem(per_panel)
        start = panel * PANEL_TOKENS
        stop = k.min(start + PANEL_TOKENS, num_rows)
        if peaks:
            found, width = Peaks(k, start), slice_tiles(tiles)
            first = k.min(part * width, tiles)
            end = k.min(first + width, tiles)
            found.begin(stop, k.arg(ROWS))
            with k.loop(first, end, PAIR_TILES) as tile:
                multiply(tile, end, start, stop, found)
            found.end(stop, part, k.arg(PEAKS))
        else:
            multiply(part * PAIR_TILES, tiles, start, stop)
    product.finish()


class Product:
    """Emits the products of one or two neighbouring tiles with activation rows."""

    def __init__(
        self, k: Kernel, fmt: Format, groups: Value, stride_word: int | None = None
    ) -> None:
        """stride_word: the argument word of bytes between rows, where these lie evenly apart."""
        self.k = k
        self.fmt = fmt
        self.groups = groups
        self.tile_bytes = _tile_bytes(fmt, groups)
        self._amx = self._pairs = None
        if k.tier.has_amx and fmt.is_quantized:
            stride = None if stride_word is None else k.arg(stride_word)
            self._amx = AmxProduct(k, fmt, groups, stride)
        if pairs.pays(k, fmt):
            self._pairs = PairProduct(k, fmt, groups, self.tile_bytes)
        self._sizes = block_sizes(k)
        self._sums = k.stack(f32, TILE_ROWS * max(self._sizes))
        self._ahead = k.min(self.tile_bytes, k.const(AHEAD_BYTES))
        self._rest, self._row, self._size = (k.var(0, i64) for _ in range(3))

    def rows(
        self,
        weights: Value,
        num_tiles: Value,
        start: Value,
        stop: Value,
        source: Source,
        write: Write,
    ) -> None:
        """The tiles at `weights` times activation rows [start, stop), at most PANEL_TOKENS of them.

        num_tiles: 1 or 2.
        """
        k, rest = self.k, self._rest
        rest.set(start)
        if self._amx is not None:
            num_rows = (stop - start) & -amx.BLOCK_ROWS
            with k.if_(num_rows > 0):
                with k.loop(0, num_tiles) as tile:
                    at = weights + tile * self.tile_bytes
                    self._amx.rows(at, self._ahead, start, num_rows, source)
                    write(tile, start, num_rows, self._amx.sums)
                rest.set(start + num_rows)
        if self._pairs is not None:
            num_rows = self._pairs.take(stop - rest.get())
            with k.if_(num_rows > 0):
                self._pairs.rows(weights, num_tiles, rest.get(), num_rows, source, write)
                rest.set(rest.get() + num_rows)
        self._tile_by_tile(weights, num_tiles, stop, source, write)

    def _tile_by_tile(
        self, weights: Value, num_tiles: Value, stop: Value, source: Source, write: Write
    ) -> None:
        """The rows that are left, block by block for each tile."""
        k, row, size = self.k, self._row, self._size
        with k.loop(0, num_tiles) as tile:
            at = weights + tile * self.tile_bytes
            row.set(self._rest.get())

            def block(num_rows: int) -> None:
                # A row that is missing is the one before it again, and nobody reads its sums.
                rows = [k.min(row.get() + r, stop - 1) for r in range(num_rows)]
                sources = [k.opaque(source(r)) for r in rows]
                _block(k, self.fmt, at, self._ahead, self.groups, sources, self._sums)
                size.set(k.min(stop - row.get(), k.const(num_rows)))

            with k.while_(lambda: row.get() < stop):
                _first_that_fits(k, stop - row.get(), self._sizes, block)
                write(tile, row.get(), size.get(), self._sums)
                row.set(row.get() + size.get())

    def finish(self) -> None:
        """After the last product of a call of the kernel."""
        if self._amx is not None:
            self._amx.unit.switch_off()


def block_sizes(k: Kernel) -> tuple[int, ...]:
    """Activation rows that a block may take, most first. A row needs two registers, for its
    accumulator and the dot product under way; the others hold weights, scales and masks."""
    return tuple(n for n in (8, 4, 2, 1) if 2 * n <= k.tier.vector_registers)


def _first_that_fits(
    k: Kernel, left: Value, sizes: Sequence[int], body: Callable[[int], None]
) -> None:
    """Run the body for the first of `sizes`, most first, that `left` rows fill, or fill but for one
    row of many: that costs less than another block. The last one always fits."""
    n, *smaller = sizes
    if not smaller:
        body(n)
        return
    with k.if_else(left >= n - (n > 2)) as (fits, does_not):
        with fits:
            body(n)
        with does_not:
            _first_that_fits(k, left, smaller, body)


def _tile_bytes(fmt: Format, groups: Value) -> Value:
    if not fmt.super_cols:
        return groups * fmt.group_bytes
    return groups.udiv(fmt.super_cols // GROUP) * fmt.tile_bytes(fmt.super_cols)


def _block(
    k: Kernel,
    fmt: Format,
    weights: Value,
    ahead: Value,
    groups: Value,
    sources: Sequence[Value],
    sums: Value,
) -> None:
    """The dot products of one tile with some activation rows, into `sums`: f32 [rows, 16].

    ahead: how many bytes after the weights in use others are fetched.
    """
    acc = [k.var(k.const(0.0, f32v)) for _ in sources]
    if fmt.super_cols:
        _super_groups(k, fmt, weights, ahead, groups, sources, acc)
    else:
        source_bytes = ACT_RECORD_BYTES if fmt.is_quantized else GROUP * 4
        with k.loop(0, groups) as g:
            group = weights + g * fmt.group_bytes
            fetch(k, fmt, group + ahead, len(sources))
            at = [s + g * source_bytes for s in sources]
            if fmt.is_quantized:
                _add(k, fmt, group, (None, None), at, acc)
            else:
                _add_floats(k, fmt, group, at, acc)
    for r, total in enumerate(acc):
        k.store(total.get(), sums + r * WORD_ROW_BYTES, align=64)


def _super_groups(
    k: Kernel,
    fmt: Format,
    weights: Value,
    ahead: Value,
    groups: Value,
    sources: Sequence[Value],
    acc: Sequence[Var],
) -> None:
    per_super = fmt.super_cols // GROUP
    with k.loop(0, groups.udiv(per_super)) as s:
        head = weights + s * fmt.tile_bytes(fmt.super_cols)
        supers = super_scales(k, fmt, head)
        first = head + fmt.super_header_bytes
        with k.loop(0, per_super) as g:
            record = (s * per_super + g) * ACT_RECORD_BYTES
            group = first + g * fmt.group_bytes
            fetch(k, fmt, group + ahead, len(sources))
            _add(k, fmt, group, supers, [source + record for source in sources], acc)


def _add(
    k: Kernel,
    fmt: Format,
    group: Value,
    supers: tuple[Value | None, Value | None],
    records: Sequence[Value],
    acc: Sequence[Var],
) -> None:
    """Add the products of a group of integers."""
    add_products(k, fmt, [PackedGroup(k, fmt, group, *supers)], records, [[total] for total in acc])


def _add_floats(
    k: Kernel, fmt: Format, group: Value, sources: Sequence[Value], acc: Sequence[Var]
) -> None:
    """Add the products of a group of floats with f32 activations, column by column."""
    words_a_step = 4  # more would only make longer code
    per_word = 4 // fmt.float_bytes

    def columns(word: Value) -> tuple[Value, ...]:
        match fmt.code:
            case FormatCode.F32:
                return (word.as_f32(),)
            case FormatCode.F16:
                return k.widen_f16(word & 0xFFFF), k.widen_f16(word >> 16)
            case _:
                return (word << 16).as_f32(), (word & 0xFFFF0000).as_f32()

    with k.loop(0, GROUP // per_word, words_a_step) as first:
        for w in range(words_a_step):
            at = (first + w) * per_word * 4
            word = k.load(group + (first + w) * WORD_ROW_BYTES, i32v)
            for c, column in enumerate(columns(word)):
                for r, source in enumerate(sources):
                    x = k.load(source + at + 4 * c, f32)
                    acc[r].set(k.fma(column, x, acc[r].get()))


def _finish(
    k: Kernel,
    tile: Value,
    row: Value,
    size: Value,
    sums: Value,
    is_far: Value,
    peaks: Peaks | None,
) -> None:
    """(sums + bias) * scale + add, to dst; only the weight rows that exist are read and written."""
    bias, add, dst, stride = (k.arg(word) for word in (BIAS, ADD, DST, DST_STRIDE))
    scale = k.arg(SCALE).trunc(i32).as_f32()
    column = tile * WORD_ROW_BYTES
    lanes = k.arg(ROWS) - tile * TILE_ROWS

    def result(sum_at: Value, at: Value, bias_at: Value, kind: Any) -> Value:
        y = k.var(k.load(sum_at, kind))
        with k.if_(bias.ne(0)):
            y.set(y.get() + k.load(bias + bias_at, kind))
        y.set(y.get() * scale)
        with k.if_(add.ne(0)):
            y.set(y.get() + k.load(add + at, kind))
        return y.get()

    def only(condition: Value | None) -> AbstractContextManager[object]:
        return nullcontext() if condition is None else k.if_(condition)

    def is_kept(r: Value) -> Value:
        record = k.ctx(Ctx.SAMPLING) + (row + r) * RECORD_BYTES
        return (k.load(record + Field.FLAGS, i32) & PEAK_ONLY).eq(0)

    with k.loop(0, size) as r:
        sum_at, at = sums + r * WORD_ROW_BYTES, (row + r) * stride + column
        kept = is_kept(r) if peaks else None
        with k.if_else(lanes >= TILE_ROWS) as (whole, ragged):
            with whole:
                y = result(sum_at, at, column, f32v)
                if peaks:
                    peaks.look(row + r, tile * TILE_ROWS, y)
                with only(kept), k.if_else(is_far) as (far, near):
                    with far:
                        k.store(y, dst + at, align=WORD_ROW_BYTES, is_far=True)
                    with near:
                        k.store(y, dst + at)
            with ragged, k.loop(0, lanes) as lane:
                y = result(sum_at + lane * 4, at + lane * 4, column + lane * 4, f32)
                if peaks:
                    peaks.look(row + r, tile * TILE_ROWS + lane, y)
                with only(kept):
                    k.store(y, dst + at + lane * 4)
