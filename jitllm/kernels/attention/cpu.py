"""Paged attention on the CPU.

An item is one token and `item_heads` query heads of one KV head. Where four neighbouring tokens
belong to one sequence, the item of the first computes all four and the others do nothing; where
there are many tokens, so does the first of those of a KV head with all of its query heads. Either
way it is a list of *rows* (a token and a head) that share every load of keys and values; a row's
arithmetic depends on nothing but its own query and its own visible keys.

What a row carries from chunk to chunk lies in small arrays on the stack, a few kilobytes that stay
in the first cache; it comes from memory, and goes back there, where a launch takes a part of the
keys. Register tiles of `side` rows by `side` vectors keep loads well below the fmas, so that there
is room to fetch the next chunk while one is computed: a single token waits for memory otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jitllm.jit.emit import (
    LANES,
    Kernel,
    Value,
    Var,
    f32,
    f32v,
    i8,
    i32,
    i32v,
    i64,
    lanes_of,
    spans,
)
from jitllm.kernels.attention import CHUNK_KEYS, Attention
from jitllm.kernels.attention.chunks import Chunk, Chunks, Place
from jitllm.kernels.layout import GROUP
from jitllm.kernels.op import Count, Ctx, Env, KernelSpec, Launch

ITEM_TOKENS = 4
"""Neighbouring tokens of a sequence that one item takes together."""

MAX_ITEM_HEADS = 8

MIN_ITEMS = 2
"""A single token is cut into at least so many items, if it has the heads."""

CHUNK_VECTORS = CHUNK_KEYS // LANES

MINUS_INFINITY = float("-inf")


def item_heads(heads: int, kv_heads: int) -> int:
    """Query heads of an item: the more, the fewer times keys and values are loaded."""
    group = heads // kv_heads
    fits = (n for n in range(1, min(group, MAX_ITEM_HEADS) + 1) if group % n == 0)
    return max((n for n in fits if heads // n >= MIN_ITEMS), default=1)


def launches(op: Attention, env: Env) -> list[Launch]:
    """One launch. Arguments: q, dst, byte offset of the block's column, bytes of a table row,
    window, carry."""
    taken = item_heads(op.heads, op.kv_heads)
    spec = KernelSpec.of(
        "attention",
        heads=op.heads,
        kv_heads=op.kv_heads,
        item_heads=taken,
        k_dim=op.k_dim,
        v_dim=op.v_dim,
        page_tokens=env.page_tokens,
        kv_element=env.kv_element,
        scale=op.scale,
        softcap=op.softcap,
        windowed=op.window > 0,
        q_stride=op.q.stride_bytes,
        dst_stride=op.dst.stride_bytes,
        carry_stride=op.carry.stride_bytes,
    )
    args = (
        env.buffer(op.q),
        env.buffer(op.dst),
        8 * env.block_slot(op.block),
        8 * env.num_blocks,
        op.window,
        env.buffer(op.carry),
    )
    return [Launch(spec, Count.TOKENS, op.heads // taken, args)]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is emitted for. Strides in bytes; `windowed`: the window is an argument."""

    heads: int
    kv_heads: int
    item_heads: int
    k_dim: int
    v_dim: int
    page_tokens: int
    kv_element: str
    scale: float
    softcap: float
    windowed: bool
    q_stride: int
    dst_stride: int
    carry_stride: int

    @property
    def element_bytes(self) -> int:
        """Bytes of a stored key or value."""
        return {"f32": 4, "f16": 2, "q8_0": 1}[self.kv_element]

    @property
    def has_scales(self) -> bool:
        """Whether stored keys and values are signed bytes, with a scale for each group."""
        return self.kv_element == "q8_0"

    @property
    def items_per_kv_head(self) -> int:
        """Items that share a token's KV head, unless one of them computes for all."""
        return self.heads // self.kv_heads // self.item_heads

    @property
    def head_counts(self) -> tuple[int, ...]:
        """How many query heads an item may have."""
        group = self.heads // self.kv_heads
        is_one = group == self.item_heads or group > MAX_ITEM_HEADS
        return (self.item_heads,) if is_one else (self.item_heads, group)

    @property
    def max_rows(self) -> int:
        """Rows of the largest item."""
        return ITEM_TOKENS * max(self.head_counts)


def emit(k: Kernel, **params: Any) -> None:
    """One kernel for `Shape(**params)`."""
    shape = Shape(**params)
    body = _Body(k, shape)
    groups = shape.heads // shape.item_heads
    with k.items() as item:
        token, group = item.udiv(groups), item.urem(groups)
        num_heads = _num_heads(k, shape, group)
        num_tokens = _num_tokens(k, token, groups)
        with k.if_((num_tokens > 0) & (num_heads > 0)):
            body.item(token, num_tokens, group * shape.item_heads, num_heads)


def _num_heads(k: Kernel, shape: Shape, group: Value) -> Value:
    """Query heads that an item computes: its own, all of its KV head, or 0 where another one does.

    All are taken together where that leaves an item for every thread, of as many tokens as may be.
    """
    own, *all_of_them = shape.head_counts
    if not all_of_them:
        return k.const(own)
    is_enough = k.ctx(Ctx.NUM_TOKENS) * shape.kv_heads >= k.ctx(Ctx.NUM_THREADS) * ITEM_TOKENS
    is_first = group.urem(shape.items_per_kv_head).eq(0)
    together = k.select(is_first, k.const(all_of_them[0]), k.const(0))
    return k.select(is_enough, together, k.const(own))


def _num_tokens(k: Kernel, token: Value, groups: int) -> Value:
    """Tokens that the item of `token` computes: 1, ITEM_TOKENS, or 0 where an earlier one does.

    Tokens are taken together only where that leaves an item for every thread.
    """
    first, num_tokens = token & -ITEM_TOKENS, k.ctx(Ctx.NUM_TOKENS)
    is_enough = num_tokens * groups >= k.ctx(Ctx.NUM_THREADS) * ITEM_TOKENS
    taken = k.var(1, i64)
    with k.if_(is_enough & (first + ITEM_TOKENS <= num_tokens)):
        rows = [k.load(k.ctx(Ctx.ROW_OF) + (first + i) * 4, i32) for i in range(ITEM_TOKENS)]
        is_one_row = rows[0].eq(rows[1])
        for row in rows[2:]:
            is_one_row = is_one_row & rows[0].eq(row)
        together = k.select(token.eq(first), k.const(ITEM_TOKENS), k.const(0))
        taken.set(k.select(is_one_row, together, k.const(1)))
    return taken.get()


class _Body:
    """Emits one item. The attributes are addresses of per-row arrays on the stack."""

    def __init__(self, k: Kernel, shape: Shape) -> None:
        self.k, self.shape = k, shape
        self.side = 4 if k.tier.vector_registers >= 32 else 2
        rows = shape.max_rows
        self.value_bytes = -(-shape.v_dim // LANES) * LANES * 4
        self.queries, self.outputs, self.carries = (k.stack(i64, rows) for _ in range(3))
        # Keys of a row that it sees in this launch: [start, stop); and whether it ends with them.
        self.starts, self.stops, self.ends = (k.stack(i64, rows) for _ in range(3))
        self.maxima, self.sums, self.decays = (k.stack(f32, rows) for _ in range(3))
        self.scores = k.stack(f32, rows * CHUNK_KEYS)
        self.values = k.stack(f32, rows * self.value_bytes // 4)
        if shape.has_scales:
            self.scaled_weights = k.stack(f32, self.side**2 * LANES // GROUP * CHUNK_KEYS)
        self.chunks = Chunks(
            k,
            kv_heads=shape.kv_heads,
            k_dim=shape.k_dim,
            v_dim=shape.v_dim,
            page_tokens=shape.page_tokens,
            kv_element=shape.kv_element,
            table_row=3,
        )

    def item(self, token: Value, num_tokens: Value, head: Value, num_heads: Value) -> None:
        """Attend for `num_tokens` tokens of one sequence and `num_heads` heads of a KV head."""
        k = self.k
        row_of = k.load(k.ctx(Ctx.ROW_OF) + token * 4, i32).zext(i64)
        at = k.ctx(Ctx.RANGES) + row_of * 16
        keys = k.load(at, i64), k.load(at + 8, i64)
        with k.if_(keys[0] < keys[1]):
            self.attend(token, num_tokens, head, num_heads, row_of, keys)

    def attend(
        self,
        token: Value,
        num_tokens: Value,
        head: Value,
        num_heads: Value,
        row_of: Value,
        keys: tuple[Value, Value],
    ) -> None:
        """An item whose launch has some of its sequence's keys."""
        k, shape = self.k, self.shape
        start, stop = self.begin(token, num_tokens, head, num_heads, keys)
        kv_head = head.udiv(shape.heads // shape.kv_heads)
        rows = num_tokens * num_heads
        table = self.table(row_of)
        after = self.after(token + num_tokens, Place(table, kv_head, start), row_of, stop)

        with k.loop(start & -CHUNK_KEYS, stop, CHUNK_KEYS) as base:
            chunk = self.chunks.chunk(Place(table, kv_head, base), start, stop, after)
            self.tiles(rows, lambda row, count: self.score(row, count, chunk))
            with k.loop(0, rows) as row:
                self.weigh(row, base)
            self.tiles(rows, lambda row, count: self.accumulate(row, count, base, chunk))
        with k.loop(0, rows) as row:
            self.finish(row)

    def table(self, row_of: Value) -> Value:
        """Address of the block's column of a sequence's page table."""
        k = self.k
        return k.load(k.ctx(Ctx.TABLES) + row_of * 8, i64) + k.arg(2)

    def after(self, token: Value, first: Place, row_of: Value, stop: Value) -> Place:
        """What is probably looked at after an item's last chunk: the first one of its sequence's
        next KV head or of the sequence after it, whose first token is `token`; else that last one.

        first: where the item begins. stop: where its keys end.
        """
        k, shape = self.k, self.shape
        has_heads = (first.kv_head + 1) < shape.kv_heads
        there = k.min(token, k.ctx(Ctx.NUM_TOKENS) - 1)
        other = k.load(k.ctx(Ctx.ROW_OF) + there * 4, i32).zext(i64)
        position = k.load(k.ctx(Ctx.POSITIONS) + there * 4, i32).zext(i64) + 1
        begin = k.max(position - k.arg(4), k.const(0)) if shape.windowed else k.const(0)
        is_same = other.eq(row_of)

        def choose(head: Value, sequence: Value, neither: Value) -> Value:
            return k.select(has_heads, head, k.select(is_same, neither, sequence))

        return Place(
            choose(first.table, self.table(other), first.table),
            choose(first.kv_head + 1, k.const(0), first.kv_head),
            choose(first.position, begin, stop - 1) & -CHUNK_KEYS,
        )

    def begin(
        self,
        token: Value,
        num_tokens: Value,
        head: Value,
        num_heads: Value,
        keys: tuple[Value, Value],
    ) -> tuple[Value, Value]:
        """Set up the rows; returns the keys that any of them sees in this launch."""
        k, shape = self.k, self.shape
        first, last = k.var(2**62, i64), k.var(0, i64)
        with k.loop(0, num_tokens) as t:
            position = k.load(k.ctx(Ctx.POSITIONS) + (token + t) * 4, i32).zext(i64)
            stop = position + 1
            start = k.max(stop - k.arg(4), k.const(0)) if shape.windowed else k.const(0)
            begins = start >= keys[0]
            ends = (stop > keys[0]) & (stop <= keys[1])
            start, stop = k.max(start, keys[0]), k.min(stop, keys[1])
            first.set(k.min(first.get(), start))
            last.set(k.max(last.get(), stop))
            query = k.arg(0) + (token + t) * shape.q_stride
            output = k.arg(1) + (token + t) * shape.dst_stride
            carry = k.arg(5) + (token + t) * shape.carry_stride
            with k.loop(0, num_heads) as h:
                row, of_head = t * num_heads + h, head + h
                k.store(query + of_head * (shape.k_dim * 4), self.queries + row * 8)
                k.store(output + of_head * (shape.v_dim * 4), self.outputs + row * 8)
                k.store(carry + of_head * 8, self.carries + row * 8)
                k.store(start, self.starts + row * 8)
                k.store(stop, self.stops + row * 8)
                k.store(ends.zext(i64), self.ends + row * 8)
                self.take_up(row, begins)
        return first.get(), last.get()

    def take_up(self, row: Value, begins: Value) -> None:
        """What a row has of the keys before this launch's: nothing where it `begins`."""
        k, shape = self.k, self.shape
        carry = k.load(self.carries + row * 8, i64)
        output = k.load(self.outputs + row * 8, i64)
        before = k.select(begins, k.const(MINUS_INFINITY, f32), k.load(carry, f32))
        k.store(before, self.maxima + row * 4)
        total = k.select(begins, k.const(0, f32), k.load(carry + 4, f32))
        k.store(total, self.sums + row * 4)
        for offset, lanes in spans(shape.v_dim):
            kind = lanes_of(f32, lanes)
            value = k.select(begins, k.const(0, kind), k.load(output + offset * 4, kind))
            k.store(value, self.values + row * self.value_bytes + offset * 4)

    # --- the three steps of a chunk ----------------------------------------------------------

    def tiles(self, rows: Value, work: Callable[[Value, int], None]) -> None:
        """`work(first row, number of rows)` over all rows: full tiles, then the rest, which is
        that of one token's heads since ITEM_TOKENS is a multiple of `side`."""
        k = self.k
        full = rows & -self.side
        with k.loop(0, full, self.side) as row:
            work(row, self.side)
        for rest in sorted({count % self.side for count in self.shape.head_counts} - {0}):
            with k.if_((rows - full).eq(rest)):
                work(full, rest)

    def score(self, row: Value, count: int, chunk: Chunk) -> None:
        """Scores of the chunk's keys, before `scale`, for `count` rows."""
        k = self.k
        queries = [k.load(self.queries + (row + i) * 8, i64) for i in range(count)]
        products = self.scaled_products if self.shape.has_scales else self.products
        for first in range(0, CHUNK_VECTORS, self.side):
            for i, sums in enumerate(products(queries, chunk, first)):
                into = self.scores + (row + i) * (CHUNK_KEYS * 4)
                for n, total in enumerate(sums, first):
                    k.store(total.get(), into + n * LANES * 4)

    def zeros(self, count: int) -> list[list[Var]]:
        """Zeros for `count` rows and `side` vectors of keys."""
        return [[self.k.var(0, f32v) for _ in range(self.side)] for _ in range(count)]

    def products(self, queries: list[Value], chunk: Chunk, first: int) -> list[list[Var]]:
        """Of queries with the keys of `side` vectors from the chunk's `first` on."""
        k, shape, (keys, _) = self.k, self.shape, chunk
        vector_bytes = LANES * shape.element_bytes
        acc = self.zeros(len(queries))
        with k.loop(0, shape.k_dim) as d:
            at = keys.at + d * (self.chunks.row_keys * shape.element_bytes) + first * vector_bytes
            self.chunks.fetch(at, keys.ahead, self.side * vector_bytes)
            columns = [self.load(at + n * vector_bytes, LANES) for n in range(self.side)]
            self.add_products(queries, d, columns, acc)
        return acc

    def scaled_products(self, queries: list[Value], chunk: Chunk, first: int) -> list[list[Var]]:
        """The same with keys of signed bytes, four dimensions in a word: group by group."""
        k, shape, (keys, _, scales, _) = self.k, self.shape, chunk
        acc = self.zeros(len(queries))
        with k.loop(0, shape.k_dim // GROUP) as group:
            of_group = self.zeros(len(queries))
            with k.loop(group * (GROUP // 4), (group + 1) * (GROUP // 4)) as word:
                at = keys.at + word * (self.chunks.row_keys * 4) + first * LANES * 4
                self.chunks.fetch(at, keys.ahead, self.side * LANES * 4)
                words = [k.load(at + n * LANES * 4, i32v) for n in range(self.side)]
                for i in range(4):
                    columns = [(w << (24 - 8 * i)).sar(24).to_float() for w in words]
                    self.add_products(queries, word * 4 + i, columns, of_group)
            at = scales.at + group * (self.chunks.row_keys * 2) + first * LANES * 2
            self.chunks.fetch(at, scales.ahead, self.side * LANES * 2)
            for n in range(self.side):
                scale = k.load_f16(at + n * LANES * 2)
                for total, part in zip(acc, of_group, strict=True):
                    total[n].set(k.fma(scale, part[n].get(), total[n].get()))
        return acc

    def add_products(
        self, queries: list[Value], d: Value, columns: list[Value], acc: list[list[Var]]
    ) -> None:
        """Of one dimension."""
        k = self.k
        for query, sums in zip(queries, acc, strict=True):
            q = k.splat(k.load(query + d * 4, f32))
            for column, total in zip(columns, sums, strict=True):
                total.set(k.fma(q, column, total.get()))

    def weigh(self, row: Value, base: Value) -> None:
        """Scores to softmax weights, relative to the largest score so far.

        A row that sees no key of the chunk (its item's other tokens do) keeps its state: its
        weights are 0 and its decay is 1, also before its first key, where e^0 would be e^NaN.
        """
        k = self.k
        at = self.scores + row * (CHUNK_KEYS * 4)
        masks = self.visible(row, base)
        least = k.const(MINUS_INFINITY, f32v)
        scores = []
        for n, mask in enumerate(masks):
            score = k.load(at + n * LANES * 4, f32v) * self.shape.scale
            scores.append(k.select(mask, self.capped(score), least))

        before = k.load(self.maxima + row * 4, f32)
        largest = k.max(k.max(scores[0], scores[1]), k.max(scores[2], scores[3]))
        largest = k.max(k.hmax(largest), before)
        one = k.const(1, f32)
        decay = k.select(before < largest, k.exp(before - largest), one)
        weights = []
        for n, (mask, score) in enumerate(zip(masks, scores, strict=True)):
            weights.append(k.select(mask, k.exp(score - largest), k.const(0, f32v)))
            k.store(weights[-1], at + n * LANES * 4)
        added = k.hsum(((weights[0] + weights[1]) + weights[2]) + weights[3])
        total = k.fma(k.load(self.sums + row * 4, f32), decay, added)
        k.store(largest, self.maxima + row * 4)
        k.store(decay, self.decays + row * 4)
        k.store(total, self.sums + row * 4)

    def visible(self, row: Value, base: Value) -> list[Value]:
        """Lanes of the chunk's vectors whose keys the row sees."""
        k = self.k
        stop = k.splat((k.load(self.stops + row * 8, i64) - base).trunc(i32))
        lanes = [k.lanes(range(n * LANES, (n + 1) * LANES), i32) for n in range(CHUNK_VECTORS)]
        masks = [lane < stop for lane in lanes]
        if self.shape.windowed:
            start = k.splat((k.load(self.starts + row * 8, i64) - base).trunc(i32))
            masks = [mask & (lane >= start) for mask, lane in zip(masks, lanes, strict=True)]
        return masks

    def capped(self, score: Value) -> Value:
        """softcap * tanh(score / softcap): with t = e^(-2|x|), tanh |x| = (1 - t) / (1 + t)."""
        k, cap = self.k, self.shape.softcap
        if not cap:
            return score
        x = score / cap
        t = k.exp(k.abs(x) * -2.0)
        tanh = (1.0 - t) / (t + 1.0)
        return k.select(x < 0.0, -tanh, tanh) * cap

    def accumulate(self, row: Value, count: int, base: Value, chunk: Chunk) -> None:
        """Add the chunk's weighted values to `count` rows.

        Only keys that a row sees are read for it: an unwritten slot may hold a NaN. Rows of
        neighbouring tokens differ in a few keys at either end; what all see is loaded once.
        """
        k, shape = self.k, self.shape
        zero, end = k.const(0), k.const(CHUNK_KEYS)
        ranges = []
        for i in range(count):
            start = k.load(self.starts + (row + i) * 8, i64) - base
            stop = k.load(self.stops + (row + i) * 8, i64) - base
            ranges.append((k.max(start, zero), k.min(stop, end)))
        first, last = ranges[0]
        for start, stop in ranges[1:]:
            first, last = k.max(first, start), k.min(last, stop)
        last = k.max(first, last)

        width = self.side * LANES
        full = shape.v_dim // width * width
        with k.loop(0, full, width) as column:
            pieces = spans(width)
            self.columns(row, chunk, column, pieces, ranges, first, last)
        if full < shape.v_dim:
            pieces = spans(shape.v_dim - full)
            self.columns(row, chunk, k.const(full), pieces, ranges, first, last)

    def columns(
        self,
        row: Value,
        chunk: Chunk,
        column: Value,
        pieces: list[tuple[int, int]],
        ranges: list[tuple[Value, Value]],
        first: Value,
        last: Value,
    ) -> None:
        """`accumulate` for the columns from `column` on, in vectors that `pieces` names."""
        k, shape, values = self.k, self.shape, chunk[1]
        sums = self.values + row * self.value_bytes + column * 4
        first_value = values.at + column * shape.element_bytes
        num_bytes = sum(lanes for _, lanes in pieces) * shape.element_bytes
        weights = [self.weights_of(row + i, i, chunk, column, pieces) for i in range(len(ranges))]
        acc = []
        for i in range(len(ranges)):
            decay = k.load(self.decays + (row + i) * 4, f32)
            at = sums + i * self.value_bytes
            loads = (k.load(at + offset * 4, lanes_of(f32, lanes)) for offset, lanes in pieces)
            acc.append([k.var(total * decay) for total in loads])

        def add(start: Value, stop: Value, rows: range) -> None:
            with k.loop(start, stop) as key:
                at = first_value + key * (shape.v_dim * shape.element_bytes)
                self.chunks.fetch(at, values.ahead, num_bytes)
                value = [self.load(at + o * shape.element_bytes, lanes) for o, lanes in pieces]
                for i in rows:
                    of_groups = [k.load(one + key * 4, f32) for one in weights[i]]
                    for total, v, (offset, _) in zip(acc[i], value, pieces, strict=True):
                        weight = of_groups[offset // GROUP if shape.has_scales else 0]
                        total.set(k.fma(weight, v, total.get()))

        everyone = range(len(ranges))
        for i, (start, stop) in enumerate(ranges):
            add(start, k.min(stop, first), range(i, i + 1))
        add(first, last, everyone)
        for i, (start, stop) in enumerate(ranges):
            add(k.max(start, last), stop, range(i, i + 1))

        for i, totals in enumerate(acc):
            at = sums + i * self.value_bytes
            for (offset, _), total in zip(pieces, totals, strict=True):
                k.store(total.get(), at + offset * 4)

    def weights_of(
        self, row: Value, index: int, chunk: Chunk, column: Value, pieces: list[tuple[int, int]]
    ) -> list[Value]:
        """Where a row's weights of the chunk's values are; of elements with scales, for each group
        of `pieces` from `column` on, times its scale. index: of the row in its tile."""
        k = self.k
        weights = self.scores + row * (CHUNK_KEYS * 4)
        if not self.shape.has_scales:
            return [weights]
        scales = chunk[3]
        num_groups = self.side * LANES // GROUP
        found = []
        for offset in range(0, pieces[-1][0] + 1, GROUP):
            at = scales.at + (column + offset).udiv(GROUP) * (self.chunks.row_keys * 2)
            into = self.scaled_weights + (index * num_groups + offset // GROUP) * CHUNK_KEYS * 4
            if index == 0:
                self.chunks.fetch(at, scales.ahead, CHUNK_KEYS * 2)
            for key in range(0, CHUNK_KEYS, LANES):
                scaled = k.load(weights + key * 4, f32v) * k.load_f16(at + key * 2)
                k.store(scaled, into + key * 4)
            found.append(into)
        return found

    def load(self, address: Value, lanes: int) -> Value:
        """Stored keys or values as f32, without their scale."""
        k = self.k
        match self.shape.kv_element:
            case "q8_0":
                return k.load(address, lanes_of(i8, lanes)).sext(i32).to_float()
            case "f16":
                return k.load_f16(address, lanes)
        return k.load(address, lanes_of(f32, lanes))

    def finish(self, row: Value) -> None:
        """Write the row, divided by the sum of the weights if it ends here, and what it carries."""
        k = self.k
        total = k.load(self.sums + row * 4, f32)
        carry = k.load(self.carries + row * 8, i64)
        k.store(k.load(self.maxima + row * 4, f32), carry)
        k.store(total, carry + 4)
        ends = k.load(self.ends + row * 8, i64).ne(0)
        divisor = k.select(ends, total, k.const(1, f32))
        output = k.load(self.outputs + row * 8, i64)
        values = self.values + row * self.value_bytes
        for offset, lanes in spans(self.shape.v_dim):
            kind = lanes_of(f32, lanes)
            k.store(k.load(values + offset * 4, kind) / divisor, output + offset * 4)
