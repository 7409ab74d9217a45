"""Each step's decision, as tables of before and after."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitllm.memory.prefix import reusable
from jitllm.schedule.plan import Budget, has_room, newcomers, next_admission, spans
from jitllm.schedule.sequence import MAX_PASSED, Sequence
from jitllm.schedule.step import SpanOutputs

PAGE = 4
BUDGET = Budget(rows=4, tokens=32, outputs=8)


def prompt(id: int, length: int, computed: int = 0, **choices: object) -> Sequence:
    """A sequence with a prompt of so many tokens, equal to every other one's."""
    tokens = [7] * length
    sequence = Sequence(id, tokens, length, length + 8, **choices)  # type: ignore[arg-type]
    sequence.num_computed = computed
    return sequence


def sharing(sequence: Sequence) -> Sequence:
    """The same with the names of its pages."""
    sequence.prefix = reusable(sequence.tokens, PAGE)
    return sequence


def reply(id: int) -> Sequence:
    """A sequence in the middle of its reply."""
    sequence = prompt(id, 5, 5)
    sequence.tokens.append(9)
    return sequence


# --- spans ----------------------------------------------------------------------------------------

LENGTHS = [
    # running, prompt tokens allowed, (sequence, tokens) of each row
    ([prompt(0, 100)], None, [(0, 32)]),
    ([prompt(0, 100, 90)], None, [(0, 10)]),
    ([prompt(0, 10), prompt(1, 10)], None, [(0, 10), (1, 10)]),
    ([prompt(0, 30), prompt(1, 30)], None, [(0, 30), (1, 2)]),
    ([prompt(0, 100), reply(1), reply(2)], None, [(1, 1), (2, 1), (0, 30)]),
    ([prompt(0, 100), reply(1)], 8, [(1, 1), (0, 8)]),
    ([prompt(0, 5), prompt(1, 5), reply(2)], 8, [(2, 1), (0, 5), (1, 3)]),
    ([prompt(0, 100), prompt(1, 3, is_high=True), reply(2)], 8, [(2, 1), (1, 3), (0, 5)]),
    ([prompt(0, 100, chunk_tokens=3), prompt(1, 100)], None, [(0, 3), (1, 29)]),
    ([prompt(0, 100, all_outputs=True)], None, [(0, 8)]),
    # Whoever wants every output leaves one to each of the others.
    ([prompt(0, 100, all_outputs=True), prompt(1, 5)], None, [(0, 7), (1, 5)]),
    ([prompt(0, 50, all_outputs=True), prompt(1, 50, all_outputs=True)], None, [(0, 7), (1, 1)]),
    ([reply(0), prompt(1, 50, all_outputs=True), reply(2)], 5, [(0, 1), (2, 1), (1, 5)]),
]


@pytest.mark.parametrize(("running", "allowed", "rows"), LENGTHS)
def test_rows_of_a_step(
    running: list[Sequence], allowed: int | None, rows: list[tuple[int, int]]
) -> None:
    assert [(s.sequence, len(s.tokens)) for s in spans(running, BUDGET, allowed)] == rows


def test_outputs_and_samples_come_with_the_last_token() -> None:
    first, last, whole = prompt(0, 40), prompt(1, 10), prompt(2, 20, all_outputs=True)
    assert [(s.outputs, s.sample) for s in spans([first], BUDGET)] == [(SpanOutputs.NONE, False)]
    assert [(s.outputs, s.sample) for s in spans([last], BUDGET)] == [(SpanOutputs.LAST, True)]
    assert [(s.outputs, s.sample) for s in spans([whole], BUDGET)] == [(SpanOutputs.ALL, False)]


@given(
    st.lists(
        st.builds(
            lambda length, computed, replies, all_outputs, chunk: (
                length,
                min(computed, length - 1),
                replies,
                all_outputs,
                chunk,
            ),
            st.integers(1, 60),
            st.integers(0, 60),
            st.booleans(),
            st.booleans(),
            st.none() | st.integers(1, 9),
        ),
        max_size=6,
    ),
    st.none() | st.integers(1, 40),
    st.integers(4, 40),
)
def test_a_step_keeps_its_limits_and_always_gets_on(
    made: list[tuple[int, int, bool, bool, int | None]], allowed: int | None, tokens: int
) -> None:
    budget = Budget(rows=4, tokens=tokens, outputs=4)
    running = [
        reply(id)
        if replies
        else prompt(id, length, computed, all_outputs=all_outputs, chunk_tokens=chunk)
        for id, (length, computed, replies, all_outputs, chunk) in enumerate(made)
    ]
    rows = spans(running, budget, allowed)
    assert len(rows) <= budget.rows
    assert sum(len(s.tokens) for s in rows) <= budget.tokens
    assert sum(s.num_outputs for s in rows) <= budget.outputs
    assert len({s.sequence for s in rows}) == len(rows)
    assert bool(rows) == bool(running)
    replying = {s.id for s in running if s.is_replying}
    if len(running) <= budget.rows:
        assert replying <= {s.sequence for s in rows}, "a reply was left out"
    if allowed is not None:
        assert sum(len(s.tokens) for s in rows if s.sequence not in replying) <= allowed


# --- admission ------------------------------------------------------------------------------------


def overdue(sequence: Sequence) -> Sequence:
    """Passed by as many as may pass it."""
    sequence.num_passed = MAX_PASSED
    return sequence


SMALL, LARGE = 10, 1000  # tokens of prompts; promised: a few more

ADMITTED = [
    # waiting, running, the least that was refused, who is admitted
    ([], [], None, None),
    ([prompt(0, SMALL), prompt(1, SMALL)], [], None, 0),
    ([prompt(0, SMALL)], [reply(i) for i in (5, 6, 7, 8)], None, None),
    ([prompt(0, SMALL), prompt(1, SMALL, is_high=True)], [], None, 1),
    ([prompt(2, SMALL, is_high=True), prompt(1, SMALL, is_high=True)], [], None, 1),
    # There was no room for the first: who needs less goes ahead, until it was passed too often.
    ([prompt(0, LARGE), prompt(1, SMALL)], [reply(9)], LARGE, 1),
    ([prompt(0, LARGE), prompt(1, LARGE)], [reply(9)], LARGE, None),
    ([overdue(prompt(0, LARGE)), prompt(1, SMALL)], [reply(9)], LARGE, None),
    ([overdue(prompt(0, LARGE)), prompt(1, SMALL, is_high=True)], [reply(9)], LARGE, None),
    ([overdue(prompt(3, SMALL)), prompt(1, SMALL, is_high=True)], [reply(9)], None, 3),
    # The prefix is being computed: wait for it, and let others go on.
    ([sharing(prompt(1, 20))], [sharing(prompt(0, 20, 8))], None, None),
    ([sharing(prompt(1, 20)), prompt(2, 20)], [sharing(prompt(0, 20, 8))], None, 2),
    ([sharing(prompt(1, 20))], [sharing(prompt(0, 20, 16))], None, 1),
    ([sharing(prompt(1, 10))], [sharing(prompt(0, 20, 8))], None, 1),  # it needs two pages only
    ([sharing(prompt(1, 5))], [sharing(prompt(0, 20, 0))], None, None),
    ([sharing(prompt(1, 4))], [sharing(prompt(0, 20, 0))], None, 1),  # its last token is computed
]


@pytest.mark.parametrize(("waiting", "running", "refused", "admitted"), ADMITTED)
def test_who_is_admitted(
    waiting: list[Sequence], running: list[Sequence], refused: int | None, admitted: int | None
) -> None:
    found = next_admission(waiting, running, BUDGET, PAGE, refused)
    assert (found.id if found else None) == admitted


def test_prompts_that_differ_do_not_wait_for_each_other() -> None:
    other = prompt(1, 20)
    other.tokens[0] = 8
    assert next_admission([sharing(other)], [sharing(prompt(0, 20))], BUDGET, PAGE) is other
    late = prompt(2, 20)
    late.tokens[9] = 8  # in the third page
    running = sharing(prompt(0, 20, 4))
    assert next_admission([sharing(late)], [running], BUDGET, PAGE) is None
    running.num_computed = 8
    assert next_admission([late], [running], BUDGET, PAGE) is late


@pytest.mark.parametrize(
    ("num_waiting", "num_running", "queue", "expected"),
    [
        (0, 0, 0, True),
        (3, 0, 0, True),  # four rows are free: nobody really waits
        (4, 0, 0, False),
        (0, 4, 0, False),
        (1, 4, 2, True),
        (2, 4, 2, False),
        (5, 1, 2, False),
        (1000, 4, -1, True),
    ],
)
def test_a_queue_has_room(num_waiting: int, num_running: int, queue: int, expected: bool) -> None:
    waiting = [prompt(i, 5) for i in range(num_waiting)]
    running = [reply(i) for i in range(num_running)]
    assert has_room(waiting, running, BUDGET, queue) is expected


@pytest.mark.parametrize(
    ("running", "waiting", "refused_tokens", "expected"),
    [
        ([reply(0), reply(1)], [], None, (0, 0)),
        ([reply(0), prompt(1, 50, 20)], [prompt(2, 5)], None, (2, 35)),
        ([reply(n) for n in range(3)], [prompt(n, 5) for n in range(3, 9)], None, (1, 5)),
        ([reply(n) for n in range(4)], [prompt(9, 5)], None, (0, 0)),
        ([reply(0)], [prompt(1, 5), prompt(2, 100)], 100, (1, 5)),  # no room for the other
    ],
)
def test_newcomers_are_those_who_could_begin(
    running: list[Sequence],
    waiting: list[Sequence],
    refused_tokens: int | None,
    expected: tuple[int, int],
) -> None:
    assert newcomers(waiting, running, BUDGET, refused_tokens) == expected


def test_a_budget_of_one_row_serves_one_after_another() -> None:
    budget = replace(BUDGET, rows=1)
    assert next_admission([prompt(1, 5)], [reply(0)], budget, PAGE) is None
    assert next_admission([prompt(1, 5)], [], budget, PAGE) is not None
