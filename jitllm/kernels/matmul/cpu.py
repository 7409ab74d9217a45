"""Matrix products on the CPU: one kernel a weight format serves every shape.

A work item is one tile of 16 weight rows against one panel of activations. The panel is taken in
blocks of 8, 4, 2 or 1 rows: a block unpacks each word of weights once and keeps one accumulator a
row, so a row meets the same arithmetic in every block size. While a tile is multiplied, the one
after it is fetched: memory and arithmetic overlap. Knows no model and no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jitllm.jit.emit import Kernel, Value, Var, f32, f32v, i32, i32v, i64
from jitllm.kernels.layout import (
    ACT_NEG_ISUM,
    ACT_NEG_ISUM_HI,
    ACT_NEG_ISUM_LO,
    ACT_RECORD_BYTES,
    ACT_SCALE,
    ACT_SUM,
    ACT_SUM_HI,
    ACT_SUM_LO,
    FORMATS,
    GROUP,
    TILE_ROWS,
    WORD_ROW_BYTES,
    Format,
    FormatCode,
    num_tiles,
)
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.matmul.amx import BLOCK_ROWS, AmxProduct
from jitllm.kernels.matmul.groups import (
    AHEAD_BYTES,
    OPERANDS,
    fetch,
    scales,
    super_scales,
    unpacker,
)
from jitllm.kernels.matmul.peaks import Peaks, slice_tiles
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

Step = Callable[[Value, Sequence[Value], Sequence[Var]], None]
"""Emits one group: (address of its weights, addresses of its activations, accumulators)."""


def launches(op: MatMul, env: Env) -> list[Launch]:
    """One launch: panels times tiles, or times slices where peaks are wanted."""
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
        return [Launch(KernelSpec.of("matmul", format=format), count, tiles, args)]
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

    def multiply(tile: Value, start: Value, stop: Value, found: Peaks | None = None) -> None:
        product.rows(
            k.arg(WEIGHT) + tile * product.tile_bytes,
            start,
            stop,
            lambda row: k.arg(SRC) + row * k.arg(SRC_STRIDE),
            lambda row, size: _finish(k, tile, row, size, product.sums, is_far, found),
        )

    per_panel = k.const(NUM_PEAKS) if peaks else tiles
    with k.items() as item:
        panel, part = item.udiv(per_panel), item.urem(per_panel)
        start = panel * PANEL_TOKENS
        stop = k.min(start + PANEL_TOKENS, num_rows)
        if peaks:
            found, width = Peaks(k, start), slice_tiles(tiles)
            first = k.min(part * width, tiles)
            found.begin(stop, k.arg(ROWS))
            with k.loop(first, k.min(first + width, tiles)) as tile:
                multiply(tile, start, stop, found)
            found.end(stop, part, k.arg(PEAKS))
        else:
            multiply(part, start, stop)
    product.finish()


class Product:
    """Emits the products of tiles with activation rows. sums: f32 [rows of a block, 16], where the
    products of a block are until they are written."""

    def __init__(
        self, k: Kernel, fmt: Format, groups: Value, stride_word: int | None = None
    ) -> None:
        """stride_word: the argument word of bytes between rows, where these lie evenly apart."""
        self.k = k
        self.fmt = fmt
        self.groups = groups
        self.tile_bytes = _tile_bytes(fmt, groups)
        has_amx = k.tier.has_amx and fmt.is_quantized
        self._amx = None
        if has_amx:
            stride = None if stride_word is None else k.arg(stride_word)
            self._amx = AmxProduct(k, fmt, groups, stride)
        self.sums = k.stack(f32, TILE_ROWS * (PANEL_TOKENS if has_amx else max(block_sizes(k))))
        self._row, self._size = k.var(0, i64), k.var(0, i64)

    def rows(
        self,
        weights: Value,
        start: Value,
        stop: Value,
        source: Callable[[Value], Value],
        write: Callable[[Value, Value], None],
    ) -> None:
        """The tile at `weights` times activation rows [start, stop), block by block.

        source(row): where the activations of a row are. write(row, size): what is done with the
        sums of rows [row, row + size). There are at most PANEL_TOKENS rows.
        """
        k, row, size = self.k, self._row, self._size
        ahead = k.min(self.tile_bytes, k.const(AHEAD_BYTES))
        row.set(start)

        def block(num_rows: int) -> None:
            # A row that is missing is the one before it again, and nobody reads its sums.
            rows = [k.min(row.get() + r, stop - 1) for r in range(num_rows)]
            sources = [k.opaque(source(r)) for r in rows]
            _block(k, self.fmt, weights, ahead, self.groups, sources, self.sums)
            size.set(k.min(stop - row.get(), k.const(num_rows)))

        with k.while_(lambda: row.get() < stop):
            left = stop - row.get()
            if self._amx is None:
                _first_that_fits(k, left, block_sizes(k), block)
            else:
                with k.if_else(left >= BLOCK_ROWS) as (many, few):
                    with many:
                        size.set(left & -BLOCK_ROWS)
                        self._amx.rows(weights, ahead, row.get(), size.get(), source, self.sums)
                    with few:
                        _first_that_fits(k, left, block_sizes(k), block)
            write(row.get(), size.get())
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
        step = _quantized(k, fmt, None, None) if fmt.is_quantized else _floats(k, fmt)
        source_bytes = ACT_RECORD_BYTES if fmt.is_quantized else GROUP * 4
        with k.loop(0, groups) as g:
            group = weights + g * fmt.group_bytes
            fetch(k, fmt, group + ahead, len(sources))
            step(group, [s + g * source_bytes for s in sources], acc)
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
        step = _quantized(k, fmt, *super_scales(k, fmt, head))
        first = head + fmt.super_header_bytes
        with k.loop(0, per_super) as g:
            record = (s * per_super + g) * ACT_RECORD_BYTES
            group = first + g * fmt.group_bytes
            fetch(k, fmt, group + ahead, len(sources))
            step(group, [source + record for source in sources], acc)


def _quantized(k: Kernel, fmt: Format, d: Value | None, d_min: Value | None) -> Step:
    """Integers against records of quantised activations."""
    halves = fmt.scales_per_group
    sum_at = (ACT_SUM,) if halves == 1 else (ACT_SUM_LO, ACT_SUM_HI)
    negative_at = (ACT_NEG_ISUM,) if halves == 1 else (ACT_NEG_ISUM_LO, ACT_NEG_ISUM_HI)

    def start(record: Value, half: int) -> Value:
        # -bias * sum(a): the dot product of unsigned integers then comes out as of (q - bias).
        if not fmt.bias:
            return k.const(0, i32v)
        negative, shift = k.load(record + negative_at[half], i32), fmt.bias.bit_length() - 1
        # With one of them a record, a scalar shift spares a vector load; with two, registers for
        # scalars are what is short (5 % of Q6_K).
        return k.splat(negative << shift) if halves == 1 else k.splat(negative) << shift

    def step(weights: Value, records: Sequence[Value], acc: Sequence[Var]) -> None:
        operand = unpacker(k, fmt, weights)
        for half in range(halves):
            dots = [k.dot(start(record, half), (1 << fmt.bits) - 1) for record in records]
            for p in range(half * OPERANDS // halves, (half + 1) * OPERANDS // halves):
                integers = operand(p)
                for dot, record in zip(dots, records, strict=True):
                    dot.add(integers, k.splat(k.load(record + 4 * p, i32)))
            w_scale = scales(k, fmt, weights + fmt.scale_offset, half, d)
            w_min = None
            if fmt.has_min:
                w_min = scales(k, fmt, weights + fmt.min_offset, half, d_min)
            for r, record in enumerate(records):
                s = w_scale * k.load(record + ACT_SCALE, f32)
                total = k.fma(dots[r].total().to_float(), s, acc[r].get())
                if w_min is not None:
                    a_sum = k.load(record + sum_at[half], f32)
                    total = k.fma(w_min if fmt.min_is_added else -w_min, a_sum, total)
                acc[r].set(total)

    return step


def _floats(k: Kernel, fmt: Format) -> Step:
    """Floats against f32 activations, column by column."""
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

    def step(weights: Value, sources: Sequence[Value], acc: Sequence[Var]) -> None:
        with k.loop(0, GROUP // per_word, words_a_step) as first:
            for w in range(words_a_step):
                at = (first + w) * per_word * 4
                word = k.load(weights + (first + w) * WORD_ROW_BYTES, i32v)
                for c, column in enumerate(columns(word)):
                    for r, source in enumerate(sources):
                        x = k.load(source + at + 4 * c, f32)
                        acc[r].set(k.fma(column, x, acc[r].get()))

    return step


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
