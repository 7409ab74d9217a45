"""Norms: every tier against the reference, and the same bits on every tier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.tiers import PLAIN, Tier
from jitllm.kernels.layout import FormatCode
from jitllm.kernels.norm import Norm
from jitllm.kernels.norm.reference import norm
from jitllm.kernels.op import Buffer, Element, Rows, Weight
from jitllm.kernels.quantize.reference import quantize
from tests.ops.harness import HERE, Rig

Floats = NDArray[np.float32]
EPS = 1e-6


def data(rows: int, width: int, segment: int) -> tuple[Floats, Floats, Floats]:
    """Input, gain, residual."""
    rng = np.random.default_rng(1000 * width + segment)
    shapes = ((rows, width), (segment,), (rows, width))
    x, weight, add = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    return x * 7, weight, add


def run(
    x: Floats,
    weight: Floats,
    add: Floats | None,
    tier: Tier,
    *,
    pieces: int = 1,
    of: Rows = Rows.TOKENS,
    into: str = "dst",
) -> Floats:
    """The op's result; `into` names the buffer that is written: dst, or src or add in place."""
    rows, width = x.shape
    buffers = {name: Buffer(name, width, of) for name in ("src", "dst", "add")}
    gain = Weight("gain", 0, FormatCode.F32, 0, len(weight))
    arrays = {"src": x} if add is None else {"src": x, "add": add}
    tokens, outputs = (rows + 2, rows) if of is Rows.OUTPUTS else (rows, 0)
    rig = Rig(tokens, outputs, arrays=arrays, weights={("gain", 0): weight.tobytes()})
    op = Norm(
        buffers["src"],
        buffers[into],
        gain,
        EPS,
        len(weight),
        None if add is None else buffers["add"],
    )
    rig.run(op, tier, pieces)
    out: Floats = rig.value(into)
    return out


def check(got: Floats, x: Floats, weight: Floats, add: Floats | None) -> None:
    """Within a few roundings of exact arithmetic."""
    exact = norm(x, weight, EPS, add)
    size = np.abs(norm(x, weight, EPS)) + (0 if add is None else np.abs(add))
    assert (np.abs(got - exact) <= 1e-6 * size + 1e-30).all()


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("width", range(1, 71))
def test_ragged_widths(tier: Tier, width: int) -> None:
    """Whole rows of every small width; tiers bit-equal."""
    x, weight, add = data(3, width, width)
    got = run(x, weight, add, tier)
    check(got, x, weight, add)
    assert got.tobytes() == run(x, weight, add, PLAIN).tobytes()


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize(
    ("rows", "width", "segment"),
    [(1, 640, 640), (1, 1024, 256), (5, 96, 3), (3, 66, 22), (2, 70, 35), (1, 5376, 5376)],
)
@pytest.mark.parametrize("of", list(Rows))
@pytest.mark.parametrize("with_add", [False, True])
def test_segments(
    tier: Tier, rows: int, width: int, segment: int, of: Rows, with_add: bool
) -> None:
    """Heads and rows; cutting the items over calls changes nothing."""
    x, weight, residual = data(rows, width, segment)
    add = residual if with_add else None
    got = run(x, weight, add, tier, of=of)
    check(got, x, weight, add)
    assert got.tobytes() == run(x, weight, add, PLAIN, of=of).tobytes()
    assert got.tobytes() == run(x, weight, add, tier, of=of, pieces=3).tobytes()


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("into", ["src", "add"])
@pytest.mark.parametrize(("width", "segment"), [(64, 64), (70, 14)])
def test_in_place(tier: Tier, into: str, width: int, segment: int) -> None:
    """dst may be src or the residual."""
    x, weight, add = data(4, width, segment)
    expected = run(x, weight, add, tier)
    assert run(x, weight, add, tier, into=into).tobytes() == expected.tobytes()


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 31, 32, 33, 63, 65, 127, 128, 129, 640, 2048])
@pytest.mark.parametrize("with_add", [False, True])
@pytest.mark.parametrize("drops", [False, True])
def test_rows_quantised_on_the_way(tier: Tier, width: int, with_add: bool, drops: bool) -> None:
    """The records of what is written otherwise; nothing else is written where it is dropped."""
    x, weight, residual = data(3, width, width)
    expected = run(x, weight, residual if with_add else None, tier)
    src, dst, add = (Buffer(name, width) for name in ("src", "dst", "add"))
    records = replace(dst, name="records", element=Element.Q8)
    gain = Weight("gain", 0, FormatCode.F32, 0, width)
    op = Norm(src, dst, gain, EPS, width, add if with_add else None, records, drops)
    arrays = {"src": x, "add": residual} if with_add else {"src": x}
    for pieces in (1, 3):
        rig = Rig(3, 0, arrays=arrays, weights={("gain", 0): weight.tobytes()})
        rig.run(op, tier, pieces)
        assert (rig.value("records").reshape(3, -1) == quantize(expected)).all()
        assert ("dst" in rig.buffers) != drops
        assert drops or rig.value("dst").tobytes() == expected.tobytes()


@pytest.mark.parametrize("tier", HERE)
def test_a_row_of_zeros(tier: Tier) -> None:
    """eps keeps it finite."""
    x = np.zeros((1, 40), np.float32)
    assert not run(x, np.ones(40, np.float32), None, tier).any()
