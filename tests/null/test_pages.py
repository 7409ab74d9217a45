"""Page sets are free, held or kept: whatever sequences do, whichever columns come and go, none is
lost and none written twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jitllm.memory.columns import Columns
from jitllm.memory.page_memory import VirtualPages
from jitllm.memory.pages import KvPages
from jitllm.memory.prefix import PrefixIndex, digests, extend, reusable

PAGE = 4
SIZES = [100, 5000, 4096, 20]
BLOCKS = len(SIZES)
CAPACITY = 12
BASE = 1 << 20

Pieces = list[tuple[int, int]]
"""(page set, column) pairs, in order."""


def made(capacity: int = CAPACITY, columns: Iterable[int] | None = None) -> tuple[KvPages, Pieces]:
    """Pages at made-up addresses, and whose memory was given back."""
    given_back: Pieces = []
    layout = Columns(SIZES)
    starts = {offset: column for column, offset in enumerate(layout.offsets)}

    def release(offset: int, length: int) -> None:
        page_set, at = divmod(offset, layout.stride_bytes)
        while length > 0:
            column = starts[at]
            given_back.append((page_set, column))
            at += layout.num_bytes([column])
            length -= layout.num_bytes([column])
        assert length == 0

    return KvPages(VirtualPages(BASE, SIZES, release), PAGE, capacity, columns), given_back


def fill(pages: KvPages, sequence: int, tokens: tuple[int, ...]) -> None:
    """Compute all of a sequence's tokens."""
    assert pages.grow(sequence, len(tokens))
    for index, digest in enumerate(digests(tokens, PAGE)):
        pages.publish(sequence, index, digest)


def test_digests_name_everything_before() -> None:
    tokens = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    first, second = digests(tokens, PAGE)
    assert (first, second) == (extend(b"", tokens[:4]), extend(first, tokens[4:8]))
    assert digests((0, *tokens[1:]), PAGE)[1] != second
    assert reusable(tokens[:8], PAGE) == (first,)  # the last token has to be computed
    assert reusable(tokens, PAGE) == (first, second)
    assert reusable(tokens[:1], PAGE) == ()


def test_sequences_that_begin_alike_share_sets() -> None:
    pages, given_back = made()
    first, second = tuple(range(10)), (*range(8), 20, 21)
    assert pages.open(1, 16) == 0
    fill(pages, 1, first)
    assert pages.open(2, 16, reusable(second, PAGE)) == 8
    fill(pages, 2, second)
    assert pages.held_bytes == 4 * pages.set_bytes  # two shared ones, one each
    pages.close(1)
    assert pages.held_bytes == 3 * pages.set_bytes
    assert len(given_back) == BLOCKS
    pages.close(2)
    assert (pages.held_bytes, pages.idle_bytes) == (0, 2 * pages.set_bytes)
    pages.shrink(0)
    assert pages.idle_bytes == 0
    pages.check()


def test_tables_of_sequences_that_share_point_to_the_same_memory() -> None:
    pages, _ = made()
    tokens = tuple(range(9))
    pages.open(1, 16)
    fill(pages, 1, tokens)
    pages.open(2, 16, reusable(tokens, PAGE))
    pages.grow(2, 9)
    one, two = pages._tables[1], pages._tables[2]
    assert one.entries[: 2 * BLOCKS] == two.entries[: 2 * BLOCKS]
    assert one.entries[2 * BLOCKS : 3 * BLOCKS] != two.entries[2 * BLOCKS : 3 * BLOCKS]


def test_what_is_kept_gives_way_to_sequences_the_oldest_and_longest_first() -> None:
    pages, given_back = made(4)
    pages.open(1, 16)
    fill(pages, 1, tuple(range(8)))
    pages.close(1)
    pages.open(2, 16)
    assert pages.grow(2, 12)  # two were free
    assert len(given_back) == BLOCKS
    pages.open(3, 16, digests(tuple(range(8)), PAGE))
    assert pages.num_taken(3) == 1  # the first one is still there
    assert not pages.grow(3, 8)
    pages.check()


def test_the_first_of_two_equal_sets_is_shared() -> None:
    pages, given_back = made()
    tokens = tuple(range(4))
    for sequence in (1, 2):
        pages.open(sequence, 8)
        fill(pages, sequence, tokens)
    pages.close(1)
    pages.close(2)
    assert pages.idle_bytes == pages.set_bytes
    assert len(given_back) == BLOCKS
    pages.check()


def test_an_index_reclaims_what_nobody_used_for_longest() -> None:
    index = PrefixIndex()
    for page_set in range(3):
        index.publish(bytes([page_set]), page_set)
        index.leave(page_set)
    index.hold(0)
    index.leave(0)
    assert [index.reclaim() for _ in range(4)] == [1, 2, 0, None]
    assert index.find([b"\0"]) == []
    index.check()


def test_a_sequence_opens_once() -> None:
    pages, _ = made()
    pages.open(1, 4)
    with pytest.raises(ValueError, match="has a page table"):
        pages.open(1, 4)
    pages.close(1)
    pages.close(1)


# --- columns ------------------------------------------------------------------------------------


def test_every_page_begins_at_a_system_page_and_a_set_costs_what_is_held() -> None:
    whole, _ = made()
    some, _ = made(columns=[1, 3])
    none, _ = made(columns=[])
    assert (whole.set_bytes, some.set_bytes, none.set_bytes) == (5 * 4096, 3 * 4096, 0)
    assert [set(pages.columns) for pages in (whole, some)] == [{0, 1, 2, 3}, {1, 3}]
    for pages in (whole, some, none):
        pages.open(1, 8)
        assert pages.grow(1, 8)
        assert pages.held_bytes == 2 * pages.set_bytes
        offsets = [0, 4096, 3 * 4096, 4 * 4096, 5 * 4096, 6 * 4096, 8 * 4096, 9 * 4096]
        assert list(pages._tables[1].entries) == [BASE + offset for offset in offsets]
    assert some.page(1, 1, 3) == BASE + 9 * 4096
    for index, column in [(1, 0), (2, 1), (-1, 1)]:
        with pytest.raises(ValueError, match="sequence 1 has no page"):
            some.page(1, index, column)
    with pytest.raises(ValueError, match="of 4 blocks"):
        made(columns=[4])
    with pytest.raises(ValueError, match="of 4 blocks"):
        some.hold([0, -1])
    assert some.columns == {1, 3}


def test_only_the_memory_of_held_columns_goes_back() -> None:
    pages, given_back = made(columns=[0, 1, 3])
    pages.open(1, 8)
    pages.grow(1, 8)
    pages.close(1)
    assert sorted(given_back) == [(s, column) for s in (0, 1) for column in (0, 1, 3)]


def test_what_others_may_share_outlives_a_column_that_goes() -> None:
    pages, given_back = made()
    tokens = tuple(range(9))
    pages.open(1, 16)
    fill(pages, 1, tokens)
    pages.open(2, 16, reusable(tokens, PAGE))
    pages.close(1)
    pages.open(3, 16)
    fill(pages, 3, (9, 9, 9, 9))
    pages.close(3)  # idle
    given_back.clear()
    pages.drop([1, 2])
    pages.drop([2])
    assert given_back == []
    assert pages.clear(4096)
    assert len(given_back) == 2  # of one set
    assert not pages.clear()
    assert sorted(given_back) == [(s, column) for s in (0, 1, 2) for column in (1, 2)]
    assert pages.set_bytes == 2 * 4096
    assert (pages.held_bytes, pages.idle_bytes) == (2 * pages.set_bytes, pages.set_bytes)
    assert pages.open(4, 16, reusable(tokens, PAGE)) == 8
    assert pages.open(5, 16, digests((9, 9, 9, 9), PAGE)) == 4
    pages.check()


def test_history_is_filled_in_while_sequences_go_on() -> None:
    pages, _ = made(columns=[0])
    pages.open(1, 32)
    pages.grow(1, 6)
    assert pages.missing(1) == 8  # nothing is lacking of what the table has
    pages.hold([1, 2])
    assert pages.held_bytes == 2 * pages.set_bytes == 2 * 4 * 4096
    assert pages.missing(1) == 0
    pages.fill(1, 6)
    assert pages.missing(1) == 6
    pages.grow(1, 13)  # computed here for column 0, elsewhere for the others
    assert pages.missing(1) == 6
    pages.fill(1, 3)  # late, and known already
    assert pages.missing(1) == 6
    pages.fill(1, 12)
    assert pages.missing(1) == 12
    pages.fill(1, 13)
    assert pages.missing(1) == 13
    pages.adopt([1, 2])
    pages.grow(1, 17)
    assert pages.missing(1) == 20
    pages.check()


def test_shared_sets_are_filled_once() -> None:
    pages, _ = made(columns=[0])
    tokens = tuple(range(11))
    pages.open(1, 16)
    fill(pages, 1, tokens)
    pages.open(2, 16, reusable(tokens, PAGE))
    pages.grow(2, 10)
    pages.hold([3])
    pages.fill(1, 6)
    assert [pages.missing(s) for s in (1, 2)] == [6, 6]
    pages.fill(2, 10)
    assert [pages.missing(s) for s in (1, 2)] == [8, 10]
    pages.close(1)
    assert pages.missing(2) == 10


def test_nothing_that_lacks_a_column_is_found() -> None:
    pages, given_back = made(columns=[0])
    tokens = tuple(range(9))
    pages.open(1, 16)
    fill(pages, 1, tokens)
    pages.open(2, 16)
    fill(pages, 2, (9, 9, 9, 9))
    pages.close(2)  # idle
    given_back.clear()
    pages.hold([1])
    assert given_back == [(3, 0)]
    assert pages.idle_bytes == 0
    assert pages.open(3, 16, reusable(tokens, PAGE)) == 0
    fill(pages, 1, tokens)
    pages.open(4, 16)
    fill(pages, 4, tokens)  # taken later, and computed elsewhere all the same
    assert pages.open(5, 16, reusable(tokens, PAGE)) == 0
    pages.fill(1, 5)
    fill(pages, 1, tokens)
    assert pages.open(6, 16, reusable(tokens, PAGE)) == 4
    pages.fill(1, 9)
    for _ in range(2):
        fill(pages, 1, tokens)
        fill(pages, 4, tokens)
    assert pages.open(7, 16, reusable(tokens, PAGE)) == 8
    pages.check()


def test_a_move_that_does_not_take_place_leaves_nothing_lacking() -> None:
    pages, given_back = made(columns=[0, 1])
    tokens = tuple(range(8))
    pages.open(1, 16)
    fill(pages, 1, tokens)
    pages.hold([1, 2])
    pages.fill(1, 3)
    pages.drop([2])
    pages.clear()
    assert sorted(given_back) == [(0, 2), (1, 2)]
    assert pages.columns == {0, 1}
    fill(pages, 1, tokens)
    assert pages.open(2, 16, digests(tokens, PAGE)) == 8
    pages.check()


def test_columns_of_two_moves_are_lacking_until_the_last_of_them_is_adopted() -> None:
    pages, _ = made(columns=[0])
    pages.open(1, 16)
    pages.grow(1, 8)
    pages.hold([1])
    pages.fill(1, 6)
    pages.hold([1, 2])
    assert pages.missing(1) == 0  # there is one count for both
    pages.adopt([1])
    assert pages.missing(1) == 0
    pages.fill(1, 8)
    pages.adopt([2])
    pages.adopt([2])
    pages.grow(1, 9)
    assert pages.missing(1) == 12


def test_a_set_is_published_once() -> None:
    index = PrefixIndex()
    for digest, page_set in [(b"a", 0), (b"a", 0), (b"a", 1), (b"b", 0), (b"b", 1)]:
        index.publish(digest, page_set)
        index.check()
    assert index.find([b"a", b"b"]) == [0, 1]
    index.leave(1)
    assert index.clear() == {1}
    assert index.find([b"a"]) == []
    index.check()


# --- everything at once -------------------------------------------------------------------------

MAX_TOKENS = 32


@dataclass
class Model:
    """A sequence as the machine below knows it: `tokens` are computed, here and elsewhere."""

    tokens: list[int]


class Pages(RuleBasedStateMachine):
    """Sequences over an alphabet of two tokens, so that prefixes meet. What was written to a page
    is remembered; every sequence must find its own tokens in all columns that are computed here,
    and in those on their way as far as they are said not to be missing. Memory that was never
    written, or given back, holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.pages, self.given_back = made(columns=[0, 1])
        self.coming: set[int] = set()
        self.sequences: dict[int, Model] = {}
        self.memory: dict[tuple[int, int], list[int | None]] = {}
        self.next_id = 0

    @property
    def own(self) -> frozenset[int]:
        """Columns that are computed here."""
        return self.pages.columns - self.coming

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def begin(self, tokens: list[int]) -> None:
        num_cached = self.pages.open(self.next_id, MAX_TOKENS, reusable(tokens, PAGE))
        assert num_cached < len(tokens)
        for column in self.pages.columns:  # also those on their way
            assert self.contents(self.next_id, column, num_cached) == tokens[:num_cached]
        assert self.pages.missing(self.next_id) == num_cached
        self.sequences[self.next_id] = Model(tokens[:num_cached])
        self.compute(self.next_id, tokens[num_cached:])
        self.next_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def go_on(self, data: st.DataObject, more: list[int]) -> None:
        self.compute(self.one(data), more)

    def one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.sequences)))

    def compute(self, id: int, more: list[int]) -> None:
        """A step: columns on their way are written elsewhere."""
        model, start = self.sequences[id], len(self.sequences[id].tokens)
        more = more[: MAX_TOKENS - start]
        if not self.pages.grow(id, start + len(more)):
            self.end(id)
            return
        self.forget_given_back()
        model.tokens += more
        self.write(id, self.own, start, len(model.tokens))
        self.publish(id)

    def write(self, id: int, columns: Iterable[int], start: int, stop: int) -> None:
        for column in columns:
            for at in range(start, stop):
                page = (self.pages._tables[id].sets[at // PAGE], column)
                positions = self.memory.setdefault(page, [None] * PAGE)
                positions[at % PAGE] = self.sequences[id].tokens[at]

    def publish(self, id: int) -> None:
        """All of it: most of the time for the second time."""
        for index, digest in enumerate(digests(self.sequences[id].tokens, PAGE)):
            self.pages.publish(id, index, digest)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        self.end(self.one(data))

    def end(self, id: int) -> None:
        self.pages.close(id)
        del self.sequences[id]
        self.forget_given_back()

    @rule(kept=st.integers(0, CAPACITY))
    def shrink(self, kept: int) -> None:
        self.pages.shrink(kept * self.pages.set_bytes)
        assert self.pages.idle_bytes <= kept * self.pages.set_bytes
        self.forget_given_back()

    @rule(columns=st.sets(st.integers(0, BLOCKS - 1)))
    def hold(self, columns: set[int]) -> None:
        added = columns - self.pages.columns
        self.pages.hold(columns)
        self.coming |= added
        assert not added or self.pages.idle_bytes == 0
        self.forget_given_back()

    @precondition(lambda self: self.coming and self.sequences)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        id = self.one(data)
        self.fill_to(id, data.draw(st.integers(0, len(self.sequences[id].tokens))))

    def fill_to(self, id: int, stop: int) -> None:
        start = self.pages.missing(id)
        assert start <= max(len(self.sequences[id].tokens), self.pages.num_taken(id) * PAGE)
        self.write(id, self.coming, start, stop)
        self.pages.fill(id, stop)
        assert self.pages.missing(id) >= stop
        self.publish(id)

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        """A hand-over: what is missing of every sequence comes, in any order."""
        for id in data.draw(st.permutations(sorted(self.sequences))):
            self.fill_to(id, len(self.sequences[id].tokens))
        adopted = data.draw(st.sets(st.sampled_from(sorted(self.coming))) | st.just(self.coming))
        self.pages.adopt(adopted)
        self.coming = self.coming - adopted

    @rule(columns=st.sets(st.integers(0, BLOCKS - 1)))
    def drop(self, columns: set[int]) -> None:
        dropped = self.pages.columns & columns
        self.pages.drop(columns)
        self.coming = self.coming - dropped

    @rule(most_bytes=st.sampled_from([1, 10_000, 1 << 62]))
    def clear(self, most_bytes: int) -> None:
        """Some of what was dropped goes, while everything else goes on."""
        is_more = self.pages.clear(most_bytes)
        self.forget_given_back()
        assert is_more or {column for _, column in self.memory} <= self.pages.columns

    def forget_given_back(self) -> None:
        """Memory that was given back holds nothing."""
        for page in self.given_back:
            self.memory.pop(page, None)
        self.given_back.clear()

    def contents(self, id: int, column: int, stop: int) -> list[int | None]:
        """What the first positions of a sequence hold."""
        sets = self.pages._tables[id].sets
        pages = [self.memory.get((s, column), [None] * PAGE) for s in sets]
        return [token for page in pages for token in page][:stop]

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        self.pages.check()
        leaving = {(s, column) for s, columns in self.pages._dropped for column in columns}
        held = self.pages.columns
        assert {page for page in self.memory if page[1] not in held} <= leaving
        for id, model in self.sequences.items():
            for column in self.own:
                assert self.contents(id, column, len(model.tokens)) == model.tokens
            present = min(self.pages.missing(id), len(model.tokens))
            for column in self.coming:
                assert self.contents(id, column, present) == model.tokens[:present]


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=100, stateful_step_count=50)
