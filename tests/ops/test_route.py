"""Routing: every tier against the reference, and the same bits on every tier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.tiers import PLAIN, Tier
from jitllm.kernels.layout import FormatCode
from jitllm.kernels.op import Buffer, Element, Weight
from jitllm.kernels.route import MAX_EXPERTS, Route
from jitllm.kernels.route.reference import route
from tests.ops.harness import HERE, RUNNABLE, Rig

F32s = NDArray[np.float32]
Routed = tuple[NDArray[np.int32], F32s]


@dataclass(frozen=True)
class Case:
    """How tokens are routed."""

    experts: int
    used: int
    score: str = "softmax"
    biased: bool = False
    groups: int = 1
    groups_used: int = 1
    is_normalised: bool = False
    scale: float = 1.0

    def __str__(self) -> str:
        parts = [f"{self.used}-of-{self.experts}", self.score]
        parts += ["bias"] * self.biased + ["norm"] * self.is_normalised
        parts += [f"groups-{self.groups_used}-of-{self.groups}"] * (self.groups > 1)
        return "-".join(parts)


CASES = [
    Case(1, 1, "sigmoid"),
    Case(2, 1),
    Case(8, 2),
    Case(8, 8, is_normalised=True),
    Case(15, 3, "sigmoid", biased=True),
    Case(16, 4, is_normalised=True, scale=2.5),
    Case(17, 6, biased=True),
    Case(60, 4, "sigmoid", biased=True, is_normalised=True, scale=0.3),
    Case(8, 2, "sigmoid", biased=True, groups=4, groups_used=2),
    Case(64, 6, groups=8, groups_used=3, is_normalised=True),
    Case(160, 6, "sigmoid", biased=True, groups=20, groups_used=5),
    Case(MAX_EXPERTS, 10, biased=True, is_normalised=True),
]


def data_of(case: Case, tokens: int = 5) -> tuple[F32s, F32s]:
    """Logits and bias; a token's logits do not depend on how many there are."""
    rng = np.random.default_rng(case.experts)
    bias = (0.1 * rng.standard_normal(case.experts)).astype(np.float32)
    return (3 * rng.standard_normal((tokens, case.experts))).astype(np.float32), bias


def run(case: Case, logits: F32s, bias: F32s, tier: Tier, pieces: int = 1) -> Routed:
    """Chosen experts and their weights."""
    rig = Rig(len(logits), arrays={"logits": logits}, weights={("bias", 0): bias.tobytes()})
    op = Route(
        Buffer("logits", case.experts),
        Buffer("ids", case.used, element=Element.I32),
        Buffer("routed", case.used),
        case.score,
        Weight("bias", 0, FormatCode.F32, 0, case.experts) if case.biased else None,
        case.groups,
        case.groups_used,
        case.is_normalised,
        case.scale,
    )
    rig.run(op, tier, pieces)
    return rig.value("ids"), rig.value("routed")


def expected(case: Case, logits: F32s, bias: F32s) -> Routed:
    """What the reference says."""
    return route(
        logits,
        case.used,
        case.score,
        bias if case.biased else None,
        case.groups,
        case.groups_used,
        case.is_normalised,
        case.scale,
    )


def bits(routed: Routed) -> bytes:
    return b"".join(part.tobytes() for part in routed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tier_gives_the_reference_and_the_same_bits(case: Case) -> None:
    logits, bias = data_of(case)
    ids, weights = run(case, logits, bias, PLAIN)
    wanted_ids, wanted_weights = expected(case, logits, bias)
    assert (ids == wanted_ids).all()
    np.testing.assert_allclose(weights, wanted_weights, rtol=2e-6)
    for tier in RUNNABLE[1:]:
        assert bits(run(case, logits, bias, tier)) == bits((ids, weights)), tier.name


@pytest.mark.parametrize("tier", HERE)
def test_a_token_does_not_depend_on_its_company(tier: Tier) -> None:
    for case in CASES:
        logits, bias = data_of(case, tokens=7)
        ids, weights = run(case, logits, bias, tier)
        assert bits(run(case, logits, bias, tier, pieces=3)) == bits((ids, weights))
        for token in range(7):
            alone = run(case, logits[token : token + 1], bias, tier)
            one = slice(token, token + 1)
            assert bits(alone) == bits((ids[one], weights[one]))


@pytest.mark.parametrize("tier", HERE)
def test_of_equal_scores_the_lower_id_comes_first(tier: Tier) -> None:
    logits = np.zeros((1, 40), np.float32)
    logits[0, [7, 23, 39]] = 1
    ids, _ = run(Case(40, 5), logits, logits[0], tier)
    assert ids[0].tolist() == [7, 23, 39, 0, 1]
    grouped = Case(40, 4, groups=10, groups_used=2)
    ids, _ = run(grouped, np.zeros((1, 40), np.float32), logits[0], tier)
    assert ids[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 4])
def test_whatever_the_logits_are_experts_exist_and_differ(
    tier: Tier, score: str, groups: int
) -> None:
    """Ids are addresses to come: NaN and infinities may spoil weights, not them."""
    odd = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0, -0.0, 1e-45], np.float32)
    rng = np.random.default_rng(1)
    logits = rng.choice(odd, (64, 24)).astype(np.float32)
    logits[0], logits[1], logits[2] = np.nan, np.inf, -np.inf
    case = Case(24, 6, score, biased=True, groups=groups, groups_used=groups // 2 or 1)
    ids, _ = run(case, logits, rng.choice(odd, 24).astype(np.float32), tier)
    assert ids.min() >= 0
    assert ids.max() < 24
    assert all(len(set(row)) == 6 for row in ids.tolist())


@pytest.mark.parametrize("tier", HERE)
def test_weights_that_vanish_are_not_divided_by_nothing(tier: Tier) -> None:
    logits = np.full((1, 4), -80, np.float32)
    _, weights = run(Case(4, 2, "sigmoid", is_normalised=True), logits, logits[0], tier)
    assert (weights >= 0).all()
    assert (weights < 1e-30).all()
