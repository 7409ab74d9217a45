"""Places of experts: who takes whose, and which memory goes."""

from __future__ import annotations

import random

import pytest

from jitllm.memory.expert_frames import ExpertFrames
from jitllm.memory.experts import Expert


@pytest.fixture
def released() -> list[tuple[int, int]]:
    return []


@pytest.fixture
def frames(released: list[tuple[int, int]]) -> ExpertFrames:
    """Two blocks of four experts."""
    return ExpertFrames({0: 4, 3: 4}, lambda *place: released.append(place))


def test_a_place_that_is_left_to_another_keeps_its_memory(
    frames: ExpertFrames, released: list[tuple[int, int]]
) -> None:
    first = frames.take(Expert(3, 1), ())
    assert frames.take(Expert(3, 2), [Expert(3, 1)]) == first == frames.place(Expert(3, 2))
    assert released == []
    frames.drop(Expert(3, 2))
    assert released == [(3, first)]


def test_a_place_of_another_block_goes(
    frames: ExpertFrames, released: list[tuple[int, int]]
) -> None:
    other = frames.take(Expert(0, 0), ())
    first, second = frames.take(Expert(3, 0), ()), frames.take(Expert(3, 1), ())
    victims = [Expert(0, 0), Expert(3, 0), Expert(3, 1)]
    assert frames.take(Expert(3, 2), victims) == first
    assert released == [(0, other), (3, second)]


def test_no_two_experts_of_a_block_have_one_place(
    frames: ExpertFrames, released: list[tuple[int, int]]
) -> None:
    dice, held = random.Random(1), set()
    for _ in range(1000):
        expert = Expert(dice.choice([0, 3]), dice.randrange(4))
        if expert in held:
            held.remove(expert)
            frames.drop(expert)
            continue
        victims = dice.sample(sorted(held), dice.randrange(len(held) + 1))
        frames.take(expert, victims)
        held = (held - set(victims)) | {expert}
        places = [(one.block, frames.place(one)) for one in held]
        assert len(set(places)) == len(places)
        assert all(0 <= place < 4 for _, place in places)
