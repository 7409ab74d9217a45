"""Matrix products of many rows on AMX: 16 activation rows times the 16 rows of a tile at once.

A tile is taken in chunks of groups. A chunk is unpacked once for all rows: to signed bytes, as the
matrix unit reads them, and f32 scales. Then, 16 rows after 16, the unit multiplies all groups of
the chunk, and vectors scale its exact integers in the order in which `cpu.py` does. Knows no
thread.
"""

from __future__ import annotations

from collections.abc import Callable

from jitllm.jit import amx
from jitllm.jit.amx import Amx
from jitllm.jit.emit import Kernel, Value, f32, f32v, i8, i32, i32v
from jitllm.kernels.layout import (
    ACT_RECORD_BYTES,
    ACT_SCALE,
    ACT_SUM,
    ACT_SUM_HI,
    ACT_SUM_LO,
    GROUP,
    TILE_ROWS,
    WORD_ROW_BYTES,
    Format,
)
from jitllm.kernels.matmul.groups import OPERANDS, PackedGroup, fetch, super_scales
from jitllm.kernels.matmul.unpacked import CHUNK_GROUPS, Unpacked
from jitllm.kernels.op import PANEL_TOKENS

BLOCK_ROWS = amx.ROWS
"""Activation rows of a block; what remains of a panel after whole blocks is not for us."""

_GATHERED_STRIDE = CHUNK_GROUPS * ACT_RECORD_BYTES

Source = Callable[[Value], Value]
"""Where the activations of a row are."""


class AmxProduct:
    """Emits the products of tiles with blocks of activation rows, for one quantised format."""

    def __init__(self, k: Kernel, fmt: Format, groups: Value, stride: Value | None) -> None:
        """stride: bytes between activation rows, where they lie evenly apart; else None, and the
        rows are gathered."""
        self.k = k
        self.fmt = fmt
        self.groups = groups
        self.stride = stride
        self.parts = fmt.scales_per_group
        """Of a group, each with a scale."""
        num_parts = CHUNK_GROUPS * self.parts
        self.unit = Amx(k, GROUP // self.parts)
        self.unpacked = Unpacked(k, fmt, is_signed=True)
        self.sums = k.stack(f32, PANEL_TOKENS * TILE_ROWS)
        self.products = k.stack(i32, num_parts * amx.ROWS * amx.ROWS)
        if stride is None:
            self.records = k.stack(i8, PANEL_TOKENS * _GATHERED_STRIDE)

    def rows(self, weights: Value, ahead: Value, start: Value, size: Value, source: Source) -> None:
        """sums, f32 [size, 16] = the tile at `weights` times rows [start, start + size).

        size: a multiple of BLOCK_ROWS, at most PANEL_TOKENS. ahead: how many bytes after the
        weights in use others are fetched.
        """
        k = self.k
        self.unit.switch_on()
        with k.loop(0, size) as row:
            k.store(k.const(0.0, f32v), self.sums + row * WORD_ROW_BYTES, align=64)
        gathered_stride = k.const(_GATHERED_STRIDE)
        chunk_bytes = self.fmt.tile_bytes(CHUNK_GROUPS * GROUP)
        with k.loop(0, self.groups, CHUNK_GROUPS) as first:
            num_groups = k.min(self.groups - first, k.const(CHUNK_GROUPS))
            self._unpack(weights + first * (chunk_bytes // CHUNK_GROUPS), ahead, num_groups)
            if self.stride is None:
                self._gather(start, size, source, first, num_groups)
            with k.loop(0, size, BLOCK_ROWS) as row:
                if self.stride is None:
                    records, stride = self.records + row * _GATHERED_STRIDE, gathered_stride
                else:
                    records, stride = source(start + row) + first * ACT_RECORD_BYTES, self.stride
                self._multiply(records, stride, num_groups)
                self._scale(records, stride, num_groups, self.sums + row * WORD_ROW_BYTES)

    def _unpack(self, chunk: Value, ahead: Value, num_groups: Value) -> None:
        """Signed bytes, scales and mins of the groups of a chunk."""
        k, fmt = self.k, self.fmt
        supers = super_scales(k, fmt, chunk)
        with k.loop(0, num_groups) as g:
            at = chunk + fmt.super_header_bytes + g * fmt.group_bytes
            fetch(k, fmt, at + ahead, BLOCK_ROWS)
            group = self.unpacked.kept(PackedGroup(k, fmt, at, *supers), g)
            for p in range(OPERANDS):
                group.operand(p)
            for part in range(self.parts):
                group.scale(part)
                if fmt.has_min:
                    group.low(part)

    def _gather(
        self, start: Value, size: Value, source: Source, first: Value, num_groups: Value
    ) -> None:
        """The rows' records of a chunk, evenly apart."""
        k = self.k
        with k.loop(0, size) as row:
            records = source(start + row) + first * ACT_RECORD_BYTES
            to = self.records + row * _GATHERED_STRIDE
            with k.loop(0, num_groups * ACT_RECORD_BYTES, ACT_RECORD_BYTES) as at:
                k.store(k.load(records + at, i32v), to + at, align=64)

    def _multiply(self, records: Value, stride: Value, num_groups: Value) -> None:
        """The integer products of a block with the groups of a chunk."""
        operands = OPERANDS // self.parts
        with self.k.loop(0, num_groups) as g:
            for part in range(self.parts):
                self.unit.multiply(
                    records + g * ACT_RECORD_BYTES + part * operands * 4,
                    stride,
                    self.unpacked.operand_at(g, part * operands),
                    self.products + (g * self.parts + part) * amx.PRODUCT_BYTES,
                )

    def _scale(self, records: Value, stride: Value, num_groups: Value, sums: Value) -> None:
        """Add the products to the sums of the block's rows, group by group."""
        k = self.k
        sum_at = (ACT_SUM,) if self.parts == 1 else (ACT_SUM_LO, ACT_SUM_HI)
        with k.loop(0, BLOCK_ROWS) as row:
            to = sums + row * WORD_ROW_BYTES
            acc = k.var(k.load(to, f32v, align=64))
            with k.loop(0, num_groups) as g:
                record = records + row * stride + g * ACT_RECORD_BYTES
                group = self.unpacked.group(g)
                for part in range(self.parts):
                    n = g * self.parts + part
                    at = self.products + n * amx.PRODUCT_BYTES + row * WORD_ROW_BYTES
                    product = k.load(at, i32v, align=64).to_float()
                    scale = group.scale(part) * k.load(record + ACT_SCALE, f32)
                    total = k.fma(product, scale, acc.get())
                    if self.fmt.has_min:
                        total = k.fma(group.low(part), k.load(record + sum_at[part], f32), total)
                    acc.set(total)
            k.store(acc.get(), to, align=64)
