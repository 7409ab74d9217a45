"""Matrix products of several rows in wide vectors: four activation rows times two tiles at once.

A product of bytes takes a word of weights and one of activations, which a load spreads over the
lanes. Next to one tile and eight rows, every word that is spread is used twice and half of these
loads go, so that what is left to wait for is the multiplying itself. Sums and products under way
take half of 32 registers.

Tiles are taken in chunks of groups. The first four rows unpack a chunk and keep it for the others,
which follow at once, while it is in the first cache; weights of 8 bits are read in place. While a
chunk is multiplied a later one is fetched, by all blocks of rows in turns. Knows no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jitllm.jit.emit import Kernel, Value, f32, f32v
from jitllm.kernels.layout import ACT_RECORD_BYTES, GROUP, TILE_ROWS, WORD_ROW_BYTES, Format
from jitllm.kernels.matmul.groups import AHEAD_BYTES, LINE_BYTES, Group, PackedGroup, super_scales
from jitllm.kernels.matmul.products import add_products
from jitllm.kernels.matmul.unpacked import CHUNK_GROUPS, Unpacked
from jitllm.kernels.op import PANEL_TOKENS

PAIR_TILES = 2

BLOCK_ROWS = 4

_LEAST_BLOCKS = 3
"""Fewer are no gain. Where weights come out of memory, one or two blocks fetch those of both tiles
in so short a time that not all are fetched (0.75 to 0.95 of the rate of one tile and eight rows);
where weights are unpacked, that is paid by four rows in place of eight (0.95 to 1.0)."""

LEAST_ROWS = _LEAST_BLOCKS * BLOCK_ROWS - 1
"""A block that lacks one row is worth its time."""

_SUMS_BYTES = PANEL_TOKENS * WORD_ROW_BYTES
"""The sums of a tile."""

Source = Callable[[Value], Value]
"""Where the activations of a row are."""

Write = Callable[[Value, Value, Value, Value], None]
"""(tile, row, size, sums): what is done with the sums, f32 [size, 16], of rows [row, row + size)
and a tile, 0 or 1."""


def pays(k: Kernel, fmt: Format) -> bool:
    """Whether products of a format are faster so, where several rows meet it.

    Beside sums and products under way there must be registers for weights and activations. Where
    weights have minimums there is another multiplication for each row and tile, and it is no faster
    (0.98 to 1.02).
    """
    return (
        k.tier.vector_registers > 2 * BLOCK_ROWS * PAIR_TILES
        and fmt.is_quantized
        and not fmt.has_min
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Groups [first, first + num_groups) of two tiles. offset: from the beginning of either."""

    first: Value
    num_groups: Value
    tiles: tuple[Value, Value]
    offset: Value


class PairProduct:
    """Emits the products of two neighbouring tiles with activation rows, for a quantised format."""

    def __init__(self, k: Kernel, fmt: Format, groups: Value, tile_bytes: Value) -> None:
        self.k = k
        self.fmt = fmt
        self.groups = groups
        self.tile_bytes = tile_bytes
        self.sums = k.stack(f32, PAIR_TILES * PANEL_TOKENS * TILE_ROWS)
        self.unpacked = None if fmt.bits == 8 else Unpacked(k, fmt, PAIR_TILES, is_signed=False)

    def take(self, num_rows: Value) -> Value:
        """How many of so many rows `rows` is to take, first ones: whole blocks and maybe one that
        lacks a row; none of a few. The others are as fast tile by tile."""
        k = self.k
        taken = k.min((num_rows + 1) & -BLOCK_ROWS, num_rows)
        return k.select(num_rows >= LEAST_ROWS, taken, k.const(0))

    def rows(
        self,
        weights: Value,
        num_tiles: Value,
        start: Value,
        size: Value,
        source: Source,
        write: Write,
    ) -> None:
        """The tiles at `weights` times activation rows [start, start + size), of which there are
        LEAST_ROWS to PANEL_TOKENS.

        num_tiles: 2 or 1; a tile that is missing is the other one again, and nobody reads its sums.
        """
        k = self.k
        second = weights + k.select(num_tiles > 1, self.tile_bytes, k.const(0))
        num_blocks = (size + (BLOCK_ROWS - 1)).udiv(BLOCK_ROWS)
        group_bytes = self.fmt.tile_bytes(CHUNK_GROUPS * GROUP) // CHUNK_GROUPS
        with k.loop(0, self.groups, CHUNK_GROUPS) as first:
            num_groups = k.min(self.groups - first, k.const(CHUNK_GROUPS))
            offset = first * group_bytes
            chunk = _Chunk(first, num_groups, (weights + offset, second + offset), offset)

            def block(*, is_first: bool) -> None:
                # A row that is missing is the last one again, and nobody reads its sums.
                rows = [start + k.min(row + r, size - 1) for r in range(BLOCK_ROWS)]
                records = [k.opaque(source(r) + first * ACT_RECORD_BYTES) for r in rows]
                ahead = self._ahead(weights, chunk, row.udiv(BLOCK_ROWS), num_blocks)
                self._block(chunk, records, self._sums(row), ahead, is_first)

            with k.loop(0, size, BLOCK_ROWS) as row:
                if self.unpacked is None:
                    block(is_first=False)
                else:
                    with k.if_else(row.eq(0)) as (is_first, is_later):
                        with is_first:
                            block(is_first=True)
                        with is_later:
                            block(is_first=False)
                # At once: the caches take many results in one go badly.
                with k.if_(first + CHUNK_GROUPS >= self.groups), k.loop(0, num_tiles) as tile:
                    num_rows = k.min(size - row, k.const(BLOCK_ROWS))
                    write(tile, start + row, num_rows, self._sums(row) + tile * _SUMS_BYTES)

    def _sums(self, row: Value) -> Value:
        return self.sums + row * WORD_ROW_BYTES

    def _ahead(
        self, weights: Value, chunk: _Chunk, block: Value, num_blocks: Value
    ) -> Callable[[Value], None]:
        """ahead(g): fetch what falls to a block of the chunk's g-th groups, some chunks later: half
        of one tile's, and the other half too where there are only three blocks.

        What is later than the tiles' end is as much later than the beginning of the next two.
        """
        k, fmt = self.k, self.fmt
        chunk_bytes = fmt.tile_bytes(CHUNK_GROUPS * GROUP)
        num_chunks = -(-AHEAD_BYTES // (PAIR_TILES * chunk_bytes))
        half_bytes = -(-fmt.group_bytes // (2 * LINE_BYTES)) * LINE_BYTES
        later = k.min(self.tile_bytes, k.const(num_chunks * chunk_bytes))
        limit = self.tile_bytes - later
        tile, half = block & 1, (block >> 1) & 1
        mine = weights + tile * self.tile_bytes + later + fmt.super_header_bytes

        def fetch(tile: Value, half: Value) -> None:
            for line in range(0, half_bytes, LINE_BYTES):
                k.prefetch(tile + half * half_bytes + line)

        def ahead(g: Value) -> None:
            at = chunk.offset + g * fmt.group_bytes
            at = at + k.select(at >= limit, self.tile_bytes, k.const(0))
            fetch(mine + at, half)
            with k.if_(num_blocks < 4):
                fetch(mine + at, 1 - half)

        return ahead

    def _block(
        self,
        chunk: _Chunk,
        records: Sequence[Value],
        sums: Value,
        ahead: Callable[[Value], None],
        is_first: bool,
    ) -> None:
        """Add the products of a chunk to the sums of some rows; the first chunk's are all there is.

        is_first: nobody has unpacked the chunk before.
        """
        k, fmt, unpacked = self.k, self.fmt, self.unpacked
        acc = [[k.var(k.const(0.0, f32v)) for _ in chunk.tiles] for _ in records]
        places = [
            (total, sums + t * _SUMS_BYTES + r * WORD_ROW_BYTES)
            for r, of_row in enumerate(acc)
            for t, total in enumerate(of_row)
        ]
        with k.if_(chunk.first.ne(0)):
            for total, place in places:
                total.set(k.load(place, f32v, align=64))
        supers = [super_scales(k, fmt, tile) for tile in chunk.tiles]
        with k.loop(0, chunk.num_groups) as g:
            ahead(g)
            groups: list[Group] = []
            for t, tile in enumerate(chunk.tiles):
                at = tile + fmt.super_header_bytes + g * fmt.group_bytes
                group: Group = PackedGroup(k, fmt, at, *supers[t])
                if unpacked is not None:
                    n = g + t * CHUNK_GROUPS
                    group = unpacked.kept(group, n) if is_first else unpacked.group(n)
                groups.append(group)
            add_products(k, fmt, groups, [r + g * ACT_RECORD_BYTES for r in records], acc)
        for total, place in places:
            k.store(total.get(), place, align=64)
