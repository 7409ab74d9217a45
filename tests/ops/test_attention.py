"""Attention over pages: every shape and tier against the reference, and against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from jitllm.jit.tiers import PLAIN, Tier, available
from jitllm.kernels.attention import CHUNK_KEYS
from jitllm.kernels.attention.cpu import item_heads
from jitllm.kernels.op import ALL_KEYS
from tests.ops.harness import HERE
from tests.ops.histories import Case, Histories, KeyRange, Token, computed

FASTEST = available()[-1]

CASES = [
    Case(),
    Case(element="f32"),
    Case(heads=4, k_dim=256, v_dim=256, window=20, lengths=(90, 1, 3)),
    Case(heads=8, kv_heads=2, k_dim=80, v_dim=80, softcap=5.0, page_tokens=16),
    Case(heads=7, k_dim=24, v_dim=24, element="f32", page_tokens=256, lengths=(130,)),
    Case(heads=14, kv_heads=2, k_dim=64, v_dim=32, page_tokens=1, lengths=(67, 2)),
    Case(heads=3, kv_heads=3, k_dim=96, v_dim=96, window=64, page_tokens=4, lengths=(140, 9)),
    Case(heads=6, kv_heads=2, k_dim=16, v_dim=16, window=1, softcap=30.0, page_tokens=8),
    Case(heads=8, kv_heads=1, k_dim=128, v_dim=40, element="f32", page_tokens=128),
    Case(heads=2, kv_heads=1, k_dim=17, v_dim=23, window=7, element="f32", page_tokens=2),
    Case(heads=1, kv_heads=1, k_dim=32, v_dim=47, page_tokens=32),
    Case(heads=10, kv_heads=2, k_dim=48, v_dim=112, window=100, lengths=(201,)),
    Case(heads=6, k_dim=32, v_dim=32, lengths=(1, 2, 1, 1, 70, 1, 3, 1, 1)),
    Case(element="q8_0"),
    Case(heads=4, k_dim=256, v_dim=256, window=20, element="q8_0", lengths=(90, 1, 3)),
    Case(heads=14, kv_heads=2, k_dim=64, v_dim=32, element="q8_0", page_tokens=1, lengths=(67, 2)),
    Case(heads=8, kv_heads=2, k_dim=96, v_dim=160, softcap=5.0, element="q8_0", page_tokens=16),
    Case(heads=3, kv_heads=3, k_dim=32, v_dim=96, element="q8_0", page_tokens=256, lengths=(201,)),
]


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_close_to_the_reference(case: Case, tier: Tier) -> None:
    """Scores reach 12 here, so weights are right to about 1e-6 of themselves."""
    histories = computed(case, tier)
    error = np.abs(histories.all_out() - histories.expected()).max()
    assert error < 1.5e-5


@pytest.mark.parametrize("tier", HERE[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiers_agree_bit_for_bit(case: Case, tier: Tier) -> None:
    plain = computed(case, PLAIN).all_out()
    assert np.array_equal(computed(case, tier).all_out().view(np.int32), plain.view(np.int32))


SPLIT = [
    Case(heads=4, k_dim=32, v_dim=32, lengths=(150, 70)),
    Case(heads=2, k_dim=40, v_dim=40, window=30, element="f32", lengths=(150, 70)),
    Case(heads=8, kv_heads=2, k_dim=64, v_dim=64, softcap=20.0, window=65, lengths=(200,)),
    Case(heads=8, kv_heads=2, k_dim=64, v_dim=96, window=70, element="q8_0", lengths=(150, 70)),
]


Schedule = Callable[[Case], list[list[Token]]]
"""The tokens of every step."""


def one_by_one(case: Case) -> list[list[Token]]:
    return [[token] for token in case.tokens()]


def in_sevens(case: Case) -> list[list[Token]]:
    tokens = case.tokens()
    return [tokens[i : i + 7] for i in range(0, len(tokens), 7)]


def side_by_side(case: Case) -> list[list[Token]]:
    """Every step holds one token of each sequence that still has one."""
    rows = range(len(case.lengths))
    return [[(row, p) for row in rows if p < case.lengths[row]] for p in range(max(case.lengths))]


def interleaved(case: Case) -> list[list[Token]]:
    """One step in which neighbours belong to different sequences."""
    return [sorted(case.tokens(), key=lambda token: token[1])]


def shuffled(case: Case) -> list[list[Token]]:
    """One step in which sequences take turns at random, so that four neighbours mix in any way."""
    order = np.random.default_rng(2).permutation([row for row, _ in case.tokens()])
    return [[(row, int((order[:i] == row).sum())) for i, row in enumerate(order.tolist())]]


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("schedule", [one_by_one, in_sevens, side_by_side, interleaved, shuffled])
@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_company_changes_nothing(case: Case, schedule: Schedule, tier: Tier) -> None:
    """One step for all, token by token, in chunks, mixed with strangers: the same bits."""
    histories = Histories(case)
    for tokens in schedule(case):
        histories.step(tokens, tier)
    whole = computed(case, tier)
    assert np.array_equal(histories.all_out(), whole.all_out())


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_page_size_changes_nothing(case: Case, tier: Tier) -> None:
    whole = computed(case, tier).all_out()
    for page_tokens in (1, 4, 16, 256):
        other = computed(case.with_pages(page_tokens), tier).all_out()
        assert np.array_equal(other, whole), page_tokens


def in_ranges(case: Case, rng: np.random.Generator) -> list[list[KeyRange]]:
    """Launches that take the keys of each sequence in order, in pieces of their own; some take none
    of a sequence."""
    num_launches = 6
    cuts = []
    for length in case.lengths:
        chunks = rng.integers(0, length // CHUNK_KEYS + 2, num_launches - 1)
        ends = [0, *sorted(int(chunk) * CHUNK_KEYS for chunk in chunks), ALL_KEYS[1]]
        cuts.append(list(pairwise(ends)))
    return [list(ranges) for ranges in zip(*cuts, strict=True)]


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("case", [*CASES, *SPLIT], ids=str)
def test_launches_over_parts_of_the_keys_change_nothing(case: Case, tier: Tier) -> None:
    """One launch for all keys, or one after the other for ranges of them, with no other page there:
    the same bits."""
    whole = computed(case, tier).all_out()
    rng = np.random.default_rng(len(str(case)))
    for schedule in (in_sevens, shuffled):
        histories = Histories(case)
        for tokens in schedule(case):
            histories.step(tokens, tier, launches=in_ranges(case, rng))
        assert np.array_equal(histories.all_out().view(np.int32), whole.view(np.int32))


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_threads_change_nothing(pieces: int) -> None:
    """Items are cut anywhere, also between the tokens that one item takes together."""
    case = SPLIT[2]
    whole = computed(case, FASTEST).all_out()
    assert np.array_equal(computed(case, FASTEST, pieces).all_out(), whole)


def test_a_large_team_changes_nothing() -> None:
    """With more threads than shared items, every token is its own item."""
    case = replace(SPLIT[0], lengths=(9,))
    histories = Histories(case)
    histories.num_threads = 100
    histories.step(case.tokens(), FASTEST)
    assert np.array_equal(histories.all_out(), computed(case, FASTEST).all_out())


@pytest.mark.parametrize(("element", "too_large"), [("f16", 1e6), ("q8_0", 1e8)])
@pytest.mark.parametrize("tier", HERE)
def test_a_later_infinity_does_not_reach_earlier_tokens(
    tier: Tier, element: str, too_large: float
) -> None:
    """A value, or a scale, that f16 cannot hold spoils the tokens that see it and no others,
    although they are computed together."""
    case = Case(heads=2, k_dim=32, v_dim=32, window=3, element=element, lengths=(12,))
    histories = Histories(case)
    histories.v[0][5] = too_large
    histories.step(case.tokens(), tier)
    spoilt = [not np.isfinite(out).all() for out in histories.out[0]]
    assert [p for p, is_spoilt in enumerate(spoilt) if is_spoilt] == [5, 6, 7]


@pytest.mark.parametrize("tier", HERE)
def test_large_scores_neither_overflow_nor_vanish(tier: Tier) -> None:
    """Only differences of scores meet the exponential."""
    case = Case(heads=2, k_dim=32, v_dim=32, element="f32", lengths=(100,))
    histories = Histories(case)
    histories.q[0] *= 200
    histories.step(case.tokens(), tier)
    assert np.abs(histories.all_out() - histories.expected()).max() < 2e-3


def test_far_positions() -> None:
    """A long history, most of it out of sight: its pages may hold anything by now."""
    case = Case(heads=2, k_dim=16, v_dim=16, window=50, lengths=(3000,))
    histories = Histories(case)
    tokens = case.tokens()
    histories.step(tokens[:2900], FASTEST)
    for index in histories.tables[0][1 : 2 * (2850 // 64) : 2]:
        histories.pages[index].view[:] = 0xFF
    histories.step(tokens[2900:], FASTEST)
    assert np.abs(histories.all_out() - histories.expected()).max() < 1.5e-5


@pytest.mark.parametrize(
    ("heads", "kv_heads", "taken"),
    [(4, 1, 2), (1, 1, 1), (2, 1, 1), (32, 8, 4), (14, 2, 7), (64, 4, 8), (16, 16, 1), (9, 3, 3)],
)
def test_a_single_token_feeds_two_threads(heads: int, kv_heads: int, taken: int) -> None:
    """Items never cross a KV head, and a token has two of them if it has two heads."""
    assert item_heads(heads, kv_heads) == taken
