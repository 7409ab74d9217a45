"""The arithmetic of a group: integer dot products of tiles and activation rows, scaled and added.

Every way of multiplying in vectors comes here, so a row meets the same arithmetic in each. Knows
no loop and no address of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from jitllm.jit.emit import Kernel, Value, Var, f32, i32, i32v
from jitllm.kernels.layout import (
    ACT_NEG_ISUM,
    ACT_NEG_ISUM_HI,
    ACT_NEG_ISUM_LO,
    ACT_SCALE,
    ACT_SUM,
    ACT_SUM_HI,
    ACT_SUM_LO,
    Format,
)
from jitllm.kernels.matmul.groups import OPERANDS, Group


def add_products(
    k: Kernel,
    fmt: Format,
    tiles: Sequence[Group],
    records: Sequence[Value],
    acc: Sequence[Sequence[Var]],
) -> None:
    """Add the products of a group to accumulators, f32 [16] each, by record and tile.

    records: addresses of a group of quantised activations, one a row.
    """
    halves = fmt.scales_per_group
    sum_at = (ACT_SUM,) if halves == 1 else (ACT_SUM_LO, ACT_SUM_HI)
    for half in range(halves):
        starts = [_start(k, fmt, record, half) for record in records]
        dots = [[k.dot(start, (1 << fmt.bits) - 1) for _ in tiles] for start in starts]
        for p in range(half * OPERANDS // halves, (half + 1) * OPERANDS // halves):
            operands = [tile.operand(p) for tile in tiles]
            for record, of_row in zip(records, dots, strict=True):
                activations = k.splat(k.load(record, i32, offset=4 * p))
                for operand, dot in zip(operands, of_row, strict=True):
                    dot.add(operand, activations)
        scales = [tile.scale(half) for tile in tiles]
        lows = [tile.low(half) for tile in tiles] if fmt.has_min else []
        for record, of_row, sums in zip(records, dots, acc, strict=True):
            a_scale = k.load(record, f32, offset=ACT_SCALE)
            for t, (dot, total) in enumerate(zip(of_row, sums, strict=True)):
                s = scales[t] * a_scale
                total.set(k.fma(dot.total().to_float(), s, total.get()))
                if fmt.has_min:
                    a_sum = k.load(record, f32, offset=sum_at[half])
                    total.set(k.fma(lows[t], a_sum, total.get()))


def _start(k: Kernel, fmt: Format, record: Value, half: int) -> Value:
    """-bias * sum(a): the dot product of unsigned integers then comes out as of (q - bias)."""
    if not fmt.bias:
        return k.const(0, i32v)
    halves = fmt.scales_per_group
    negative_at = (ACT_NEG_ISUM,) if halves == 1 else (ACT_NEG_ISUM_LO, ACT_NEG_ISUM_HI)
    negative, shift = k.load(record, i32, offset=negative_at[half]), fmt.bias.bit_length() - 1
    # With one of them a record, a scalar shift spares a vector load; with two, registers for
    # scalars are what is short (5 % of Q6_K).
    return k.splat(negative << shift) if halves == 1 else k.splat(negative) << shift
