"""Gated activations: every tier against the reference, and the same bits on every tier."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.tiers import PLAIN, Tier
from jitllm.kernels.glu import Glu
from jitllm.kernels.glu.reference import glu
from jitllm.kernels.op import Buffer, Element, Rows
from jitllm.kernels.quantize.reference import quantize
from tests.ops.harness import HERE, Rig

KINDS = ["silu", "gelu"]
Floats = NDArray[np.float32]


def data(rows: int, width: int) -> tuple[Floats, Floats]:
    """Gate and up."""
    rng = np.random.default_rng(width)
    gate, up = rng.standard_normal((2, rows, width)).astype(np.float32)
    return gate * 4, up


def run(
    gate: Floats,
    up: Floats,
    kind: str,
    tier: Tier,
    *,
    pieces: int = 1,
    of: Rows = Rows.TOKENS,
    into: str = "dst",
) -> Floats:
    """The op's result, in `into`: dst, or gate in place."""
    rows, width = gate.shape
    tokens, outputs = (rows + 2, rows) if of is Rows.OUTPUTS else (rows, 0)
    rig = Rig(tokens, outputs, arrays={"gate": gate, "up": up})
    buffers = {name: Buffer(name, width, of) for name in ("gate", "up", "dst")}
    rig.run(Glu(buffers["gate"], buffers["up"], buffers[into], kind), tier, pieces)
    out: Floats = rig.value(into)
    return out


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [*range(1, 71), 511, 512, 513, 2048, 6912])
def test_widths(tier: Tier, kind: str, width: int) -> None:
    """Every small width and whole chunks; near the exact value, tiers bit-equal, any cut."""
    gate, up = data(2, width)
    got = run(gate, up, kind, tier)
    np.testing.assert_allclose(got, glu(gate, up, kind), rtol=2e-6, atol=1e-7)
    assert got.tobytes() == run(gate, up, kind, PLAIN).tobytes()
    assert got.tobytes() == run(gate, up, kind, tier, pieces=3).tobytes()


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 16, 31, 32, 33, 65, 127, 128, 129, 511, 512, 513, 2048])
@pytest.mark.parametrize("drops", [False, True])
def test_rows_quantised_on_the_way(tier: Tier, kind: str, width: int, drops: bool) -> None:
    """The records of what is written otherwise; nothing else is written where it is dropped."""
    gate, up = data(2, width)
    expected = run(gate, up, kind, tier)
    sources = Buffer("gate", width), Buffer("up", width)
    dst, records = Buffer("dst", width), Buffer("records", width, element=Element.Q8)
    for pieces in (1, 3):
        rig = Rig(2, 0, arrays={"gate": gate, "up": up})
        rig.run(Glu(*sources, dst, kind, records, drops), tier, pieces)
        assert (rig.value("records").reshape(2, -1) == quantize(expected)).all()
        assert ("dst" in rig.buffers) != drops
        assert drops or rig.value("dst").tobytes() == expected.tobytes()


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("kind", KINDS)
def test_output_rows_and_in_place(tier: Tier, kind: str) -> None:
    """Rows of outputs; dst may be gate."""
    gate, up = data(3, 700)
    expected = run(gate, up, kind, tier)
    assert run(gate, up, kind, tier, of=Rows.OUTPUTS).tobytes() == expected.tobytes()
    assert run(gate, up, kind, tier, into="gate").tobytes() == expected.tobytes()


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("kind", KINDS)
def test_far_values(tier: Tier, kind: str) -> None:
    """Large gates pass or vanish; nothing overflows; NaN stays NaN."""
    gate = np.array([[100, 1e4, 3e38, -100, -1e4, -3e38, 0, -0.0, np.nan]], np.float32)
    got = run(gate, np.ones_like(gate), kind, tier)[0]
    assert list(got[:3]) == list(gate[0, :3])
    assert (np.abs(got[3:8]) < 20).all()
    assert (np.abs(got[[3, 4, 6, 7]]) < 1e-30).all()
    assert np.isnan(got[8])
