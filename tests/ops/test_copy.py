"""Copies in strided memory, and pieces of history between pages of any size: byte for byte what
NumPy moves, and not a byte beside it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from jitllm.jit.copy import Copier
from jitllm.jit.tiers import TIERS, Tier, choose, missing
from jitllm.kernels.copy import RECORD_WORDS
from jitllm.memory.columns import Columns
from jitllm.memory.history import History
from jitllm.memory.page_memory import VirtualPages
from jitllm.memory.pages import KvPages
from jitllm.models.graph import KvShape
from tests.ops.harness import Guarded, compiler

HERE = [
    pytest.param(
        tier,
        id=tier.name,
        marks=pytest.mark.skipif(
            bool(missing(tier)), reason=f"the processor lacks {', '.join(missing(tier))}"
        ),
    )
    for tier in TIERS
]
POISON = 0xEE
ELEMENTS = ["f16", "f32", "q8_0"]

# --- any copies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", HERE)
def test_rows_of_any_length_and_stride_arrive_and_nothing_else_changes(tier: Tier) -> None:
    rng = np.random.default_rng(7)
    lengths = [*range(70), 127, 128, 129, 191, 256, 1000, 4099]
    num_rows = [int(rng.integers(0, 6)) for _ in lengths]
    strides = [(n + int(rng.integers(0, 90)), n + int(rng.integers(0, 90))) for n in lengths]
    source = Guarded(sum(r * s for r, (_, s) in zip(num_rows, strides, strict=True)))
    into = Guarded(sum(r * d for r, (d, _) in zip(num_rows, strides, strict=True)), POISON)
    source.view[:] = rng.integers(0, 256, source.size)
    expected = into.view.copy()

    table, at, to = array("Q"), 0, 0
    for length, rows, (wide, narrow) in zip(lengths, num_rows, strides, strict=True):
        table.extend([into.address + to, wide, source.address + at, narrow, rows, length])
        for _ in range(rows):
            expected[to : to + length] = source.view[at : at + length]
            at, to = at + narrow, to + wide
    Copier(compiler(tier)).run(table)
    assert np.array_equal(into.view, expected)
    into.check()
    source.check()


def test_of_a_table_only_as_many_copies_are_made_as_asked() -> None:
    source, into = Guarded(8, 1), Guarded(8, POISON)
    table = array("Q")
    for at in range(8):
        table.extend([into.address + at, 1, source.address + at, 1, 1, 1])
    assert len(table) == 8 * RECORD_WORDS
    copier = Copier(compiler(choose()))
    copier.run(array("Q"))
    copier.run(table, 0)
    assert (into.view == POISON).all()
    copier.run(table, 3)
    assert into.view.tolist() == [1] * 3 + [POISON] * 5


# --- pieces of history ----------------------------------------------------------------------------

Bytes = NDArray[np.uint8]


def matrices_of(shape: KvShape, element: str) -> list[tuple[int, int]]:
    """(rows, bytes of a position) of what a page is made of: keys, values, the scales of both."""
    heads, k_dim, v_dim = shape.kv_heads, shape.k_dim, shape.v_dim
    match element:
        case "q8_0":  # four dimensions of a key are a word
            scales = [(heads * k_dim // 32, 2), (heads * v_dim // 32, 2)]
            return [(heads * k_dim // 4, 4), (heads, v_dim), *scales]
        case "f16":
            return [(heads * k_dim, 2), (heads, 2 * v_dim)]
    return [(heads * k_dim, 4), (heads, 4 * v_dim)]


@dataclass
class Positions:
    """What a block has of some positions: bytes [rows, positions, bytes of a position] of every
    matrix."""

    matrices: list[Bytes]

    @staticmethod
    def of(data: Bytes, shape: KvShape, element: str, num_tokens: int) -> Positions:
        """Those of a page, as views."""
        found, at = [], 0
        for rows, size in matrices_of(shape, element):
            part = data[at : at + rows * num_tokens * size]
            found.append(part.reshape(rows, num_tokens, size))
            at += len(part)
        assert at == len(data)
        return Positions(found)

    def part(self, start: int, stop: int) -> Positions:
        """Some positions, as views."""
        return Positions([matrix[:, start:stop] for matrix in self.matrices])

    def set(self, other: Positions) -> None:
        """Overwrite all of it."""
        for matrix, new in zip(self.matrices, other.matrices, strict=True):
            matrix[...] = new

    def to_bytes(self) -> bytes:
        """As one page."""
        return b"".join(matrix.tobytes() for matrix in self.matrices)


class Side:
    """A device's pages, in memory between guards, and the two sequences in them."""

    def __init__(self, history: History, page_tokens: int, num_tokens: int) -> None:
        self.history = history
        self.page_tokens = page_tokens
        blocks = range(len(history.shapes))
        sizes = [history.num_bytes([block], page_tokens) for block in blocks]
        capacity = 2 * -(-num_tokens // page_tokens)
        self.memory = Guarded(capacity * Columns(sizes).stride_bytes, POISON)
        base = self.memory.address
        memory = VirtualPages(base, sizes, lambda *_: None)
        self.pages = KvPages(memory, page_tokens, capacity)
        for sequence in (0, 1):
            self.pages.open(sequence, num_tokens)
        for count in range(page_tokens, num_tokens + page_tokens, page_tokens):
            for sequence in (1, 0):  # neither has neighbouring sets
                assert self.pages.grow(sequence, min(count, num_tokens))

    def page(self, block: int, index: int, memory: Bytes) -> Positions:
        """A page of sequence 0, as views of `memory`, which is as large as this side's."""
        shape, element = self.history.shapes[block], self.history.kv_element
        start = self.pages.page(0, index, block) - self.memory.address
        size = self.history.num_bytes([block], self.page_tokens)
        return Positions.of(memory[start : start + size], shape, element, self.page_tokens)

    def write(self, block: int, at: int, one: Positions, memory: Bytes) -> None:
        """One position, into the page where it belongs."""
        page = self.page(block, at // self.page_tokens, memory)
        offset = at % self.page_tokens
        page.part(offset, offset + 1).set(one)

    def copy(self, blocks: Sequence[int], start: int, stop: int, piece: int, *, out: bool) -> None:
        """Between the pages and a piece at an address."""
        table = self.history.copies(self.pages, 0, blocks, start, stop, piece, out=out)
        Copier(compiler(choose())).run(table)
        self.memory.check()


@dataclass(frozen=True)
class Case:
    kv_element: str
    shapes: tuple[KvShape, ...]
    blocks: tuple[int, ...]
    num_tokens: int
    start: int
    stop: int
    page_tokens: tuple[int, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    element = draw(st.sampled_from(ELEMENTS))
    dims = st.sampled_from([32, 64, 96]) if element == "q8_0" else st.integers(1, 40)
    shape = st.builds(KvShape, st.integers(1, 5), dims, dims)
    shapes = draw(st.lists(shape, min_size=1, max_size=4))
    start, stop, num_tokens = sorted(draw(st.tuples(*[st.integers(0, 300)] * 3)))
    page_size = st.sampled_from([4, 8, 16, 32, 64, 128, 256])
    return Case(
        element,
        tuple(shapes),
        tuple(draw(st.lists(st.sampled_from(range(len(shapes))), min_size=1, unique=True))),
        max(num_tokens, 1),
        start,
        stop,
        (draw(page_size), draw(page_size)),
    )


REAL = KvShape(kv_heads=3, k_dim=64, v_dim=128)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("sizes", [(64, 256), (256, 64), (4, 64), (64, 4), (64, 64)], ids=str)
def test_a_history_moves_between_page_sizes(sizes: tuple[int, int], element: str) -> None:
    check(Case(element, (REAL,) * 3, (2, 0), 700, 37, 700, sizes))


@settings(max_examples=80)
@given(cases())
def test_any_piece_moves_between_any_page_sizes(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    """Pages to a piece, the piece to pages of another size, and those to the same piece again."""
    history = History(case.shapes, case.kv_element)
    here, there = (Side(history, size, case.num_tokens) for size in case.page_tokens)
    rng = np.random.default_rng(1)
    expected = there.memory.view.copy()
    piece = b""
    for block in case.blocks:
        whole = random_positions(rng, case.shapes[block], case.num_tokens, case.kv_element)
        for at in range(case.num_tokens):
            here.write(block, at, whole.part(at, at + 1), here.memory.view)
        for at in range(case.start, case.stop):
            there.write(block, at, whole.part(at, at + 1), expected)
        piece += whole.part(case.start, case.stop).to_bytes()
    assert history.num_bytes(case.blocks, case.stop - case.start) == len(piece)

    before = here.memory.view.copy()
    travels, again = (Guarded(len(piece), POISON) for _ in range(2))
    here.copy(case.blocks, case.start, case.stop, travels.address, out=True)
    assert travels.view.tobytes() == piece
    there.copy(case.blocks, case.start, case.stop, travels.address, out=False)
    assert np.array_equal(there.memory.view, expected)
    there.copy(case.blocks, case.start, case.stop, again.address, out=True)
    assert again.view.tobytes() == piece
    assert np.array_equal(here.memory.view, before)
    for memory in (travels, again):
        memory.check()


def random_positions(
    rng: np.random.Generator, shape: KvShape, num_tokens: int, element: str
) -> Positions:
    """Every pattern of bits, NaN included."""
    num_bytes = num_tokens * sum(rows * size for rows, size in matrices_of(shape, element))
    data = np.frombuffer(rng.bytes(num_bytes), np.uint8)
    return Positions.of(data, shape, element, num_tokens)


def test_pages_that_are_not_there_are_not_copied() -> None:
    history = History((KvShape(1, 4, 4), KvShape(1, 4, 4)), "f16")
    pages = KvPages(VirtualPages(1 << 20, [64, 64], lambda *_: None), 4, 4, columns=[0])
    pages.open(1, 16)
    pages.grow(1, 8)
    assert len(history.copies(pages, 1, [0], 0, 8, 0, out=True)) == 4 * RECORD_WORDS
    assert len(history.copies(pages, 1, [0], 8, 8, 0, out=True)) == 0
    for block, stop in [(0, 9), (1, 8)]:
        with pytest.raises(ValueError, match="sequence 1 has no page"):
            history.copies(pages, 1, [block], 0, stop, 0, out=True)
