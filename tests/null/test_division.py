"""How a budget is divided between blocks and experts: tables of numbers."""

from __future__ import annotations

import pytest

from jitllm.memory.division import are_apart, expert_room


@pytest.mark.parametrize(
    ("room", "blocks", "expected"),
    [
        (100, 40, 60),  # what blocks leave
        (1000, 40, 400),  # all of them, and no more
        (50, 40, 20),  # what a token needs
        (30, 40, 15),  # of half the room at the most
        (8, 40, 10),  # one at the least
        (0, 40, 10),
    ],
)
def test_blocks_come_first_but_for_what_a_token_needs(
    room: int, blocks: int, expected: int
) -> None:
    assert expert_room(room, blocks, expert_bytes=10, used=2, all_bytes=400) == expected


@pytest.mark.parametrize(
    ("choice", "weights", "expected"),
    [("auto", 90, False), ("auto", 91, True), ("apart", 1, True), ("blocks", 1000, False)],
)
def test_experts_are_apart_where_not_all_fits(choice: str, weights: int, expected: bool) -> None:
    assert are_apart(choice, weights, 100) is expected  # type: ignore[arg-type]
