"""The largest of a row's products, found where they are made.

Sampling begins with the largest logit. Whoever multiplies has every one of them in a register; to
read them again is to read as many bytes from memory as there are logits. Knows products of tiles;
knows no weights.
"""

from __future__ import annotations

from jitllm.jit.emit import Kernel, Value, f32, f32v, i32, i64
from jitllm.kernels.op import PANEL_TOKENS
from jitllm.kernels.sample import NUM_PEAKS, PAIR_BYTES

INF = float("inf")


class Peaks:
    """Emits the search through one slice of the weight rows, for a panel of activation rows that
    begins with `start`.

    Of each row it keeps the largest product so far, the weight row that had it first, and the least
    that would be larger; a NaN is never larger than anything.
    """

    def __init__(self, k: Kernel, start: Value) -> None:
        self._k = k
        self._start = start
        # As if row 0 were there.
        values, bounds = k.stack(f32, PANEL_TOKENS), k.stack(f32, PANEL_TOKENS)
        self._values, self._bounds = values - start * 4, bounds - start * 4
        self._ids = k.stack(i32, PANEL_TOKENS) - start * 4

    def begin(self, stop: Value, num_ids: Value) -> None:
        """Nothing was found yet in rows up to `stop`; `num_ids` stands for that."""
        k = self._k
        with k.loop(self._start, stop) as row:
            k.store(k.const(-INF, f32), self._values + row * 4)
            k.store(k.const(-INF, f32), self._bounds + row * 4)
            k.store(num_ids.trunc(i32), self._ids + row * 4)

    def look(self, row: Value, first: Value, y: Value) -> None:
        """y: the product of a weight row, or of the 16 of a tile, from `first` on."""
        k = self._k
        bound = k.load(self._bounds + row * 4, f32)
        if y.type != f32v:
            with k.if_(y >= bound):
                self._keep(row, first, y)
            return
        with k.if_(k.mask(y >= k.splat(bound)).ne(0)):
            largest = k.hmax(k.select(y.eq(y), y, k.const(-INF, f32v)))
            lane = k.trailing_zeros(k.mask(y.eq(k.splat(largest)))).zext(i64)
            self._keep(row, first + lane, largest)

    def _keep(self, row: Value, found: Value, y: Value) -> None:
        k = self._k
        k.store(y, self._values + row * 4)
        k.store(found.trunc(i32), self._ids + row * 4)
        # The next float: both zeros are one, and nothing is beyond infinity but what is no number.
        bits = (y + 0.0).as_i32()
        step = k.select(bits >= 0, k.const(1, i32), k.const(-1, i32))
        k.store((bits + step).as_f32(), self._bounds + row * 4)

    def end(self, stop: Value, slice_: Value, to: Value) -> None:
        """Write what was found, as pairs of a weight row and its product, to the rows at `to`."""
        k = self._k
        with k.loop(self._start, stop) as row:
            pair = to + (row * NUM_PEAKS + slice_) * PAIR_BYTES
            k.store(k.load(self._ids + row * 4, i32), pair)
            k.store(k.load(self._values + row * 4, f32), pair + 4)


def slice_tiles(tiles: Value) -> Value:
    """Tiles of a slice; the last slices may have fewer, or none."""
    return (tiles + (NUM_PEAKS - 1)).udiv(NUM_PEAKS)
