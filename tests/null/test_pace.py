"""Prompts beside replies: how many tokens of them a step takes, for machines of any speed."""

from __future__ import annotations

import random

import pytest

from jitllm.schedule import pace
from jitllm.schedule.pace import Line, Pace

MAX_TOKENS = 512




@pytest.mark.parametrize(
    ("fixed_s", "token_s", "expected"),
    [
        (0.005, 0.00028, 8),  # 10 tokens cost 0.6 of a step: rounded down to rows of kernels
        (0.010, 0.00028, 16),
        (0.300, 0.00300, 56),
        (0.005, 0.00060, 4),
        (0.200, 0.00001, MAX_TOKENS),  # reads from disk: prompt tokens come for nothing
        (0.001, 0.00200, pace.MIN_TOKENS),  # the least, though it is more than was wished
    ],
)
def test_prompts_beside_replies_take_what_they_may(
    fixed_s: float, token_s: float, expected: int
) -> None:
    learnt = Pace(MAX_TOKENS)
    for turn in range(40):
        tokens = learnt.prompt_tokens(4, True) if turn % 2 else 0
        learnt.observe(4, tokens, fixed_s + token_s * tokens)
    assert learnt.prompt_tokens(4, True) == expected


@pytest.mark.parametrize("token_s", [0.0001, 0.0003, 0.0005])
@pytest.mark.parametrize("fixed_s", [0.004, 0.02, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_a_long_prompt_slows_replies_down_by_half_at_most(
    fixed_s: float, token_s: float, seed: int
) -> None:
    """The policy of fairness: at most twice in the median, four times never."""
    noise = random.Random(seed)
    learnt = Pace(MAX_TOKENS)

    def take(tokens: int, replies: int) -> float:
        seconds = (fixed_s + token_s * tokens) * noise.uniform(0.97, 1.1)
        learnt.observe(replies, tokens, seconds)
        return seconds

    take(64, 0)
    alone = sorted(take(0, 8) for _ in range(50))[25]
    left, gaps = 2000, []
    while left > 0:
        tokens = min(learnt.prompt_tokens(8, True), left)
        gaps.append(take(tokens, 8))
        left -= tokens
    assert sorted(gaps)[len(gaps) // 2] <= 2 * alone
    assert max(gaps) <= 4 * alone


def test_the_first_prompt_beside_replies_is_taken_in_small_bites() -> None:
    assert Pace(MAX_TOKENS).prompt_tokens(1, True) == pace.FIRST_TOKENS
    assert Pace(4).prompt_tokens(1, True) == 4


@pytest.mark.parametrize(
    ("token_s", "expected"), [(0.0001, 448), (0.0003, 128), (0.01, 64), (0.00001, MAX_TOKENS)]
)
def test_without_replies_a_step_is_short_only_if_someone_waits(
    token_s: float, expected: int
) -> None:
    learnt = Pace(MAX_TOKENS)
    assert learnt.prompt_tokens(0, True) == MAX_TOKENS
    for tokens in (512, 100, 30, 512):
        learnt.observe(0, tokens, 0.004 + token_s * tokens)
    assert learnt.prompt_tokens(0, False) == MAX_TOKENS
    assert learnt.prompt_tokens(0, True) == expected


def test_one_stall_of_the_machine_changes_little() -> None:
    line = Line()
    for tokens in (0, 16, 0, 16, 0, 16):
        line.add(tokens, 0.01 + 0.0005 * tokens)
    line.add(16, 5.0)
    assert line.at(0) < 0.02
    for tokens in (0, 16) * 10:
        line.add(tokens, 0.01 + 0.0005 * tokens)
    assert line.at(0) == pytest.approx(0.01, rel=0.2)


def test_a_cold_start_is_soon_forgotten() -> None:
    """The first step reads a model from disk."""
    line = Line()
    line.add(0, 3.0)
    line.add(0, 0.01)
    assert line.at(0) == pytest.approx(0.01)


def test_a_machine_that_got_slower_is_believed() -> None:
    line = Line()
    for seconds in (0.01, 0.1):
        for tokens in (0, 16) * 30:
            line.add(tokens, seconds)
    assert line.at(0) == pytest.approx(0.1, rel=0.05)


def test_equal_steps_keep_the_slope_that_was_known() -> None:
    line = Line()
    for tokens in (0, 32) * 4:
        line.add(tokens, 0.01 + 0.001 * tokens)
    slope = line.slope
    for _ in range(200):
        line.add(0, 0.01)
    assert line.slope is not None and slope is not None
    assert line.slope == pytest.approx(slope, rel=0.01)
