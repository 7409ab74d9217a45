"""Sorting pairs by expert: every tier against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.tiers import Tier
from jitllm.kernels.dispatch import HEAD_BYTES, Dispatch
from jitllm.kernels.dispatch.reference import dispatch
from jitllm.kernels.op import PANEL_TOKENS, Buffer, Element
from tests.ops.harness import HERE, Rig

Ints = NDArray[np.int32]


def run(ids: Ints, experts: int, tier: Tier) -> tuple[Ints, list[tuple[int, ...]]]:
    """Order and panels of i32 [tokens, used]."""
    tokens, used = ids.shape
    rig = Rig(tokens, arrays={"ids": ids})
    table = Dispatch.table_buffer("table", used)
    rig.run(Dispatch(Buffer("ids", used, element=Element.I32), table, experts), tier)
    return parts(rig.memory["table"].view.view(np.int32), tokens * used)


def parts(words: Ints, num_pairs: int) -> tuple[Ints, list[tuple[int, ...]]]:
    """Order and panels in the words of a table."""
    records = words[HEAD_BYTES // 4 :][: 4 * num_pairs].reshape(-1, 4)
    return records[:, 0].copy(), [tuple(r) for r in records[: words[0], 1:].tolist()]


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize(
    ("tokens", "used", "experts"),
    [(1, 1, 1), (1, 8, 64), (2, 1, 8), (5, 2, 8), (63, 3, 17), (200, 6, 8), (150, 1, 2)],
)
def test_pairs_are_sorted_and_cut_into_panels(
    tokens: int, used: int, experts: int, tier: Tier
) -> None:
    rng = np.random.default_rng(tokens)
    ids = np.array([rng.permutation(experts)[:used] for _ in range(tokens)], np.int32)
    order, panels = run(ids, experts, tier)
    wanted_order, wanted_panels = dispatch(ids, experts)
    assert (order == wanted_order).all()
    assert panels == wanted_panels


@pytest.mark.parametrize("tier", HERE)
def test_all_tokens_may_go_to_one_expert(tier: Tier) -> None:
    """As many panels as they fill, and every pair once."""
    tokens = 3 * PANEL_TOKENS + 5
    order, panels = run(np.full((tokens, 1), 6, np.int32), 9, tier)
    assert order.tolist() == list(range(tokens))
    assert [stop - start for _, start, stop in panels] == [PANEL_TOKENS] * 3 + [5]
    assert {expert for expert, *_ in panels} == {6}
