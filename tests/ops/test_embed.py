"""Embedding rows: every format and tier against the reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.tiers import Tier
from jitllm.kernels.embed import Embed
from jitllm.kernels.embed.reference import embed
from jitllm.kernels.layout import FORMATS, FormatCode
from jitllm.kernels.matmul.reference import random_tiles
from jitllm.kernels.op import Buffer, Weight
from tests.ops.harness import HERE, Rig

ROWS = 37  # two whole tiles and a piece of one
TOKENS = np.array([0, 36, 15, 16, 17, 36, 1], np.int32)


def run(
    code: FormatCode, table: bytes, cols: int, tier: Tier, *, scale: float = 1.0, pieces: int = 1
) -> NDArray[np.float32]:
    """Hidden states as the tier computes them, f32 [tokens, cols]."""
    weight, dst = Weight("token_embd", None, code, ROWS, cols), Buffer("dst", cols)
    rig = Rig(num_tokens=len(TOKENS), tokens=TOKENS, weights={("token_embd", None): table})
    rig.run(Embed(weight, dst, scale), tier, pieces)
    return rig.value("dst")


def table_of(code: FormatCode, cols: int) -> bytes:
    return random_tiles(FORMATS[code], ROWS, cols, np.random.default_rng(cols))


def widths(code: FormatCode) -> list[int]:
    form = FORMATS[code]
    if form.super_cols:
        return [256, 768]
    return [32, 96] if form.is_quantized else [32, 96, 45, 1]


CASES = [(code, cols) for code in FormatCode for cols in widths(code)]


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize(("code", "cols"), CASES, ids=lambda v: getattr(v, "name", str(v)))
def test_rows_equal_the_reference(code: FormatCode, cols: int, tier: Tier) -> None:
    table = table_of(code, cols)
    for scale in (1.0, 25.298221281347036):
        got = run(code, table, cols, tier, scale=scale)
        expected = embed(code, table, ROWS, cols, TOKENS, scale)
        assert (got.view(np.uint32) == expected.view(np.uint32)).all()


@pytest.mark.parametrize("tier", HERE)
def test_tokens_may_be_cut_anywhere(tier: Tier) -> None:
    table = table_of(FormatCode.Q6_K, 256)
    whole = run(FormatCode.Q6_K, table, 256, tier)
    assert (run(FormatCode.Q6_K, table, 256, tier, pieces=4) == whole).all()


def test_a_wrong_row_would_be_seen() -> None:
    table = table_of(FormatCode.Q4_0, 96)
    rows = embed(FormatCode.Q4_0, table, ROWS, 96, np.arange(ROWS, dtype=np.int32))
    assert len({row.tobytes() for row in rows}) == ROWS
