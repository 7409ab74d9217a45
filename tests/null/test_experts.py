"""Which experts stay: tables of before and after, and what holds whatever happens."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from jitllm.memory.experts import Expert, ExpertResidency


def of_equal_size(blocks: int, room: int) -> ExpertResidency:
    """Experts of one byte each."""
    return ExpertResidency(dict.fromkeys(range(blocks), 1), room)


def step(experts: ExpertResidency, block: int, needed: list[int]) -> list[int]:
    """Compute with some experts of a block, in as many goes as it takes; what was read."""
    read, left = [], tuple(needed)
    while left:
        found = experts.admit(block, left)
        experts.check()
        assert found.present or found.reads, "no step may wait for itself"
        for expert in found.reads:
            experts.arrive(block, expert)
        read += found.reads
        experts.release(block, found.present + found.reads)
        left = found.left
    return read


def held(experts: ExpertResidency, block: int, count: int = 64) -> list[int]:
    return [e for e in range(count) if experts.is_resident(block, e)]


def test_what_is_there_is_not_read() -> None:
    experts = of_equal_size(1, room=4)
    assert step(experts, 0, [3, 1, 3]) == [3, 1]
    assert step(experts, 0, [1, 2]) == [2]
    assert (experts.num_hits, experts.num_reads) == (1, 3)


def test_the_least_recently_used_of_the_block_goes() -> None:
    experts = of_equal_size(2, room=4)
    for block in (0, 1):
        step(experts, block, [0, 1])
    step(experts, 0, [0])
    found = experts.admit(0, [5])
    assert found.evicted == (Expert(0, 1),)
    assert held(experts, 1) == [0, 1]


def test_room_that_others_leave_is_borrowed_and_taken_back() -> None:
    experts = of_equal_size(2, room=4)
    step(experts, 0, [0, 1, 2])
    assert held(experts, 0) == [0, 1, 2]
    step(experts, 1, [7])
    assert step(experts, 1, [8]) == [8]
    assert held(experts, 0) == [1, 2]
    step(experts, 1, [9])
    assert (held(experts, 0), held(experts, 1)) == ([1, 2], [8, 9])


def test_a_step_that_needs_more_than_fits_reads_each_expert_once() -> None:
    experts = of_equal_size(3, room=3)
    step(experts, 0, [0, 1, 2])
    needed = list(range(2, 20))
    assert step(experts, 0, needed) == needed[1:]
    assert experts.held_bytes == 3


def test_what_a_step_computes_with_stays() -> None:
    experts = of_equal_size(1, room=3)
    found = experts.admit(0, [0, 1, 2, 3])
    assert (found.reads, found.left) == ((0, 1, 2), (3,))
    assert experts.admit(0, [3]).left == (3,)
    for expert in (0, 1, 2):
        experts.arrive(0, expert)
    assert experts.admit(0, [3]).left == (3,)
    experts.release(0, [1])
    assert experts.admit(0, [3]).evicted == (Expert(0, 1),)


def test_what_is_on_its_way_is_not_read_twice() -> None:
    experts = of_equal_size(1, room=4)
    assert experts.admit(0, [0, 1]).reads == (0, 1)
    found = experts.admit(0, [1, 2])
    assert (found.coming, found.reads) == ((1,), (2,))


def test_a_read_that_failed_leaves_nothing_behind() -> None:
    experts = of_equal_size(1, room=1)
    experts.admit(0, [0])
    experts.fail(0, 0)
    experts.check()
    assert experts.held_bytes == 0
    assert experts.admit(0, [1]).reads == (1,)


def test_a_single_expert_is_admitted_whatever_the_room() -> None:
    experts = ExpertResidency({0: 10, 1: 30}, 5)
    assert step(experts, 1, [0]) == [0]
    found = experts.admit(0, [1, 2])
    assert (found.reads, found.evicted, found.left) == ((1,), (Expert(1, 0),), (2,))


def test_a_smaller_room_evicts_where_most_is_held() -> None:
    experts = of_equal_size(3, room=12)
    for block, count in ((0, 2), (1, 6), (2, 4)):
        step(experts, block, list(range(count)))
    assert len(experts.resize(6)) == 6
    assert [experts.num_held(block) for block in range(3)] == [2, 2, 2]
    assert held(experts, 1) == [4, 5]
    experts.check()


def test_early_blocks_do_not_crowd_out_late_ones() -> None:
    """Tokens that like a quarter of the experts: every block hits alike, and hits often."""
    num_blocks, count, used = 12, 64, 8
    experts = of_equal_size(num_blocks, room=num_blocks * 24)
    rng = random.Random(1)
    hits: Counter[int] = Counter()
    for token in range(300):
        for block in range(num_blocks):
            liked = [(block * 7 + rng.randrange(16)) % count for _ in range(used * 3)]
            others = rng.sample(range(count), used)
            needed = list(dict.fromkeys(liked))[: used - 1] + others[:1]
            read = step(experts, block, needed)
            hits[block] += token > 20 and len(set(needed)) - len(read)
    assert all(experts.num_held(block) == 24 for block in range(num_blocks))
    assert min(hits.values()) > 0.95 * max(hits.values())
    assert min(hits.values()) > 0.85 * 279 * used


@given(st.data())
def test_whatever_happens_the_books_are_right(data: st.DataObject) -> None:
    sizes = data.draw(st.dictionaries(st.integers(0, 3), st.integers(1, 5), min_size=1))
    experts = ExpertResidency(sizes, data.draw(st.integers(0, 40)))
    reading: set[Expert] = set()
    pinned: set[Expert] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        block = data.draw(st.sampled_from(sorted(sizes)))
        match data.draw(st.sampled_from(["admit", "arrive", "fail", "release", "resize"])):
            case "admit":
                needed = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8))
                held_before = experts.held_bytes
                found = experts.admit(block, needed)
                parts = (*found.present, *found.coming, *found.reads, *found.left)
                assert sorted(parts) == sorted(set(needed))
                assert not pinned & set(found.evicted)
                pinned |= {Expert(block, e) for e in parts if e not in found.left}
                reading |= {Expert(block, e) for e in found.reads}
                assert experts.held_bytes <= max(experts.room_bytes, held_before, sizes[block])
            case "arrive" if reading:
                experts.arrive(*reading.pop())
            case "fail" if reading:
                gone = reading.pop()
                experts.fail(*gone)
                pinned.discard(gone)
            case "release" if pinned - reading:
                one = data.draw(st.sampled_from(sorted(pinned - reading)))
                experts.release(one.block, [one.expert])
                pinned.discard(one)
            case "resize":
                assert not pinned & set(experts.resize(data.draw(st.integers(0, 40))))
        experts.check()


def test_a_prompt_takes_turns_with_its_own_and_leaves_those_of_others() -> None:
    experts = ExpertResidency(dict.fromkeys(range(3), 1), room_bytes=6, used=2)
    for block in range(3):
        step(experts, block, [0, 1])
    assert step(experts, 1, list(range(20))) == list(range(2, 20))
    assert (held(experts, 0), held(experts, 2)) == ([0, 1], [0, 1])
    assert len(held(experts, 1)) == 2


def test_a_token_has_room_at_once_for_what_it_needs() -> None:
    """Also where the quota of a block is less."""
    experts = ExpertResidency(dict.fromkeys(range(3), 1), room_bytes=4, used=4)
    step(experts, 0, [0, 1, 2, 3])
    found = experts.admit(1, [5, 6, 7, 8, 9])
    assert (found.reads, found.left) == ((5, 6, 7, 8), (9,))


def test_experts_of_blocks_that_are_placed_no_more_go_when_they_may() -> None:
    experts = of_equal_size(3, room=6)
    for block in range(3):
        step(experts, block, [0, 1])
    found = experts.admit(2, [0])
    assert found.present == (0,)
    assert set(experts.place([0])) == {Expert(1, 0), Expert(1, 1), Expert(2, 1)}
    assert experts.quota == 6
    experts.release(2, [0])
    assert experts.resize(6) == (Expert(2, 0),)
    assert experts.held_bytes == 2
    experts.check()


def test_who_asks_again_for_what_is_kept_for_him_is_counted_once() -> None:
    experts = of_equal_size(1, room=4)
    experts.admit(0, [0, 1])
    experts.arrive(0, 0)
    experts.admit(0, [0, 1])
    assert (experts.num_hits, experts.num_reads) == (0, 2)
    experts.arrive(0, 1)
    experts.release(0, [0, 1])
    experts.admit(0, [0, 1])
    assert (experts.num_hits, experts.num_reads) == (2, 2)
