"""Prompts beside replies: how many tokens of them a step takes, for machines of any speed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from statistics import median

import pytest

from jitllm.schedule import pace
from jitllm.schedule.pace import Pace

MAX_TOKENS = 512

Machine = Callable[[int, int], float]
"""(rows of replies, prompt tokens) to seconds."""


def line(fixed_s: float, token_s: float) -> Machine:
    """Every token takes the same."""
    return lambda replies, tokens: fixed_s + token_s * (replies + tokens)


def stairs(fixed_s: float, row_group_s: float) -> Machine:
    """Eight rows take what one does."""
    return lambda replies, tokens: fixed_s + row_group_s * -(-(replies + tokens) // 8)


def noisy(machine: Machine, seed: int) -> Machine:
    """Some steps take a little longer, and a few much longer."""
    source = random.Random(seed)

    def take(replies: int, tokens: int) -> float:
        stall = 8 if source.random() < 0.03 else 1
        return machine(replies, tokens) * source.uniform(0.95, 1.2) * stall

    return take


MACHINES = {
    "a fast CPU": line(0.004, 0.0003),
    "a slow CPU": line(0.2, 0.002),
    "compute counts": line(0.004, 0.0005),
    "compute is free": line(0.01, 0.00001),
    "rows in groups": stairs(0.003, 0.002),
    "rows in costly groups": stairs(0.001, 0.004),
}


def feed(
    learnt: Pace, machine: Machine, replies: int, length: int, newcomers: int = 1
) -> list[float]:
    """What the steps take until a prompt of that length is computed."""
    taken = []
    while length > 0:
        tokens = min(learnt.prompt_tokens(replies, newcomers, length), length)
        taken.append(machine(replies, tokens))
        learnt.observe(replies, tokens, taken[-1])
        length -= tokens
    return taken


@pytest.mark.parametrize("replies", [1, 8])
@pytest.mark.parametrize("name", MACHINES)
def test_a_long_prompt_at_most_doubles_the_gaps_of_replies(name: str, replies: int) -> None:
    """The policy of fairness: at most twice in the median, four times never."""
    machine, learnt = MACHINES[name], Pace(MAX_TOKENS)
    for _ in range(20):
        learnt.observe(replies, 0, machine(replies, 0))
    alone = machine(replies, 0)
    gaps = feed(learnt, machine, replies, 2000)
    least = max(machine(replies, pace.MIN_TOKENS), machine(replies, 8 - replies % 8)) / alone
    assert median(gaps) <= max(2.0, 1.01 * least) * alone
    assert max(gaps) <= 4 * alone


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", MACHINES)
def test_noise_does_not_starve_a_prompt(name: str, seed: int) -> None:
    """It gets on about as fast as on the same machine without noise, and replies too."""
    machine = MACHINES[name]
    steps = {}
    for kind, some in (("quiet", machine), ("noisy", noisy(machine, seed))):
        learnt = Pace(MAX_TOKENS)
        alone = median(some(8, 0) for _ in range(99))
        gaps = feed(learnt, some, 8, 5000)
        least = machine(8, 8) / machine(8, 0)
        assert median(gaps) <= max(2.0, 1.3 * least) * alone, kind
        steps[kind] = len(gaps)
    assert steps["noisy"] <= 2 * steps["quiet"]


def test_a_prompt_uses_what_costs_nothing() -> None:
    """Where steps wait for the disk, a prompt is computed in large bites."""
    learnt, machine = Pace(MAX_TOKENS), MACHINES["compute is free"]
    feed(learnt, machine, 4, 20_000)
    for _ in range(2):
        learnt.observe(4, 0, machine(4, 0))
    assert learnt.prompt_tokens(4, 1, 5000) > 400


def test_the_first_bite_beside_replies_is_small_and_comes_after_a_look() -> None:
    learnt = Pace(MAX_TOKENS)
    assert learnt.prompt_tokens(8, 1, 5000) == 0  # what do replies take alone?
    learnt.observe(8, 0, 0.01)
    assert learnt.prompt_tokens(8, 1, 5000) == pace.FIRST_TOKENS


def test_most_steps_of_replies_have_no_prompts() -> None:
    learnt = Pace(MAX_TOKENS)
    learnt.observe(8, 0, 0.01)
    taken = []
    for _ in range(40):
        taken.append(learnt.prompt_tokens(8, 1, 5000))
        learnt.observe(8, taken[-1], 0.012)
    assert [tokens > 0 for tokens in taken[:6]] == [True, False, False, True, False, True]
    assert taken.count(0) == 24


def test_a_machine_that_got_slower_is_believed() -> None:
    learnt = Pace(MAX_TOKENS)
    feed(learnt, line(0.004, 0.0003), 8, 3000)
    feed(learnt, line(0.04, 0.003), 8, 3000)
    for _ in range(2):
        learnt.observe(8, 0, 0.064)
    assert learnt.prompt_tokens(8, 1, 5000) in range(16, 41)  # 0.064 / 0.003 * 1.2


@pytest.mark.parametrize("max_tokens", [1, 3, 512])
def test_limits_are_kept(max_tokens: int) -> None:
    learnt = Pace(max_tokens)
    for replies, newcomers in itertools.product((0, 8, 3), (1, 2, 9)):
        for seconds in (1e-6, 10.0, 1e-6):
            for _ in range(50):
                tokens = learnt.prompt_tokens(replies, newcomers, 5000)
                assert 0 <= tokens <= max_tokens
                learnt.observe(replies, tokens, seconds)


@pytest.mark.parametrize(
    ("token_s", "least", "most"),
    [(0.0001, 384, 512), (0.0003, 256, 320), (0.01, 64, 64), (0.00001, 512, 512)],
)
def test_without_replies_a_step_is_short_only_if_someone_waits(
    token_s: float, least: int, most: int
) -> None:
    learnt, machine = Pace(MAX_TOKENS), line(0.004, token_s)
    assert learnt.prompt_tokens(0, 2, 5000) == pace.FIRST_ALONE_TOKENS
    feed(learnt, machine, 0, 20_000, newcomers=2)
    assert learnt.prompt_tokens(0, 1, 5000) == MAX_TOKENS
    assert least <= learnt.prompt_tokens(0, 2, 5000) <= most


@pytest.mark.parametrize(
    ("replies", "newcomers", "go_ahead"),
    [(1, 1, False), (1, 2, True), (4, 2, True), (5, 2, False), (8, 1, False), (10, 6, True)],
)
def test_newcomers_go_ahead_of_few_replies(replies: int, newcomers: int, go_ahead: bool) -> None:
    """Without a look at what replies take alone, without steps that are theirs, and as fast as the
    bound on a step allows."""
    machine, learnt = line(0.004, 0.0003), Pace(MAX_TOKENS)
    learnt.prompt_tokens(replies, newcomers, 5000)
    assert (learnt.prompt_tokens(replies, newcomers, 5000) > 0) == go_ahead
    for _ in range(3):
        learnt.observe(replies, 0, machine(replies, 0))
    taken = feed(learnt, machine, replies, 5000, newcomers)
    late, alone = taken[len(taken) // 2 : -1], machine(replies, 0)
    if go_ahead:
        assert all(pace.MAX_STEP_S / 2 <= seconds <= pace.MAX_STEP_S for seconds in late)
    else:
        assert median(late) <= 2 * alone


@pytest.mark.parametrize(("pending", "go_ahead"), [(100, True), (160, True), (161, False)])
def test_newcomers_that_one_step_is_enough_for_go_ahead(pending: int, go_ahead: bool) -> None:
    """A quarter beyond what a step may have counts as enough."""
    machine, learnt = line(0.004, 0.0006), Pace(MAX_TOKENS)
    feed(learnt, machine, 0, 5000, newcomers=2)  # 128 tokens a step
    learnt.observe(30, 0, machine(30, 0))
    assert (learnt.prompt_tokens(30, 2, pending) >= pending) == go_ahead
    assert learnt.prompt_tokens(30, 1, pending) < 50


@pytest.mark.parametrize("replies", [0, 4])
def test_no_step_is_for_a_small_rest_of_prompts(replies: int) -> None:
    """A step may have 128 rows, of replies too, and 160 tokens where nothing is left then."""
    machine, learnt = line(0.004, 0.0006), Pace(MAX_TOKENS)
    feed(learnt, machine, 0, 5000, newcomers=2)
    for length in range(64, 400, 7):
        steps, left = 0, length
        while left > 0:
            left -= learnt.prompt_tokens(replies, 2, left)
            steps += 1
        assert steps == max(1, -(-(length - 160) // (128 - replies)) + 1), length


def test_replies_have_their_pace_again_once_newcomers_are_few() -> None:
    machine, learnt = line(0.004, 0.0003), Pace(MAX_TOKENS)
    learnt.observe(8, 0, machine(8, 0))
    before = learnt.prompt_tokens(8, 1, 5000)
    feed(learnt, machine, 8, 2000, newcomers=8)
    assert learnt.prompt_tokens(8, 1, 5000) == before


def test_the_first_of_the_last_two_steps_has_the_larger_half_of_the_prompts() -> None:
    """Sixteen prompts of 63 tokens where a step may have 448 rows: eight of them, then the rest,
    and not seven and nine. Beside a reply, likewise."""
    machine, learnt = line(0.004, 0.0002), Pace(MAX_TOKENS)
    feed(learnt, machine, 0, 20_000, newcomers=2)
    assert learnt.prompt_tokens(0, 16, 5000) == 448
    assert learnt.prompt_tokens(0, 16, 16 * 63) == 512
    assert learnt.prompt_tokens(1, 15, 15 * 63) == 511
    assert learnt.prompt_tokens(0, 10, 600) == 320
    assert learnt.prompt_tokens(0, 16, 16 * 63 - 512) == MAX_TOKENS  # all that is left
