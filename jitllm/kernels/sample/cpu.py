"""Sampling on the CPU: an item is one output.

It begins with the peak of each slice of an output's logits, which the product that made them has
left: greedy sampling needs no more, and no logit is read again for it.

Whole-vocabulary passes are vector passes that touch nothing but the logits: the largest logit, the
sum of weights, and a count above eight distances from the top, which narrows the vocabulary to a
short list before anything is selected exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jitllm.jit.emit import LANES, Kernel, Value, Var, f32, f32v, i1, i32, i32v, i64, i128, vec
from jitllm.kernels.op import Count, Ctx, Env, KernelSpec, Launch
from jitllm.kernels.sample import (
    MIN_TEMPERATURE,
    NUM_PEAKS,
    PAIR_BYTES,
    RECORD_BYTES,
    WANT_LOGPROB,
    WEIGHT_BITS,
    Field,
    Sample,
)

LOGITS, STRIDE, VOCAB, SCRATCH, SCRATCH_STRIDE, PEAKS = range(6)
"""Argument words: addresses, bytes between rows, ids."""

_STEP = 4 * LANES
"""Logits that are looked at side by side for the largest: one vector waits for the one before."""

DISTANCES = (1, 2, 4, 6, 8, 11, 15, 20)
"""Distances from the largest logit at which candidates are counted before they are listed."""

NAN, INF = float("nan"), float("inf")
Weigh = Callable[[Value], Value]
"""Integer weight of logits, lane by lane: i32 or i64."""


def launches(op: Sample, env: Env) -> list[Launch]:
    """One launch."""
    assert op.peaks is not None, "the CPU leaves it to the output head to find the peaks"
    args = (
        env.buffer(op.logits),
        op.logits.stride_bytes,
        op.logits.width,
        env.buffer(op.scratch),
        op.scratch.stride_bytes,
        env.buffer(op.peaks),
    )
    return [Launch(KernelSpec.of("sample"), Count.OUTPUTS, 1, args)]


@dataclass(frozen=True, slots=True)
class _List:
    """Candidates in order of id: f32 values and, once `listed`, i32 ids (before: id = index)."""

    k: Kernel
    values: Var
    count: Var
    listed: Var
    scratch: Value
    ids: Value

    @contextmanager
    def blocks(self) -> Iterator[tuple[Value, Value]]:
        """(index, 16 values) of the whole list; NaN beyond its end."""
        k = self.k
        count, values = self.count.get(), self.values.get()
        with k.loop(0, count, LANES) as i:
            inside = k.lanes(range(LANES), i32) < k.splat((count - i).trunc(i32))
            x = k.load(values + i * 4, f32v)
            yield i, k.select(inside, x, k.const(NAN, f32v))

    def id_at(self, index: Value) -> Value:
        """i32 id of an element."""
        listed = self.k.load(self.ids + index * 4, i32)
        return self.k.select(self.listed.get(), listed, index.trunc(i32))


def emit(k: Kernel) -> None:
    """The kernel of every vocabulary."""
    vocab = k.arg(VOCAB)
    with k.items() as item:
        raw = k.arg(LOGITS) + item * k.arg(STRIDE)
        scratch = k.arg(SCRATCH) + item * k.arg(SCRATCH_STRIDE)
        record = k.ctx(Ctx.SAMPLING) + item * RECORD_BYTES
        ids = scratch + (k.arg(SCRATCH_STRIDE) >> 1)
        row = _List(k, k.var(raw), k.var(vocab), k.var(0, i1), scratch, ids)
        peak = _highest_peak(k, k.arg(PEAKS) + item * (NUM_PEAKS * PAIR_BYTES), vocab)
        _add_biases(row, record)
        _penalise(row, record)
        token = _choose(row, record, raw, peak)
        k.store(token, record + Field.TOKEN)
        _log_probabilities(k, raw, vocab, token, record, peak[0])


def _highest_peak(k: Kernel, peaks: Value, vocab: Value) -> tuple[Value, Value]:
    """The largest logit and the lowest id that has it, i32; id 0 where all are NaN."""
    top, token = k.var(-INF, f32), k.var(vocab.trunc(i32))
    with k.loop(0, NUM_PEAKS * PAIR_BYTES, PAIR_BYTES) as at:
        first, value = k.load(peaks + at, i32), k.load(peaks + at + 4, f32)
        is_better = (value > top.get()) | (value.eq(top.get()) & (first < token.get()))
        top.set(k.select(is_better, value, top.get()))
        token.set(k.select(is_better, first, token.get()))
    found = token.get()
    return top.get(), k.select(found < vocab.trunc(i32), found, k.const(0, i32))


# --- biases and penalties -----------------------------------------------------------------------


def _add_biases(row: _List, record: Value) -> None:
    """A copy of the logits in scratch, each bias added; nothing where there is none."""
    k, vocab = row.k, row.count.get()
    num_bias = k.load(record + Field.NUM_BIAS, i32).zext(i64)
    with k.if_(num_bias > 0):
        with row.blocks() as (i, x):
            k.store(x, row.scratch + i * 4)
        pairs = k.load(record + Field.BIAS, i64)
        with k.loop(0, num_bias) as i:
            pair = pairs + i * PAIR_BYTES
            token = k.load(pair, i32).zext(i64)
            with k.if_(token < vocab):
                at = row.scratch + token * 4
                k.store(k.load(at, f32) + k.load(pair + 4, f32), at)
        row.values.set(row.scratch)


def _penalise(row: _List, record: Value) -> None:
    k = row.k
    num_history = k.load(record + Field.NUM_HISTORY, i32).zext(i64)
    repeat, frequency, presence = (
        k.load(record + field, f32)
        for field in (Field.REPEAT_PENALTY, Field.FREQUENCY_PENALTY, Field.PRESENCE_PENALTY)
    )
    wanted = repeat.ne(1.0) | frequency.ne(0.0) | presence.ne(0.0)
    with k.if_(wanted & (num_history > 0)):
        _count_history(row, record, num_history)
        with row.blocks() as (i, x):
            count = k.load(row.ids + i * 4, i32v)
            scaled = k.select(x <= 0.0, x * repeat, x / k.splat(repeat))
            y = scaled - (count.to_float() * frequency + k.splat(presence))
            k.store(k.select(count > 0, y, x), row.scratch + i * 4)
        row.values.set(row.scratch)


def _count_history(row: _List, record: Value, num_history: Value) -> None:
    """How often each id occurs, i32 [vocab] in the second half of scratch."""
    k, vocab = row.k, row.count.get()
    history = k.load(record + Field.HISTORY, i64)
    with k.loop(0, vocab, LANES) as i:
        k.store(k.const(0, i32v), row.ids + i * 4)
    with k.loop(0, num_history) as i:
        token = k.load(history + i * 4, i32).zext(i64)
        with k.if_(token < vocab):
            at = row.ids + token * 4
            k.store(k.load(at, i32) + 1, at)


# --- choosing -----------------------------------------------------------------------------------


def _choose(row: _List, record: Value, raw: Value, peak: tuple[Value, Value]) -> Value:
    """The token. peak: of the logits as they came, `raw`."""
    k = row.k
    is_raw = row.values.get().eq(raw)
    largest = k.var(peak[0])
    with k.if_(is_raw.eq(0)):
        largest.set(_largest(row))
    top = largest.get()
    temperature = k.load(record + Field.TEMPERATURE, f32)
    token = k.var(0, i32)
    is_finite = k.abs(top) < INF
    with k.if_else((temperature >= MIN_TEMPERATURE) & is_finite) as (drawn, greedy):
        with drawn:
            _keep_top_k(row, record, top)
            _keep_top_p(row, record, top)
            index = _draw(row, record, top, temperature)
            token.set(row.id_at(index))
        with greedy, k.if_else(is_raw) as (as_it_came, changed):
            with as_it_came:
                token.set(peak[1])
            with changed:
                first = _first(row, lambda x: x.eq(top))
                token.set(k.max(first, k.const(0)).trunc(i32))
    return token.get()


def _largest(row: _List) -> Value:
    k = row.k
    lanes = [k.var(k.const(-INF, f32v)) for _ in range(_STEP // LANES)]
    count, values = row.count.get(), row.values.get()
    whole = count & -_STEP
    with k.loop(0, whole, _STEP) as i:
        for n, largest in enumerate(lanes):
            x = k.load(values + i * 4 + n * LANES * 4, f32v)
            largest.set(k.max(x, largest.get()))  # a NaN loses
    rest = _List(k, k.var(values + whole * 4), k.var(count - whole), row.listed, values, values)
    with rest.blocks() as (_, x):
        lanes[0].set(k.max(x, lanes[0].get()))
    found = lanes[0].get()
    for largest in lanes[1:]:
        found = k.max(largest.get(), found)
    return k.hmax(found)


def _first(row: _List, wanted: Callable[[Value], Value]) -> Value:
    """Index of the first element that is wanted; -1 if there is none."""
    k = row.k
    found = k.var(-1, i64)
    i = k.var(0, i64)
    count, values = row.count.get(), row.values.get()
    with k.while_(lambda: (i.get() < count) & (found.get() < 0)):
        inside = k.lanes(range(LANES), i32) < k.splat((count - i.get()).trunc(i32))
        hits = k.mask(wanted(k.load(values + i.get() * 4, f32v)) & inside)
        with k.if_(hits.ne(0)):
            found.set(i.get() + k.trailing_zeros(hits).zext(i64))
        i.set(i.get() + LANES)
    return found.get()


def _keep_top_k(row: _List, record: Value, top: Value) -> None:
    k = row.k
    top_k = k.load(record + Field.TOP_K, i32).sext(i64)

    def one(x: Value) -> Value:
        return k.const(1, vec(i32, LANES) if x.type == f32v else i32)

    with k.if_((top_k > 0) & (top_k < row.count.get())):
        _narrow(row, top, one, top_k)
        with k.if_(top_k < row.count.get()):
            _keep_prefix(row, one, top_k)


def _keep_top_p(row: _List, record: Value, top: Value) -> None:
    k = row.k
    top_p = k.load(record + Field.TOP_P, f32)
    weigh = _weights(k, top, k.const(1.0, f32))
    with k.if_(top_p < 1.0):
        total = _sum(row, weigh)
        share = (k.max(top_p, k.const(0.0, f32)) * 2.0**32).to_long()
        target = ((total.sext(i128) * share.sext(i128)) >> 32).trunc(i64)
        target = k.max(target, k.const(1))
        with k.if_(row.listed.get().eq(0)):
            _narrow(row, top, weigh, target)
        _keep_prefix(row, weigh, target)


def _draw(row: _List, record: Value, top: Value, temperature: Value) -> Value:
    """Index of the drawn element."""
    k = row.k
    floor = k.min(top + k.log(k.load(record + Field.MIN_P, f32)), top)
    weigh = _weights(k, top, k.const(1.0, f32) / temperature)

    def kept(x: Value) -> Value:
        w = weigh(x)
        return k.select(x >= floor, w, k.const(0, w.type))

    number = _random(k, record)
    r = ((number.zext(i128) * _sum(row, kept).zext(i128)) >> 64).trunc(i64)
    before = k.var(0, i64)
    chosen = k.var(-1, i64)
    i = k.var(0, i64)
    count, values = row.count.get(), row.values.get()
    staged = k.stack(i64, LANES)
    with k.while_(lambda: (i.get() < count) & (chosen.get() < 0)):
        inside = k.lanes(range(LANES), i32) < k.splat((count - i.get()).trunc(i32))
        w = kept(k.load(values + i.get() * 4, f32v))
        w = k.select(inside, w, k.const(0, w.type))
        after = before.get() + k.hsum(w)
        with k.if_(after > r):
            k.store(w, staged)
            with k.loop(0, LANES) as lane:
                before.set(before.get() + k.load(staged + lane * 8, i64))
                with k.if_((chosen.get() < 0) & (before.get() > r)):
                    chosen.set(i.get() + lane)
        before.set(after)
        i.set(i.get() + LANES)
    return k.max(chosen.get(), k.const(0))


def _weights(k: Kernel, top: Value, inverse: Value) -> Weigh:
    """floor(exp((x - top) * inverse) * 2^40), i64; 0 for NaN."""
    return lambda x: (k.exp((x - top) * inverse) * 2.0**WEIGHT_BITS).to_long()


def _sum(row: _List, weigh: Weigh) -> Value:
    k = row.k
    total = k.var(k.const(0, vec(i64, LANES)))
    with row.blocks() as (_, x):
        total.set(total.get() + weigh(x))
    return k.hsum(total.get())


# --- the prefix of the order --------------------------------------------------------------------


def _key(x: Value) -> Value:
    """i32 whose signed order is the order of f32; both zeros are one."""
    bits = (x + 0.0).as_i32()
    return bits ^ (bits.sar(31) & 0x7FFFFFFF)


def _narrow(row: _List, top: Value, weigh: Weigh, target: Value) -> None:
    """List the elements within the smallest distance that holds `target` of weight, else all."""
    k = row.k
    bounds = [top - float(d) for d in DISTANCES]
    kind = weigh(k.splat(top)).type
    sums = [k.var(k.const(0, kind)) for _ in bounds]
    with row.blocks() as (_, x):
        w = weigh(x)
        for bound, total in zip(bounds, sums, strict=True):
            total.set(total.get() + k.select(x >= bound, w, k.const(0, kind)))
    nearest = k.const(-INF, f32)
    for bound, total in reversed(list(zip(bounds, sums, strict=True))):
        held = k.hsum(total.get())
        is_enough = (held if held.type == i64 else held.zext(i64)) >= target
        nearest = k.select(is_enough, bound, nearest)
    _keep(row, _key(nearest), k.const(2**62))


def _keep_prefix(row: _List, weigh: Weigh, target: Value) -> None:
    """Keep the shortest prefix of the order whose weight reaches `target`, which it can."""
    k = row.k

    def weight_from(key: Value) -> Value:
        total = k.var(k.const(0, vec(i64, LANES)))
        with row.blocks() as (_, x):
            w = weigh(x)
            w = w if w.type == vec(i64, LANES) else w.zext(i64)
            is_in = (_key(x) >= key) & x.eq(x)
            total.set(total.get() + k.select(is_in, w, k.const(0, w.type)))
        return k.hsum(total.get())

    # The largest key from which on the weight still reaches the target, bit by bit.
    least = k.var(-(2**31), i32)
    bit = k.var(-(2**31), i32)
    with k.while_(lambda: bit.get().ne(0)):
        trial = least.get() ^ bit.get()  # the top bit of a signed key is upside down
        with k.if_(weight_from(trial) >= target):
            least.set(trial)
        bit.set(bit.get() >> 1)
    key = least.get()
    missing = target - weight_from(key + 1)
    one = weigh((key ^ (key.sar(31) & 0x7FFFFFFF)).as_f32())
    each = one if one.type == i64 else one.zext(i64)
    _keep(row, key, (missing + each - 1).udiv(each))


def _keep(row: _List, key: Value, num_equal: Value) -> None:
    """Keep elements of a larger key and the first `num_equal` of this one."""
    k = row.k
    kept = k.var(0, i64)
    equal_left = k.var(num_equal)
    values = row.values.get()
    with row.blocks() as (i, x):
        hits = k.var(k.mask((_key(x) >= key) & x.eq(x)))
        with k.while_(lambda: hits.get().ne(0)):
            index = i + k.trailing_zeros(hits.get()).zext(i64)
            hits.set(hits.get() & (hits.get() - 1))
            value, token = k.load(values + index * 4, f32), row.id_at(index)
            is_equal = _key(value).eq(key)
            with k.if_(is_equal.eq(0) | (equal_left.get() > 0)):
                k.store(value, row.scratch + kept.get() * 4)
                k.store(token, row.ids + kept.get() * 4)
                kept.set(kept.get() + 1)
            equal_left.set(equal_left.get() - is_equal.zext(i64))
    row.values.set(row.scratch)
    row.count.set(kept.get())
    row.listed.set(1)


# --- random numbers -----------------------------------------------------------------------------


def philox(k: Kernel, counter: list[Value], key: list[Value]) -> list[Value]:
    """Philox4x32-10 of four counter words and two key words, all i32."""
    a, b, c, d = counter
    x, y = key
    for _ in range(10):
        first, second = a.zext(i64) * 0xD2511F53, c.zext(i64) * 0xCD9E8D57
        a, b, c, d = (
            (second >> 32).trunc(i32) ^ b ^ x,
            second.trunc(i32),
            (first >> 32).trunc(i32) ^ d ^ y,
            first.trunc(i32),
        )
        x, y = x + (0x9E3779B9 - 2**32), y + (0xBB67AE85 - 2**32)
    return [a, b, c, d]


def _random(k: Kernel, record: Value) -> Value:
    """The record's 64 random bits."""
    seed, position = (k.load(record + field, i64) for field in (Field.SEED, Field.POSITION))
    zero = k.const(0, i32)
    words = [position.trunc(i32), (position >> 32).trunc(i32), zero, zero]
    low, high, *_ = philox(k, words, [seed.trunc(i32), (seed >> 32).trunc(i32)])
    return low.zext(i64) | (high.zext(i64) << 32)


# --- log-probabilities --------------------------------------------------------------------------


def _log_probabilities(
    k: Kernel, raw: Value, vocab: Value, token: Value, record: Value, top: Value
) -> None:
    nan = k.const(NAN, f32)
    target = k.load(record + Field.TARGET, i32)
    wants_token = (k.load(record + Field.FLAGS, i32) & WANT_LOGPROB).ne(0)
    wants_target = target.zext(i64) < vocab
    k.store(nan, record + Field.TOKEN_LOGPROB)
    k.store(nan, record + Field.TARGET_LOGPROB)
    num_top = k.load(record + Field.NUM_TOP, i32).zext(i64)
    with k.if_(wants_token | wants_target | (num_top > 0)):
        row = _List(k, k.var(raw), k.var(vocab), k.var(0, i1), raw, raw)
        total = _sum(row, _weights(k, top, k.const(1.0, f32)))
        log_total = k.log(total.to_float() * 2.0**-WEIGHT_BITS)
        for wanted, token_id, field in (
            (wants_token, token, Field.TOKEN_LOGPROB),
            (wants_target, target, Field.TARGET_LOGPROB),
        ):
            with k.if_(wanted):
                value = (k.load(raw + token_id.zext(i64) * 4, f32) - top) - log_total
                # One NaN, whatever its history.
                k.store(k.select(value.eq(value), value, nan), record + field)
        with k.if_(num_top > 0):
            _write_top(row, record, num_top, lambda x: (x - top) - log_total)


def _write_top(
    row: _List, record: Value, num_top: Value, log_probability: Callable[[Value], Value]
) -> None:
    """The top list, in order; (-1, NaN) beyond its last pair."""
    k = row.k
    pairs = k.load(record + Field.TOP, i64)
    _list_largest(row, pairs, num_top)
    with k.loop(0, num_top) as i:
        pair = pairs + i * PAIR_BYTES
        token, value = k.load(pair, i32), log_probability(k.load(pair + 4, f32))
        is_real = (token >= 0) & value.eq(value)
        k.store(k.select(is_real, token, k.const(-1, i32)), pair)
        k.store(k.select(is_real, value, k.const(NAN, f32)), pair + 4)


def _list_largest(row: _List, pairs: Value, count: Value) -> None:
    """The `count` largest elements above -inf as pairs (index, value), in order; (-1, -inf) beyond
    them. Few elements exceed the last of the list so far, so inserting each is cheap."""
    k = row.k
    with k.loop(0, count) as i:
        k.store(k.const(-1, i32), pairs + i * PAIR_BYTES)
        k.store(k.const(-INF, f32), pairs + i * PAIR_BYTES + 4)
    last = pairs + (count - 1) * PAIR_BYTES
    least = k.var(k.const(-INF, f32))
    with row.blocks() as (i, x):
        hits = k.var(k.mask(x > least.get()))
        with k.while_(lambda: hits.get().ne(0)):
            index = i + k.trailing_zeros(hits.get()).zext(i64)
            hits.set(hits.get() & (hits.get() - 1))
            value = k.load(row.values.get() + index * 4, f32)
            with k.if_(value > least.get()):
                _insert(k, pairs, last, index.trunc(i32), value)
                least.set(k.load(last + 4, f32))


def _insert(k: Kernel, pairs: Value, last: Value, token: Value, value: Value) -> None:
    """Put a pair before the first smaller one of a sorted list; the last one falls out."""
    at = k.var(last)

    def before() -> Value:
        return k.max(at.get() - PAIR_BYTES, pairs)

    with k.while_(lambda: (at.get() > pairs) & (k.load(before() + 4, f32) < value)):
        k.store(k.load(before(), i64), at.get())
        at.set(before())
    k.store(token, at.get())
    k.store(value, at.get() + 4)
