"""Frames of experts on a device: who has one, whatever comes and goes."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from jitllm.devices.vulkan.arena import Arena
from jitllm.memory.device_experts import DeviceExperts
from tests.null.test_slots import CountingArena

SIZES, COUNT, USED = {0: 10, 2: 7, 3: 10}, 6, 2


def experts_of(room_bytes: int) -> tuple[DeviceExperts, CountingArena]:
    arena = CountingArena(room_bytes)
    counts = dict.fromkeys(SIZES, COUNT)
    return DeviceExperts(cast(Arena, arena), SIZES, counts, USED, arena.give), arena


def check(experts: DeviceExperts, arena: CountingArena, room_bytes: int) -> None:
    """Every byte is somebody's, and nobody has the frame of another."""
    experts.residency.check()
    assert arena.room_bytes + experts.num_bytes == room_bytes
    assert experts.residency.room_bytes == experts.num_bytes
    addresses = [span.address for span in (*experts._free, *experts._frames.values())]
    assert len(set(addresses)) == len(addresses) == experts.num_frames
    for (block, expert), span in experts._frames.items():
        assert experts.address(block, expert) == span.address
        assert experts.span(block, expert).num_bytes == SIZES[block]


def test_frames_are_taken_as_there_is_room_and_given_back() -> None:
    experts, arena = experts_of(95)
    assert experts.serve([2, 3]) == 0
    assert experts.num_frames == USED
    experts.widen(20)
    assert (experts.num_frames, experts.spare_bytes) == (7, 50)
    assert experts.narrow(25)
    assert experts.num_frames == 4
    assert experts.narrow(1000)
    assert not experts.narrow(1000), "a token needs two"
    experts.close()
    assert (experts.num_frames, arena.room_bytes) == (0, 95)


def test_no_more_frames_than_experts() -> None:
    experts, _ = experts_of(1000)
    experts.serve([0])
    experts.widen(0)
    assert experts.num_frames == COUNT


@pytest.mark.parametrize(("room_bytes", "missing"), [(9, 1), (0, 10), (10, 0)])
def test_a_device_without_room_for_one_says_what_is_missing(room_bytes: int, missing: int) -> None:
    experts, _ = experts_of(room_bytes)
    assert experts.serve([0]) == missing
    assert experts.blocks == (() if missing else (0,))


def test_steps_find_what_they_need_whatever_comes_and_goes() -> None:
    """With any number of frames that changes, reads that fail, and blocks that go."""
    dice = random.Random(7)
    experts, arena = experts_of(200)
    experts.serve(SIZES)
    for _ in range(3000):
        event = dice.random()
        if event < 0.1:
            experts.narrow(dice.randrange(1, 80))
        elif event < 0.2:
            experts.widen(dice.randrange(0, 60))
        elif event < 0.25:
            experts.serve(dice.sample(list(SIZES), dice.randrange(1, 4)))
        else:
            ask(experts, dice)
        check(experts, arena, 200)
    assert experts.residency.num_hits > 100 < experts.residency.num_reads


def ask(experts: DeviceExperts, dice: random.Random) -> None:
    """What a step does with experts of a block; now and then one cannot be read."""
    block = dice.choice(experts.blocks)
    left: Any = dice.sample(range(COUNT), dice.randrange(1, COUNT + 1))
    while left:
        found = experts.admit(block, left)
        assert found.present or found.reads
        assert not found.coming
        failed = False
        for expert in found.reads:
            assert experts.address(block, expert)
            if dice.random() < 0.02:
                experts.fail(block, expert)
                failed = True
            else:
                experts.residency.arrive(block, expert)
        for expert in found.present:
            assert experts.residency.is_resident(block, expert)
        experts.residency.release(block, (*found.present, *found.reads))
        if failed:
            return
        left = found.left
