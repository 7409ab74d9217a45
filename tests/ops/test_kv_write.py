"""Keys and values in pages: every tier against the reference, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from jitllm.jit.tiers import Tier
from jitllm.kernels.kv_write.reference import kv_write
from tests.ops.harness import HERE
from tests.ops.histories import Case, Histories

CASES = [
    Case(k_dim=64, v_dim=64, lengths=(70, 3)),
    Case(heads=6, kv_heads=3, k_dim=24, v_dim=40, page_tokens=1, lengths=(5, 2)),
    Case(heads=2, kv_heads=2, k_dim=17, v_dim=31, page_tokens=16, lengths=(33,)),
    Case(heads=2, kv_heads=2, k_dim=80, v_dim=16, page_tokens=256, element="f32"),
    Case(heads=2, kv_heads=1, k_dim=9, v_dim=3, page_tokens=4, element="f32", lengths=(7, 9)),
    Case(k_dim=64, v_dim=96, element="q8_0", lengths=(70, 3)),
    Case(heads=6, kv_heads=3, k_dim=32, v_dim=64, page_tokens=1, element="q8_0", lengths=(5, 2)),
    Case(heads=2, kv_heads=2, k_dim=128, v_dim=32, page_tokens=16, element="q8_0", lengths=(33,)),
]


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pages_equal_the_reference(case: Case, tier: Tier) -> None:
    """Values of every size, also such that f16 holds only as denormals, zeros or infinities.
    Slots that no token writes keep their bytes."""
    native, numpy = Histories(case), Histories(case)
    rng = np.random.default_rng(3)
    for source in (native.k, native.v):
        for values in source:
            values *= np.exp2(rng.integers(-28, 18, values.shape)).astype(np.float32)
    tokens = case.tokens()
    native.step(tokens, tier, pieces=3)

    positions = np.array([p for _, p in tokens], np.int32)
    row_of = np.array([row for row, _ in tokens], np.int32)
    k = np.stack([native.k[row][p] for row, p in tokens])
    v = np.stack([native.v[row][p] for row, p in tokens])
    pages = [numpy.views(row) for row in range(len(case.lengths))]
    kv_write(k, v, positions, pages, row_of)
    for page, expected in zip(native.pages, numpy.pages, strict=True):
        assert np.array_equal(page.view, expected.view)
