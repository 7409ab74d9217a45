"""Rotary angles and rotations: every tier against NumPy's f64, and against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.tiers import PLAIN, Tier, available
from jitllm.kernels.op import Buffer, Const
from jitllm.kernels.rope import Rope
from jitllm.kernels.rope.reference import rope
from jitllm.kernels.rope_table import RopeTable
from jitllm.kernels.rope_table.reference import rope_table
from tests.ops.harness import HERE, Rig

FASTEST = available()[-1]

POSITIONS = np.array([0, 1, 2, 63, 4095, 131071, 999_999, 1_000_000, 2**24 - 1], np.int32)


def frequencies(count: int, base: float = 10_000.0) -> NDArray[np.float64]:
    return base ** (-np.arange(count) / count)


def table_of(
    positions: NDArray[np.int32], freqs: NDArray[np.float64], tier: Tier, scale: float = 1.0
) -> NDArray[np.float32]:
    """f32 [tokens, 2n] as the tier computes it."""
    rig = Rig(num_tokens=len(positions), positions=positions)
    op = RopeTable(Buffer("table", 2 * len(freqs)), Const("f", freqs.tobytes()), scale)
    rig.run(op, tier, pieces=2)
    return rig.value("table")


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("count", [1, 2, 7, 8, 12, 40, 64, 128])
@pytest.mark.parametrize("scale", [1.0, 1.2772588])
def test_table_is_right_to_an_ulp(count: int, scale: float, tier: Tier) -> None:
    freqs = frequencies(count)
    table = table_of(POSITIONS, freqs, tier, scale)
    expected = rope_table(POSITIONS, freqs, scale)
    assert (np.abs(table - expected) <= np.spacing(np.abs(expected))).all()
    assert np.array_equal(table, table_of(POSITIONS, freqs, PLAIN, scale))


def test_table_over_many_angles() -> None:
    """All quadrants, both sides of every reduction boundary: NumPy's f32 nearly always."""
    positions = np.arange(0, 1_000_000, 331, dtype=np.int32)
    freqs = frequencies(24, 1e6)
    table, expected = table_of(positions, freqs, FASTEST), rope_table(positions, freqs)
    assert (np.abs(table - expected) <= np.spacing(np.abs(expected))).all()
    assert (table == expected).mean() > 0.9999


def test_table_near_quarter_turns() -> None:
    """Angles that are a quarter turn as exactly as f64 can say: cancellation must not show."""
    turns = np.arange(1, 2000, dtype=np.int32)
    freqs = np.array([np.pi / 2, np.pi, np.pi / 4])
    expected = rope_table(turns, freqs)
    table = table_of(turns, freqs, FASTEST)
    assert (np.abs(table - expected) <= np.spacing(np.abs(expected))).all()


def rotated(
    x: NDArray[np.float32],
    table: NDArray[np.float32],
    tier: Tier,
    head_dim: int,
    interleaved: bool,
    factors: NDArray[np.float32] | None = None,
    positions: NDArray[np.int32] | None = None,
    pieces: int = 1,
) -> NDArray[np.float32]:
    """x after the op, in place."""
    rig = Rig(num_tokens=len(x), arrays={"x": x, "table": table}, positions=positions)
    scales = None if factors is None else Const("scales", factors.tobytes())
    op = Rope(
        Buffer("x", x.shape[1]),
        Buffer("table", table.shape[1]),
        head_dim,
        table.shape[1],
        interleaved,
        scales,
        scale_positions=100,
    )
    rig.run(op, tier, pieces)
    return rig.value("x")


SHAPES = [(3, 64, 64), (1, 256, 256), (2, 80, 80), (5, 24, 24), (2, 96, 32), (3, 80, 20), (1, 6, 2)]
"""Heads, head dimension, elements rotated."""


def rotation(
    heads: int, head_dim: int, num_rotated: int, interleaved: bool, is_scaled: bool
) -> tuple[tuple[Any, ...], NDArray[np.float64]]:
    """What to hand to `rotated` beside the tier (x, table, and the rest), and what it should be."""
    rng = np.random.default_rng(head_dim)
    positions = np.array([0, 99, 100, 250, 299, 300, 1000], np.int32)
    x = rng.standard_normal((len(positions), heads * head_dim), np.float32)
    table = rope_table(positions, frequencies(num_rotated // 2), 1.1)
    factors = np.array([1.0, 1.25, 1.7, 3.1], np.float32) if is_scaled else None
    of_token = None if factors is None else factors[np.minimum(positions // 100, 3)]
    expected = rope(x, table, head_dim, num_rotated, interleaved, of_token)
    return (x, table, head_dim, interleaved, factors, positions), expected


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("is_scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("heads", "head_dim", "num_rotated"), SHAPES)
def test_rotation(
    heads: int, head_dim: int, num_rotated: int, interleaved: bool, is_scaled: bool, tier: Tier
) -> None:
    (x, table, *args), expected = rotation(heads, head_dim, num_rotated, interleaved, is_scaled)
    out = rotated(x, table, tier, *args)
    assert np.abs(out - expected).max() < 2e-6
    assert np.array_equal(out, rotated(x, table, PLAIN, *args))
    assert np.array_equal(out, rotated(x, table, tier, *args, pieces=5))


@pytest.mark.parametrize("tier", HERE)
def test_what_is_not_rotated_stays(tier: Tier) -> None:
    x = np.random.default_rng(1).standard_normal((4, 2 * 40), np.float32)
    table = rope_table(np.arange(4, dtype=np.int32), frequencies(6))
    out = rotated(x, table, tier, 40, interleaved=False).reshape(4, 2, 40)
    assert np.array_equal(out[..., 12:], x.reshape(4, 2, 40)[..., 12:])
    assert not np.array_equal(out[1:, :, :12], x.reshape(4, 2, 40)[1:, :, :12])
