"""A device whose arithmetic is a dictionary: what each position of each page holds.

Ownership and KV pages are the real ones. The content of a position in a block names the block and
all tokens up to there, because that is what keys and values depend on; memory that was given back
holds nothing. So a page that is lost, read after its end, or filled with something else is found
out by the step that looks at it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from actors.mailbox import Lost
from actors.messages.device import (
    Abandon,
    Adopt,
    Close,
    Drop,
    Hand,
    Missing,
    Open,
    Opened,
    Own,
    Pack,
    Parcel,
    Piece,
    Prepare,
    Refused,
    Step,
    StepDone,
    Stream,
    Unpack,
    Unpacked,
)
from jitllm.errors import OutOfPages
from jitllm.memory import prefix
from jitllm.memory.columns import Columns
from jitllm.memory.ownership import Ownership, Stale
from jitllm.memory.page_memory import VirtualPages
from jitllm.memory.pages import KvPages
from jitllm.schedule.step import Span, SpanResult

Content = tuple[int, int] | None
"""(block, what stands for all tokens up to the position); None in memory that holds nothing."""

BASE = 1 << 20
CAPACITY = 256
PART_PAGES = 8
"""Memory of a block's weights, or the head's."""


def contents(block: int, tokens: Iterable[int]) -> list[Content]:
    """What all positions of a sequence have to hold in a block."""
    trails = accumulate(tokens, lambda trail, token: hash((trail, token)), initial=0)
    return [(block, trail) for trail in list(trails)[1:]]


def next_token(tokens: Iterable[int]) -> int:
    """What a sequence goes on with: another history would give another token."""
    return hash(tuple(tokens)) % 991


class _CountedPages(VirtualPages):
    """Pages, at most `num_most` of them at a time."""

    num_taken = 0
    num_most: Callable[[], int]

    def take(self, page_set: int, columns: Iterable[int]) -> bool:
        """See `PageMemory`."""
        count = len(set(columns))
        if self.num_taken + count > self.num_most():
            return False
        self.num_taken += count
        return True

    def give(self, page_set: int, columns: Iterable[int]) -> None:
        """See `PageMemory`."""
        self.num_taken -= len(set(columns))
        super().give(page_set, columns)


class Seat:
    """What a device knows of a sequence. shares: whether others may find its pages."""

    def __init__(self, history: list[int], num_published: int, digest: bytes, shares: bool) -> None:
        self.history = history
        self.num_published = num_published
        self.digest = digest
        self.shares = shares

    def write(self, start: int, tokens: Iterable[int]) -> None:
        """Tokens from `start` on."""
        self.history[start:] = tokens


class ModelDevice:
    """Handles what a device does, at once.

    room: blocks that it has room for. budget: pages that it has memory for, blocks and the head
    among them, each of which takes `PART_PAGES`. warns: says so when memory is nearly used up.
    """

    def __init__(
        self,
        name: str,
        num_blocks: int,
        page_tokens: int,
        room: int = 1 << 30,
        budget: int = 1 << 30,
        *,
        warns: bool = False,
    ) -> None:
        sizes = [4096] * num_blocks
        self.name = name
        self.num_blocks = num_blocks
        self.room = room
        self.budget = budget
        self.warns = warns
        self.ownership = Ownership()
        self.seats: dict[int, Seat] = {}
        self.memory: dict[tuple[int, int], list[Content]] = {}
        self._layout = Columns(sizes)
        memory = self._counted = _CountedPages(BASE, sizes, self._release)
        memory.num_most = lambda: self.budget - PART_PAGES * len(self.ownership.held)
        self.pages = KvPages(memory, page_tokens, CAPACITY, columns=())

    def receive(self, message: Any) -> Any:
        """See `actors.device`; what is about weights and threads is not here."""
        match message:
            case Own():
                return self._own(message)
            case Open():
                return self._open(message)
            case Close():
                for sequence in message.sequences:
                    self._close(sequence)
                return None
            case Step():
                return self._step(message)
            case Prepare():
                return self._prepare(message)
            case Missing():
                is_here = message.sequence in self.seats
                return self.pages.missing(message.sequence) if is_here else 0
            case Pack():
                return self._pack(message)
            case Unpack():
                return self._unpack(message.parcel)
            case Hand():
                return self.ownership.hand(message.blocks, message.epoch)
            case Adopt():
                return self._adopt(message)
            case Drop():
                return self._forget(self.ownership.drop(message.epoch))
            case Abandon():
                return self._forget(self.ownership.abandon(message.epoch))
            case Stream():
                return None
            case _:
                raise NotImplementedError(message)

    @property
    def state(self) -> bytes:
        """Everything that a message can change."""
        mine = vars(self.ownership), {s: vars(seat) for s, seat in self.seats.items()}
        return pickle.dumps((mine, self.memory, self.pages.columns, vars(self.pages._arrivals)))

    def check(self) -> None:
        """Nothing is here but what the blocks that are held need."""
        self.pages.check()
        held = self.ownership.held - {self.num_blocks}
        assert self.pages.columns == held, (self.name, self.pages.columns, held)
        assert {column for _, column in self.memory} <= held
        assert self.pages._arrivals.columns <= held - self.ownership.owned

    def content(self, sequence: int, block: int, stop: int) -> list[Content]:
        """What the first positions of a sequence hold in a block."""
        nothing = [None] * self.pages.page_tokens
        sets = self.pages._tables[sequence].sets
        pages = [self.memory.get((page_set, block), nothing) for page_set in sets]
        return [content for page in pages for content in page][:stop]

    # --- sequences ---------------------------------------------------------------------------

    def _open(self, message: Open) -> Opened | Refused:
        if not self.ownership.held:
            raise Lost(self.name)
        self._close(message.sequence)
        size = self.pages.page_tokens
        wanted = prefix.reusable(message.tokens, size)[: message.max_cached // size]
        num_cached = self.pages.open(message.sequence, message.max_tokens, wanted)
        num_sets = num_cached // size
        digest = wanted[num_sets - 1] if num_sets else b""
        history = list(message.tokens[:num_cached])
        self.seats[message.sequence] = Seat(history, num_sets, digest, bool(message.tokens))
        return Opened(message.sequence, num_cached)

    def _close(self, sequence: int) -> None:
        if self.seats.pop(sequence, None) is not None:
            self.pages.close(sequence)

    def _step(self, message: Step) -> StepDone:
        blocks = range(message.start, message.stop)
        needed = {*blocks, self.num_blocks} if message.has_head else {*blocks}
        known = all(span.sequence in self.seats for span in message.spans)
        if not self.ownership.owned.issuperset(needed) or not known:
            raise Lost(self.name)
        before = None if message.start == 0 else pickle.dumps((message.step_id, message.start))
        if message.start < self.num_blocks:
            assert message.hidden == before, "it begins with what another step ended with"
        for span in message.spans:
            self._compute(span, blocks)
        hidden = None if message.has_head else pickle.dumps((message.step_id, message.stop))
        results = tuple(self._result(span) for span in message.spans) if message.has_head else ()
        return StepDone(message.step_id, results, (), hidden, is_short=self._is_short())

    def _is_short(self) -> bool:
        num_columns = len(self.pages.columns)
        idle = self.pages.idle_bytes // self.pages.set_bytes * num_columns if num_columns else 0
        free = self._counted.num_most() - self._counted.num_taken + idle
        return self.warns and len(self.seats) * num_columns > free

    def _compute(self, span: Span, blocks: Iterable[int]) -> None:
        seat, size = self.seats[span.sequence], self.pages.page_tokens
        assert len(seat.history) >= span.start
        self._grow(span.sequence, span.stop)
        seat.write(span.start, span.tokens)
        for block in blocks:
            expected = contents(block, seat.history[: span.stop])
            self._write(span.sequence, block, span.start, expected[span.start :])
            assert self.content(span.sequence, block, span.stop) == expected
        while seat.shares and (stop := (seat.num_published + 1) * size) <= span.stop:
            seat.digest = prefix.extend(seat.digest, seat.history[stop - size : stop])
            self.pages.publish(span.sequence, seat.num_published, seat.digest)
            seat.num_published += 1

    def _grow(self, sequence: int, num_tokens: int) -> None:
        if not self.pages.grow(sequence, num_tokens):
            what = f"KV of {num_tokens} positions"
            raise OutOfPages(self.name, sequence, num_tokens, what, 1, 0, "wait")

    def _result(self, span: Span) -> SpanResult:
        token = next_token(self.seats[span.sequence].history[: span.stop])
        return SpanResult(span.sequence, token if span.sample else None, -1.0)

    def _write(self, sequence: int, block: int, start: int, content: Iterable[Content]) -> None:
        size = self.pages.page_tokens
        for at, what in enumerate(content, start):
            self.pages.page(sequence, at // size, block)  # raises where there is none
            page = (self.pages._tables[sequence].sets[at // size], block)
            self.memory.setdefault(page, [None] * size)[at % size] = what

    def _release(self, offset: int, length: int) -> None:
        page_set, at = divmod(offset, self._layout.stride_bytes)
        for column, start in enumerate(self._layout.offsets):
            if at <= start < at + length:
                self.memory.pop((page_set, column), None)

    # --- blocks that come and go -------------------------------------------------------------

    def _own(self, message: Own) -> None:
        if self.ownership.settle(message.blocks, message.epoch):
            for sequence in tuple(self.seats):
                self._close(sequence)
            self._settle()

    def _prepare(self, message: Prepare) -> Refused | None:
        over = self.ownership.expect(message.blocks, message.epoch)
        self.pages.drop(over - {self.num_blocks})
        if not self._settle() or len(self.ownership.held) > self.room:
            self._forget(self.ownership.abandon(message.epoch))
            return Refused(1, 0)
        return None

    def _adopt(self, message: Adopt) -> None:
        if not self.ownership.adopt(message.blocks, message.epoch):
            return
        self.pages.adopt(block for block in message.blocks if block < self.num_blocks)
        for seat in self.seats.values():
            seat.num_published, seat.digest = 0, b""

    def _forget(self, gone: frozenset[int]) -> None:
        if gone:
            self._settle()

    def _settle(self) -> bool:
        """Have memory for what is held, and for nothing else; whether there is."""
        held = self.ownership.held - {self.num_blocks}
        self.pages.drop(self.pages.columns - held)
        self.pages.clear()
        fits = self.pages.hold(held) and PART_PAGES * len(self.ownership.held) <= self.budget
        self.pages.adopt(held & self.ownership.owned)
        return fits

    # --- history that comes and goes ---------------------------------------------------------

    def _pack(self, message: Pack) -> Parcel:
        if not self.ownership.owned.issuperset(message.blocks):
            raise Stale("pack", message.blocks, message.epoch)
        pieces = tuple(piece for piece in message.pieces if piece.sequence in self.seats)
        content = [
            [self.content(p.sequence, b, p.stop)[p.start :] for b in message.blocks] for p in pieces
        ]
        data = pickle.dumps(content)
        return Parcel(message.blocks, pieces, data, 0.0, message.epoch, message.number)

    def _unpack(self, parcel: Parcel) -> Unpacked:
        if not self.ownership.take(parcel.blocks, parcel.epoch, parcel.number):
            return Unpacked(0, 0.0)
        assert isinstance(parcel.data, bytes)
        for piece, content in zip(parcel.pieces, pickle.loads(parcel.data), strict=True):
            if piece.sequence in self.seats:
                self._take(parcel.blocks, piece, content)
        return Unpacked(1, 0.0)

    def _take(self, blocks: Iterable[int], piece: Piece, content: list[list[Content]]) -> None:
        self._grow(piece.sequence, piece.stop)
        seat = self.seats[piece.sequence]
        seat.history[piece.start : piece.stop] = piece.tokens
        for block, of in zip(blocks, content, strict=True):
            assert len(of) == len(piece.tokens), "it has not been computed"
            self._write(piece.sequence, block, piece.start, of)
        self.pages.fill(piece.sequence, piece.stop)
