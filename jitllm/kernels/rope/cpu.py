"""Rotary embedding on the CPU: an item is one head of one token."""

from __future__ import annotations

from typing import Any

from jitllm.jit.emit import Kernel, Value, f32, i32, i64, spans, vec
from jitllm.kernels.op import Count, Ctx, Env, KernelSpec, Launch
from jitllm.kernels.rope import Rope


def launches(op: Rope, env: Env) -> list[Launch]:
    """One launch; items are heads, all heads of a token side by side."""
    heads = op.x.width // op.head_dim
    scale = op.position_scale
    spec = KernelSpec.of(
        "rope",
        heads=heads,
        head_dim=op.head_dim,
        num_rotated=op.num_rotated,
        interleaved=op.interleaved,
        num_scales=len(scale.data) // 4 if scale else 0,
        scale_positions=op.scale_positions,
        x_stride=op.x.stride_bytes,
        table_stride=op.table.stride_bytes,
    )
    args = (env.buffer(op.x), env.buffer(op.table), env.const(scale) if scale else 0)
    return [Launch(spec, Count.TOKENS, heads, args)]


def emit(
    k: Kernel,
    *,
    heads: int,
    head_dim: int,
    num_rotated: int,
    interleaved: bool,
    num_scales: int,
    scale_positions: int,
    x_stride: int,
    table_stride: int,
) -> None:
    """Arguments: x, table, position scales (used where `num_scales`)."""
    x, table, scales = k.arg(0), k.arg(1), k.arg(2)
    half = num_rotated // 2
    with k.items() as item:
        token, head = item.udiv(heads), item.urem(heads)
        row = x + token * x_stride + head * (head_dim * 4)
        cosines = table + token * table_stride
        sines = cosines + half * 4
        scale = None
        if num_scales:
            scale = _position_scale(k, token, scales, num_scales, scale_positions)

        for first, lanes in spans(half):
            kind = vec(f32, lanes)
            a, b = load_pairs(k, row, first, kind, half, interleaved)
            cos, sin = k.load(cosines + first * 4, kind), k.load(sines + first * 4, kind)
            a, b = k.fma(a, cos, -(b * sin)), k.fma(a, sin, b * cos)
            if scale is not None:
                a, b = a * scale, b * scale
            store_pairs(k, row, first, a, b, half, interleaved)
        if scale is not None:
            for first, lanes in spans(head_dim - num_rotated):
                at = row + (num_rotated + first) * 4
                k.store(k.load(at, vec(f32, lanes)) * scale, at)


def load_pairs(
    k: Kernel, row: Value, first: int, kind: Any, half: int, interleaved: bool
) -> tuple[Value, Value]:
    """First and second elements of the pairs from `first` on, as many as `kind` has lanes."""
    if not interleaved:
        return k.load(row + first * 4, kind), k.load(row + (half + first) * 4, kind)
    both = k.load(row + first * 8, vec(f32, 2 * kind.count))
    evens, odds = range(0, 2 * kind.count, 2), range(1, 2 * kind.count, 2)
    return k.shuffle(both, both, evens), k.shuffle(both, both, odds)


def store_pairs(
    k: Kernel, row: Value, first: int, a: Value, b: Value, half: int, interleaved: bool
) -> None:
    """What `load_pairs` loaded, back in its place."""
    if not interleaved:
        k.store(a, row + first * 4)
        k.store(b, row + (half + first) * 4)
        return
    lanes = a.type.count
    order = [lane for i in range(lanes) for lane in (i, lanes + i)]
    k.store(k.shuffle(a, b, order), row + first * 8)


def _position_scale(
    k: Kernel, token: Value, scales: Value, num_scales: int, scale_positions: int
) -> Value:
    """scales[min(position // scale_positions, last)]."""
    position = k.load(k.ctx(Ctx.POSITIONS) + token * 4, i32)
    step = k.min(position.udiv(scale_positions), k.const(num_scales - 1, i32))
    return k.load(scales + step.sext(i64) * 4, f32)
