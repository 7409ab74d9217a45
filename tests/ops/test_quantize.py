"""Quantised activations: every tier against the reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.tiers import Tier
from jitllm.kernels.op import Buffer, Element, Rows
from jitllm.kernels.quantize import Quantize
from jitllm.kernels.quantize.reference import RECORD, quantize
from tests.ops.harness import HERE, Rig


def run(
    x: NDArray[np.float32], tier: Tier, pieces: int = 1, of: Rows = Rows.TOKENS
) -> NDArray[np.uint8]:
    """Records as the tier computes them, uint8 [rows, groups * 64]."""
    rows, width = x.shape
    src, dst = Buffer("src", width, of), Buffer("dst", width, of, Element.Q8)
    tokens, outputs = (rows + 1, rows) if of is Rows.OUTPUTS else (rows, rows + 1)
    rig = Rig(num_tokens=tokens, num_outputs=outputs, arrays={"src": x})
    rig.run(Quantize(src, dst), tier, pieces)
    return rig.value("dst").reshape(rows, -1)


def normal(rows: int, width: int) -> NDArray[np.float32]:
    """Activations with outliers."""
    rng = np.random.default_rng(width)
    x = rng.standard_normal((rows, width)) * np.exp(rng.standard_normal((rows, width)) * 2)
    return x.astype(np.float32)


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (3, 640), (70, 256), (2, 45), (4, 7)])
@pytest.mark.parametrize("of", list(Rows))
def test_records_equal_the_reference(tier: Tier, rows: int, width: int, of: Rows) -> None:
    """Every step of the contract is one IEEE operation, so NumPy gives the same bytes."""
    x = normal(rows, width)
    assert (run(x, tier, of=of) == quantize(x)).all()


@pytest.mark.parametrize("tier", HERE)
def test_edges(tier: Tier) -> None:
    """Zeros, ties, denormals, huge values."""
    x = np.zeros((8, 64), np.float32)
    x[1, 3] = -5.0  # one outlier
    x[2, :32] = np.arange(32) + 0.5
    x[2, 0] = 127.0  # scale 1: every other element is a tie
    x[3] = 1e-39
    x[4, ::2] = -3e36
    x[5] = 1.0
    x[6] = np.linspace(-127, 127, 64)
    x[7, :16], x[7, 16:] = 1.0, -1.0
    records = run(x, tier)
    assert (records == quantize(x)).all()
    got = records.view(RECORD).reshape(8, 2)
    assert not records[0].any()
    assert got[1, 0]["q"][3] == -127
    assert list(got[2, 0]["q"][:6]) == [127, 2, 2, 4, 4, 6]
    assert got[7, 0]["neg_lo"] == -16 * 127
    assert got[7, 0]["neg_hi"] == 16 * 127
    assert got[7, 0]["neg"] == 0


@pytest.mark.parametrize("tier", HERE)
def test_error_is_half_a_step(tier: Tier) -> None:
    """q * scale is within half a scale of the value (and a rounding error)."""
    x = normal(5, 128)
    record = run(x, tier).view(RECORD).reshape(5, 4)
    back = record["q"].astype(np.float64) * record["scale"][..., None]
    error = np.abs(back.reshape(5, -1) - x)
    assert (error <= np.repeat(record["scale"], 32, axis=1) * 0.50001).all()


@pytest.mark.parametrize("tier", HERE)
def test_pieces_do_not_matter(tier: Tier) -> None:
    """Rows cut over calls as threads would."""
    x = normal(10, 96)
    assert (run(x, tier, pieces=3) == run(x, tier)).all()
