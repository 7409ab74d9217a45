"""Page sets are free, held or kept: whatever sequences do, none is lost and none written twice."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jitllm.memory.pages import KvPages
from jitllm.memory.prefix import PrefixIndex, digests, extend, reusable

PAGE = 4
BLOCKS = 3
CAPACITY = 12


def made(capacity: int = CAPACITY) -> tuple[KvPages, list[int]]:
    """Pages at made-up addresses, and the sets that were given back, in order."""
    given_back: list[int] = []
    pages: KvPages

    def release(offset: int, length: int) -> None:
        assert length == pages.set_bytes
        given_back.append(offset // length)

    pages = KvPages(1 << 20, [100] * BLOCKS, PAGE, capacity, release)
    return pages, given_back


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
    assert len(given_back) == 1
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
    assert len(given_back) == 1
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
    assert len(given_back) == 1
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


@dataclass
class Model:
    """A sequence as the machine below knows it: `tokens` are computed."""

    tokens: list[int]
    contents: list[int] = field(default_factory=list)


class Pages(RuleBasedStateMachine):
    """Sequences over an alphabet of two tokens, so that prefixes meet. What was written to a set is
    remembered, and every sequence must find its own tokens in its sets at all times."""

    def __init__(self) -> None:
        super().__init__()
        self.pages, self.given_back = made()
        self.sequences: dict[int, Model] = {}
        self.memory: dict[int, list[int | None]] = {}
        self.next_id = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def begin(self, tokens: list[int]) -> None:
        num_cached = self.pages.open(self.next_id, 32, reusable(tokens, PAGE))
        assert num_cached < len(tokens)
        self.sequences[self.next_id] = Model(tokens[:num_cached])
        self.compute(self.next_id, tokens[num_cached:])
        self.next_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def go_on(self, data: st.DataObject, more: list[int]) -> None:
        self.compute(data.draw(st.sampled_from(sorted(self.sequences))), more)

    def compute(self, id: int, more: list[int]) -> None:
        model, pages = self.sequences[id], self.pages
        more = more[: 32 - len(model.tokens)]
        if not pages.grow(id, len(model.tokens) + len(more)):
            self.end(id)
            return
        self.forget_given_back()
        for token in more:
            at = len(model.tokens)
            page_set = pages._tables[id].sets[at // PAGE]
            self.memory.setdefault(page_set, [None] * PAGE)[at % PAGE] = token
            model.tokens.append(token)
        for index, digest in enumerate(digests(model.tokens, PAGE)):
            pages.publish(id, index, digest)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.sequences))))

    def end(self, id: int) -> None:
        self.pages.close(id)
        del self.sequences[id]
        self.forget_given_back()

    @rule(kept=st.integers(0, CAPACITY))
    def shrink(self, kept: int) -> None:
        self.pages.shrink(kept * self.pages.set_bytes)
        assert self.pages.idle_bytes <= kept * self.pages.set_bytes
        self.forget_given_back()

    def forget_given_back(self) -> None:
        """Memory that was given back holds nothing."""
        for page_set in self.given_back:
            self.memory.pop(page_set, None)
        self.given_back.clear()

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        self.pages.check()
        for id, model in self.sequences.items():
            sets = self.pages._tables[id].sets
            held = [self.memory[sets[i // PAGE]][i % PAGE] for i in range(len(model.tokens))]
            assert held == model.tokens


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40)
