"""Time slices, as tables: how long they are, who makes way for whom, who comes next."""

from __future__ import annotations

import pytest

from jitllm.schedule.fair import Fairness
from jitllm.schedule.plan import Budget, next_admission
from jitllm.schedule.sequence import MAX_PASSED, MIN_PROMISED_TOKENS, Sequence

NOW_S = 1000.0
BUDGET = Budget(rows=4, tokens=64, outputs=8)


def waiting(
    id: int, length: int = 10, *, since_s: float = 990.0, is_high: bool = False
) -> Sequence:
    """A sequence that waits, with a prompt of its own."""
    tokens = [100 + id] * length
    return Sequence(id, tokens, length, length + 8, is_high=is_high, queued_s=since_s)


def running(
    id: int, served: int, *, before: int = 0, is_high: bool = False, most: int = 4096
) -> Sequence:
    """A sequence that got `served` tokens of its reply since it was admitted."""
    tokens = [100 + id] * (10 + before + served)
    sequence = Sequence(id, tokens, 10, most, is_high=is_high, num_before=before)
    sequence.num_computed = sequence.num_tokens - 1
    return sequence


# --- how long -------------------------------------------------------------------------------------

QUANTA = [
    # level, rows, seconds of a swap, seconds of a step, tokens
    (1, 1, 0.0, 0.0, 256),
    (1, 8, 0.0, 0.01, 256),
    (100, 1, 0.0, 0.0, 8),
    (50, 1, 0.0, 0.0, 46),
    # at level 1 it takes eight times the swaps of all rows, at level 100 once
    (1, 4, 0.1, 0.0102, 314),
    (100, 4, 0.1, 0.0102, 40),
    (100, 4, 0.1, 0.0, 8),  # nothing is known of steps yet
    (100, 1, 0.001, 0.01, 8),
]


@pytest.mark.parametrize(("level", "rows", "swap_s", "step_s", "tokens"), QUANTA)
def test_a_slice_is_as_short_as_its_level_says_and_swaps_allow(
    level: int, rows: int, swap_s: float, step_s: float, tokens: int
) -> None:
    assert Fairness(level).quantum_tokens(rows, swap_s, step_s) == tokens


def test_slices_get_shorter_and_priorities_count_for_less() -> None:
    levels = [Fairness(level) for level in range(1, 101)]
    tokens = [fairness.quantum_tokens(1, 0.0, 0.0) for fairness in levels]
    starts_s = [fairness.head_start_s for fairness in levels]
    assert tokens == sorted(tokens, reverse=True)
    assert starts_s == sorted(starts_s, reverse=True)
    assert (starts_s[0], starts_s[-1]) == (60.0, 1.0)


# --- who makes way --------------------------------------------------------------------------------

PROMISE = MIN_PROMISED_TOKENS + 10
VICTIMS = [
    # running, missing tokens, who makes way
    ([running(1, 50), running(2, 80)], 100, [2]),  # longest served first
    ([running(1, 50), running(2, 50)], 100, [1]),
    ([running(1, 50), running(2, 80)], PROMISE + 1, [2, 1]),
    ([running(1, 50), running(2, 80)], 2 * PROMISE + 1, []),  # it would not be enough
    ([running(1, 39)], 100, []),  # its slice is not over
    ([running(1, 39), running(2, 40)], PROMISE + 1, []),
    ([running(1, 50), running(2, 80, before=600)], PROMISE + 1, [2]),  # it has grown
    ([running(1, 50, most=80)], 81, []),  # it never takes more than it can
    ([running(1, 50, most=80)], 80, [1]),
    # lowest priority first; high priority makes way only for who has waited long enough
    ([running(1, 90, is_high=True), running(2, 50)], 100, [2]),
    ([running(1, 90, is_high=True)], 100, []),
]


@pytest.mark.parametrize(("rows", "missing", "expected"), VICTIMS)
def test_who_makes_way(rows: list[Sequence], missing: float, expected: list[int]) -> None:
    found = Fairness(50).victims(waiting(9), rows, missing, 40, NOW_S)
    assert [sequence.id for sequence in found] == expected


def test_nobody_makes_way_at_level_0() -> None:
    assert Fairness(0).victims(waiting(9), [running(1, 999)], 1, 40, NOW_S) == ()


def test_high_priority_makes_way_for_who_has_waited_longer_than_its_head_start() -> None:
    fairness, high = Fairness(50), running(1, 90, is_high=True)
    head_start_s = fairness.head_start_s
    patient = waiting(9, since_s=NOW_S - head_start_s - 1)
    assert fairness.victims(patient, [high], 100, 40, NOW_S) == (high,)
    assert fairness.victims(waiting(9, is_high=True), [high], 100, 40, NOW_S) == (high,)
    passed = waiting(9)
    passed.num_passed = MAX_PASSED
    assert fairness.victims(passed, [high], 100, 40, NOW_S) == (high,)


def test_who_is_in_its_prompt_does_not_make_way() -> None:
    prompt = running(1, 50)
    prompt.num_computed = 3
    assert Fairness(50).victims(waiting(9), [prompt], 1, 40, NOW_S) == ()


def test_room_that_others_share_is_not_freed() -> None:
    one, two = running(1, 50, most=100), running(2, 50, most=100)
    two.tokens[:30] = one.tokens[:30]
    fairness = Fairness(50)
    assert fairness.victims(waiting(9), [one, two], 70, 40, NOW_S) == (one,)
    assert fairness.victims(waiting(9), [one, two], 71, 40, NOW_S) == (one, two)
    # With both of them gone it is.
    assert fairness.victims(waiting(9), [one, two], 170, 40, NOW_S) == (one, two)
    assert fairness.victims(waiting(9), [one, two], 171, 40, NOW_S) == ()


# --- who comes next -------------------------------------------------------------------------------

ORDERS = [
    # level, waiting, the next one
    (0, [waiting(2, since_s=5), waiting(1, since_s=9)], 1),
    (0, [waiting(1), waiting(2, is_high=True)], 2),
    (50, [waiting(1, since_s=9), waiting(2, since_s=5)], 2),  # it was parked before
    (50, [waiting(1, since_s=900), waiting(2, since_s=920, is_high=True)], 2),
    (50, [waiting(1, since_s=900), waiting(2, since_s=940, is_high=True)], 1),
    (100, [waiting(1, since_s=900), waiting(2, since_s=902, is_high=True)], 1),
]


@pytest.mark.parametrize(("level", "queue", "expected"), ORDERS)
def test_who_is_admitted_next(level: int, queue: list[Sequence], expected: int) -> None:
    found = next_admission(queue, [], BUDGET, 0, None, Fairness(level).urgency)
    assert found is not None
    assert found.id == expected


def test_who_was_passed_too_often_comes_first() -> None:
    passed = waiting(7, since_s=999)
    passed.num_passed = MAX_PASSED
    queue = [waiting(1, is_high=True), passed]
    assert next_admission(queue, [], BUDGET, 0, None, Fairness(50).urgency) is passed
