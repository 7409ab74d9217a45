"""Routing on the CPU: an item is one token."""

from __future__ import annotations

from jitllm.jit.emit import LANES, Kernel, Value, f32, f32v, i8, i32, i64
from jitllm.kernels.op import Count, Env, KernelSpec, Launch, f32_bits
from jitllm.kernels.route import LEAST_SUM, MAX_EXPERTS, Route

LOGITS, IDS, ROUTED, BIAS, LOGITS_STRIDE, IDS_STRIDE, ROUTED_STRIDE = range(7)
EXPERTS, USED, GROUPS, GROUPS_USED, SCALE = range(7, 12)
"""Argument words: addresses (BIAS may be 0), bytes between rows, numbers, and the bits of the
scale."""

_LEAST = -3.4028234663852886e38
"""The smallest finite number: what is not to be chosen while there is anything else."""

_NEVER = float("-inf")


def launches(op: Route, env: Env) -> list[Launch]:
    """One launch."""
    args = (
        env.buffer(op.logits),
        env.buffer(op.ids),
        env.buffer(op.routed),
        env.weight(op.bias) if op.bias else 0,
        op.logits.stride_bytes,
        op.ids.stride_bytes,
        op.routed.stride_bytes,
        op.logits.width,
        op.ids.width,
        op.groups,
        op.groups_used,
        f32_bits(op.scale),
    )
    spec = KernelSpec.of(
        "route",
        score=op.score,
        biased=op.bias is not None,
        grouped=op.groups > 1,
        normalised=op.is_normalised,
    )
    return [Launch(spec, Count.TOKENS, 1, args)]


def emit(k: Kernel, *, score: str, biased: bool, grouped: bool, normalised: bool) -> None:
    """The kernel; it serves every number of experts."""
    scores, choice = k.stack(f32, MAX_EXPERTS), k.stack(f32, MAX_EXPERTS)
    runs, is_kept = k.stack(f32, MAX_EXPERTS), k.stack(i8, MAX_EXPERTS)
    experts = k.arg(EXPERTS)
    with k.items() as token:
        logits = k.arg(LOGITS) + token * k.arg(LOGITS_STRIDE)
        {"softmax": _softmax, "sigmoid": _sigmoid}[score](k, logits, experts, scores)
        with k.loop(0, experts, LANES) as i:
            c = k.load(scores + i * 4, f32v)
            if biased:
                num = k.min(experts - i, k.const(LANES))
                c = c + k.load_part(k.arg(BIAS) + i * 4, num)
            _store_candidates(k, c, i, experts, choice)
        if grouped:
            _keep_best_runs(k, choice, experts, runs, is_kept)

        ids = k.arg(IDS) + token * k.arg(IDS_STRIDE)
        routed = k.arg(ROUTED) + token * k.arg(ROUTED_STRIDE)
        with k.loop(0, k.arg(USED)) as slot:
            expert = _take_best(k, choice, experts)
            k.store(expert.trunc(i32), ids + slot * 4)
            k.store(k.load(scores + expert * 4, f32), routed + slot * 4)
        _weigh(k, routed, normalised)


def _exists(k: Kernel, first: Value, num: Value) -> Value:
    """Which of the 16 lanes from `first` on are below `num`."""
    return _lanes_from(k, first) < num.trunc(i32)


def _lanes_from(k: Kernel, first: Value) -> Value:
    return k.lanes(range(LANES), i32) + k.splat(first.trunc(i32))


# --- scores -------------------------------------------------------------------------------------


def _softmax(k: Kernel, logits: Value, experts: Value, scores: Value) -> None:
    never, zero = k.const(_NEVER, f32v), k.const(0.0, f32v)
    largest, total = k.var(never), k.var(zero)
    with k.loop(0, experts, LANES) as i:
        x = k.select(_exists(k, i, experts), k.load(logits + i * 4, f32v), never)
        largest.set(k.max(x, largest.get()))
    top = k.hmax(largest.get())
    with k.loop(0, experts, LANES) as i:
        e = k.exp(k.load(logits + i * 4, f32v) - top)
        e = k.select(_exists(k, i, experts), e, zero)
        k.store(e, scores + i * 4)
        total.set(total.get() + e)
    total_of_lanes = k.hsum(total.get())
    with k.loop(0, experts, LANES) as i:
        k.store(k.load(scores + i * 4, f32v) / total_of_lanes, scores + i * 4)


def _sigmoid(k: Kernel, logits: Value, experts: Value, scores: Value) -> None:
    with k.loop(0, experts, LANES) as i:
        x = k.load(logits + i * 4, f32v)
        k.store(1.0 / (k.exp(-x) + 1.0), scores + i * 4)


# --- who is chosen ------------------------------------------------------------------------------


def _store_candidates(k: Kernel, c: Value, first: Value, num: Value, to: Value) -> None:
    """Sixteen candidates: each one can be chosen, NaN included, and what is no candidate cannot."""
    c = k.max(c, k.const(_LEAST, f32v))
    k.store(k.select(_exists(k, first, num), c, k.const(_NEVER, f32v)), to + first * 4)


def _take_best(k: Kernel, candidates: Value, num: Value) -> Value:
    """The index of the largest candidate, the lowest of equal ones; it is none any more."""
    best, where = k.var(k.const(_NEVER, f32v)), k.var(_lanes_from(k, k.const(0)))
    with k.loop(0, num, LANES) as i:
        x = k.load(candidates + i * 4, f32v)
        is_better = x > best.get()
        where.set(k.select(is_better, _lanes_from(k, i), where.get()))
        best.set(k.select(is_better, x, best.get()))
    is_best = best.get().eq(k.hmax(best.get()))
    found = -k.hmax(k.select(is_best, -where.get(), k.const(-MAX_EXPERTS, where.kind)))
    index = found.sext(i64)
    k.store(k.const(_NEVER, f32), candidates + index * 4)
    return index


def _keep_best_runs(k: Kernel, choice: Value, experts: Value, runs: Value, is_kept: Value) -> None:
    """Candidates outside the best runs are none any more."""
    groups = k.arg(GROUPS)
    length = experts.udiv(groups)
    with k.loop(0, groups, LANES) as i:  # whole vectors: past the last run there is no candidate
        k.store(k.const(_NEVER, f32v), runs + i * 4)
    with k.loop(0, groups) as g:
        first, second = k.var(_NEVER, f32), k.var(_NEVER, f32)
        with k.loop(g * length, (g + 1) * length) as i:
            c = k.load(choice + i * 4, f32)
            second.set(k.max(k.min(c, first.get()), second.get()))
            first.set(k.max(c, first.get()))
        k.store(k.max(first.get() + second.get(), k.const(_LEAST, f32)), runs + g * 4)
        k.store(k.const(0, i8), is_kept + g)
    with k.loop(0, k.arg(GROUPS_USED)):
        k.store(k.const(1, i8), is_kept + _take_best(k, runs, groups))
    with k.loop(0, experts) as i, k.if_(k.load(is_kept + i.udiv(length), i8).eq(0)):
        k.store(k.const(_NEVER, f32), choice + i * 4)


# --- weights ------------------------------------------------------------------------------------


def _weigh(k: Kernel, routed: Value, normalised: bool) -> None:
    scale = k.arg(SCALE).trunc(i32).as_f32()
    total = k.var(0.0, f32)
    if normalised:
        with k.loop(0, k.arg(USED)) as slot:
            total.set(total.get() + k.load(routed + slot * 4, f32))
    divisor = k.max(total.get(), k.const(LEAST_SUM, f32))
    with k.loop(0, k.arg(USED)) as slot:
        w = k.load(routed + slot * 4, f32)
        k.store((w / divisor if normalised else w) * scale, routed + slot * 4)
