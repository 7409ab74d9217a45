"""Who is where when blocks pass through slots, for every number of either."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest

from jitllm.devices.vulkan.arena import Arena, DeviceSpan
from jitllm.memory.slots import Slots


class CountingArena:
    """Room for so many bytes."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self.next = 1 << 20

    def take(self, num_bytes: int) -> DeviceSpan | None:
        if num_bytes > self.room_bytes:
            return None
        self.room_bytes -= num_bytes
        self.next += num_bytes
        return DeviceSpan(self.next, num_bytes, cast(Any, None), 0)

    def give(self, span: DeviceSpan) -> None:
        self.room_bytes += span.num_bytes


def slots_of(num_blocks: int, num_slots: int) -> tuple[Slots, CountingArena]:
    arena = CountingArena(10 * num_slots)
    slots = Slots(cast(Arena, arena), [10] * num_blocks, arena.give)
    assert slots.serve(range(num_blocks)) == 0
    slots.widen(0)
    return slots, arena


@pytest.mark.parametrize("num_slots", range(1, 8))
@pytest.mark.parametrize("num_blocks", range(1, 8))
def test_passes_bring_each_block_that_is_not_there_once(num_blocks: int, num_slots: int) -> None:
    slots, arena = slots_of(num_blocks, num_slots)
    brought: list[int] = []

    def bring(block: int) -> None:
        slots.empty(block)
        slots.filled(block)
        brought.append(block)

    per_pass = []
    for _ in range(4):
        before = len(brought)
        for block in range(num_blocks):
            if not slots.has(block):
                bring(block)
            for is_busy in (True, False):
                if (following := slots.next(block, is_busy=is_busy)) is not None:
                    bring(following)
                    assert slots.has(block) or not is_busy, "it is being computed"
        per_pass.append(len(brought) - before)
    if num_slots >= num_blocks:
        assert brought == list(range(num_blocks))
        return
    turns = num_blocks - max(num_slots - 2, 0)
    stay = 1 if turns == 3 and num_slots > 1 else 0  # nobody else wants the second slot
    assert per_pass[1:] == [turns - stay] * 3


@pytest.mark.parametrize("num_slots", range(2, 8))
def test_whoever_comes_next_is_never_in_the_slot_of_who_is_computed(num_slots: int) -> None:
    slots, _ = slots_of(8, num_slots)
    turns = [block for block in range(8) if slots.takes_turns(block)]
    assert all(slots.slot(one) != slots.slot(other) for one, other in pairwise(turns))
    own = [slots.slot(block) for block in range(8) if block not in turns]
    assert len(set(own)) == len(own)


def test_what_is_given_up_leaves_two() -> None:
    slots, arena = slots_of(6, 5)
    for block in range(3):
        slots.filled(block)
    assert slots.narrow(15)
    assert (slots.num_slots, slots.num_inside, arena.room_bytes) == (3, 0, 20)
    assert slots.narrow(100)
    assert not slots.narrow(100)
    assert (slots.num_slots, arena.room_bytes) == (2, 30)
    assert slots.widen(10)
    assert slots.num_slots == 4


def test_no_room_for_one_is_a_number_and_takes_nothing() -> None:
    arena = CountingArena(4)
    slots = Slots(cast(Arena, arena), [10] * 3, arena.give)
    assert slots.serve(range(3)) == 6
    assert (slots.blocks, arena.room_bytes) == ((), 4)
