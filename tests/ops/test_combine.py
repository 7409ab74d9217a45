"""Adding up experts: every tier gives the reference's bits."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.tiers import PLAIN, Tier
from jitllm.kernels.combine import Combine
from jitllm.kernels.combine.reference import combine
from jitllm.kernels.op import Buffer
from tests.ops.harness import HERE, Rig

F32s = NDArray[np.float32]


def data(tokens: int, used: int, width: int) -> tuple[F32s, F32s, F32s]:
    """What the experts say, their weights, a residual."""
    rng = np.random.default_rng(width)
    shapes = ((tokens, used, width), (tokens, used), (tokens, width))
    src, routed, add = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return src, routed, add


def run(
    src: F32s,
    routed: F32s,
    add: F32s,
    into: str,
    tier: Tier,
    *,
    scale: float = 1.0,
    pieces: int = 1,
) -> F32s:
    """The op's result; into: "dst" on its own, "dst+add", or "add" in place."""
    tokens, used, width = src.shape
    rig = Rig(tokens, arrays={"src": src.reshape(tokens, -1), "routed": routed, "add": add})
    buffers = {name: Buffer(name, width) for name in ("dst", "add")}
    dst = buffers[into.partition("+")[0]]
    residual = buffers["add"] if "add" in into else None
    op = Combine(Buffer("src", used * width), Buffer("routed", used), dst, residual, scale=scale)
    rig.run(op, tier, pieces)
    out: F32s = rig.value(dst.name)
    return out


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("into", ["dst", "dst+add", "add"])
@pytest.mark.parametrize(("used", "width"), [(1, 32), (2, 512), (3, 544), (8, 2048)])
def test_slots_are_added_in_order(used: int, width: int, into: str, tier: Tier) -> None:
    """The reference rounds as the contract says, but for rare double rounding in its fma."""
    src, routed, add = data(3, used, width)
    got = run(src, routed, add, into, tier, scale=0.22)
    wanted = combine(src, routed, add if "add" in into else None, 0.22)
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-6)
    assert (got == wanted).mean() >= 0.99
    assert got.tobytes() == run(src, routed, add, into, PLAIN, scale=0.22).tobytes()
    assert got.tobytes() == run(src, routed, add, into, tier, scale=0.22, pieces=5).tobytes()
