"""Passes show every row all of its keys, in order, with few absent sets at a time."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from jitllm.kernels.attention import CHUNK_KEYS
from jitllm.kernels.op import ALL_KEYS
from jitllm.memory.passes import NO_KEYS, Row, Stretch, stretches


def planned(
    rows: list[Row], absent: set[int], window: int = 0, page_tokens: int = 64, max_sets: int = 2
) -> list[Stretch]:
    return stretches(rows, absent, window=window, page_tokens=page_tokens, max_sets=max_sets)


def test_what_is_there_needs_one_pass() -> None:
    rows = [Row((0, 1, 2), 150), Row((3,), 0)]
    assert planned(rows, set()) == [Stretch(frozenset(), (ALL_KEYS, ALL_KEYS))]
    assert planned(rows, {9}) == [Stretch(frozenset(), (ALL_KEYS, ALL_KEYS))]


def test_absent_sets_come_a_few_at_a_time() -> None:
    rows = [Row((10, 11, 12, 13, 14), 300), Row((20, 21), 100)]
    assert planned(rows, {10, 12, 13, 20}) == [
        Stretch(frozenset({10, 20}), ((0, 64), (0, 64))),
        Stretch(frozenset({12, 13}), ((64, 256), NO_KEYS)),
        Stretch(frozenset(), ((256, ALL_KEYS[1]), (64, ALL_KEYS[1]))),
    ]


def test_what_a_window_does_not_show_does_not_come() -> None:
    rows = [Row((10, 11, 12, 13, 14), 300)]
    assert [one.sets for one in planned(rows, {10, 11, 12}, window=200)] == [{11, 12}, set()]
    assert [one.sets for one in planned(rows, {10, 11, 12}, window=10)] == [set()]


def test_a_shared_set_comes_once_for_all_who_look_at_it() -> None:
    rows = [Row((1, 2, 3, 30), 200), Row((1, 2, 4, 40), 200), Row((1, 2, 3, 50), 192)]
    comes = [one.sets for one in planned(rows, {1, 2, 3, 4}, max_sets=1)]
    assert comes == [{1}, {2}, {3}, {4}, set()]


def test_a_chunk_of_keys_is_not_divided() -> None:
    rows = [Row(tuple(range(9)), 130)]
    found = planned(rows, set(range(8)), page_tokens=16, max_sets=1)
    assert found == [
        Stretch(frozenset(range(4)), ((0, 64),)),
        Stretch(frozenset(range(4, 8)), ((64, 128),)),
        Stretch(frozenset(), ((128, ALL_KEYS[1]),)),
    ]


@dataclass(frozen=True)
class Batch:
    rows: list[Row]
    absent: set[int]
    window: int
    page_tokens: int
    max_sets: int


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Rows that share sets at their beginning, or not."""
    page_tokens = draw(st.sampled_from([4, 16, 64, 128]))
    shared = draw(st.integers(0, 6))
    rows, next_set = [], 100
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 12))
        own = [*range(min(shared, count)), *range(next_set, next_set + count)][:count]
        next_set += count
        rows.append(Row(tuple(own), draw(st.integers(0, count * page_tokens - 1))))
    written = {s for row in rows for s in row.sets[row.start // page_tokens :]}
    known = sorted({s for row in rows for s in row.sets} - written)
    absent = draw(st.sets(st.sampled_from(known))) if known else set()
    window = draw(st.sampled_from([0, 0, 1, 30, 100]))
    return Batch(rows, absent, window, page_tokens, draw(st.integers(1, 8)))


@given(batches())
def test_every_row_sees_its_keys_in_order_and_what_it_sees_is_there(batch: Batch) -> None:
    size = batch.page_tokens
    found = planned(batch.rows, batch.absent, batch.window, size, batch.max_sets)
    num_come = 0
    for index, row in enumerate(batch.rows):
        ranges = [one.ranges[index] for one in found if one.ranges[index] != NO_KEYS]
        assert [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
        assert (ranges[0][0], ranges[-1][1]) == ALL_KEYS
        assert all(start % CHUNK_KEYS == 0 for start, _ in ranges)
        first = max(row.start + 1 - batch.window, 0) if batch.window else 0
        for one in found:
            start, stop = one.ranges[index]
            for at, page_set in enumerate(row.sets[: -(-row.start // size)]):
                is_seen = max(start, first, at * size) < min(stop, (at + 1) * size)
                assert page_set in one.sets or not (is_seen and page_set in batch.absent)
    for one in found:
        num_come += len(one.sets)
        assert one.sets <= batch.absent
        assert len(one.sets) <= max(batch.max_sets, CHUNK_KEYS // size)
    if size >= CHUNK_KEYS:
        assert num_come == len(frozenset[int]().union(*(one.sets for one in found)))
