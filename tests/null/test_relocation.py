"""Blocks move between devices: whatever happens, each has one owner, which has its history.

The state machine below is a scheduler and a network in a few lines, around the ownership, the
watermarks, the placement and the KV pages that are used in earnest.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

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
    Piece,
    Prepare,
    Refused,
    Step,
    Unpack,
)
from jitllm.engine import Sampling
from jitllm.errors import JitllmError, PlacementError
from jitllm.schedule.placement import Placement
from jitllm.schedule.relocation import Range, Watermarks
from jitllm.schedule.step import Span, SpanOutputs
from tests.null.model_device import ModelDevice, contents

# --- watermarks ------------------------------------------------------------------------------


def marks_of(**positions: int) -> Watermarks:
    """Of parcels of four positions."""
    marks = Watermarks(10, 40)
    for sequence, position in positions.items():
        marks.begin(int(sequence.removeprefix("s")), position)
    return marks


def test_pieces_follow_each_other_up_to_what_is_computed() -> None:
    marks, computed, seen = marks_of(s1=2), {1: 13}, []
    while pieces := marks.next(computed):
        for piece in pieces:
            marks.arrived(piece)
            seen.append(piece)
    assert seen == [Range(1, 2, 6), Range(1, 6, 10), Range(1, 10, 13)]
    assert marks.lag(computed) == 0
    assert marks.lag({1: 15}) == 2


def test_who_lags_most_goes_first_and_a_parcel_has_room_for_several() -> None:
    marks = marks_of(s1=5, s2=0, s3=8)
    assert marks.next({1: 6, 2: 3, 3: 9}) == (Range(2, 0, 3), Range(1, 5, 6))


def test_a_position_travels_even_if_it_is_larger_than_a_parcel() -> None:
    assert Watermarks(100, 40).next({1: 2}) == (Range(1, 0, 1),)
    assert Watermarks(0, 40).next({1: 2}) == (Range(1, 0, 2),)  # the head alone has no history


def test_what_did_not_arrive_is_named_again() -> None:
    marks = marks_of()
    first = marks.next({1: 8})
    assert marks.next({1: 8}) == first


def test_a_piece_that_comes_twice_or_out_of_turn_changes_nothing() -> None:
    marks = marks_of(s1=0)
    marks.arrived(Range(1, 4, 8))
    assert marks.next({1: 8}) == (Range(1, 0, 4),)
    marks.arrived(Range(1, 0, 4))
    marks.arrived(Range(1, 0, 4))
    assert marks.next({1: 8}) == (Range(1, 4, 8),)


def test_a_sequence_that_ended_is_forgotten() -> None:
    marks = marks_of(s1=8)
    assert marks.lag({}) == 0
    assert marks.lag({1: 8}) == 8  # another one of that number


def test_a_sequence_that_fell_back_travels_again_from_there() -> None:
    marks = marks_of(s1=8)
    assert marks.lag({1: 6}) == 0
    assert marks.lag({1: 9}) == 3
    marks = marks_of(s1=8)
    marks.fell_back(1, 6)
    assert marks.lag({1: 9}) == 3
    marks.fell_back(1, 7)  # not as far
    assert marks.lag({1: 9}) == 3


def test_what_was_on_its_way_during_a_fall_back_counts_up_to_there() -> None:
    marks = marks_of(s1=4)
    (piece,) = marks.next({1: 8})
    marks.fell_back(1, 6)
    marks.arrived(piece)  # what it has of positions 6 and 7 is of another reply
    assert marks.next({1: 8}) == (Range(1, 6, 8),)
    marks.arrived(Range(1, 6, 8))
    assert marks.lag({1: 8}) == 0


# --- everything at once ------------------------------------------------------------------------

SIZES = {"a": 2, "b": 4, "c": 8}
"""Devices, and positions in their pages."""
BLOCKS = 3
HEAD = BLOCKS
SMALLEST = min(SIZES.values())
MAX_TOKENS = 40
MAX_STREAMS = 4
CLOSE = 2
PARCEL = 3

Sending = Generator[tuple[str, Any], Any, None]
NAMES = st.sampled_from(sorted(SIZES))
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@dataclass
class Stream:
    """A sequence as the scheduler knows it."""

    id: int
    tokens: list[int]
    shares: bool
    computed: int = 0

    @property
    def opening(self) -> Open:
        tokens = tuple(self.tokens) if self.shares else ()
        return Open(self.id, tokens, MAX_TOKENS, MAX_TOKENS, Sampling(), False, 0, must_fit=True)


@dataclass
class Flight:
    """A message of the mover on its way; then its answer, or the error that came instead."""

    to: str
    message: Any
    has_arrived: bool = False
    answer: Any = None
    error: Exception | None = None


@dataclass
class Node:
    """A device, and what became of it. life: how many there were before it.

    is_fresh: nobody told it anything yet. is_unsure: it did not hear how a move ended, because it
    hung; it is found out when it is needed again.
    """

    device: ModelDevice
    life: int = 0
    is_fresh: bool = True
    is_unsure: bool = False
    sent: list[Any] = field(default_factory=list)


class Relocation(RuleBasedStateMachine):
    """Sequences over two tokens, so that they share prefixes, on three devices."""

    @initialize(owners=st.lists(NAMES, min_size=BLOCKS + 1, max_size=BLOCKS + 1))
    def begin(self, owners: list[str]) -> None:
        self.nodes = {name: Node(made(name)) for name in SIZES}
        self.placement = Placement(tuple(owners[:-1]), owners[-1])
        self.guests: tuple[str, ...] = ()
        self.running: list[Stream] = []
        self.waiting: list[Stream] = []
        self.num_streams = self.num_steps = 0
        self.is_locked = False
        self.mover: Sending | None = None
        self.flight: Flight | None = None
        self.marks: Watermarks | None = None
        self.settle()

    # --- the network ---------------------------------------------------------------------------

    def ask(self, name: str, message: Any) -> Any:
        """A message that arrives and is answered. Those to one device keep their order."""
        flight = self.flight
        if flight is not None and flight.to == name and not flight.has_arrived:
            self.arrive(flight)
        return self.handle(name, message)

    def handle(self, name: str, message: Any) -> Any:
        node = self.nodes[name]
        answer = node.device.receive(message)
        if isinstance(message, Own):
            node.is_fresh = node.is_unsure = False
        if not isinstance(message, Open | Close | Step):
            node.sent.append(message)
        return answer

    def arrive(self, flight: Flight) -> None:
        flight.has_arrived = True
        try:
            flight.answer = self.handle(flight.to, flight.message)
        except JitllmError as error:
            flight.error = error

    def die(self, name: str) -> None:
        old = self.nodes[name]
        self.nodes[name] = Node(made(name), old.life + 1)
        if self.flight is not None and self.flight.to == name and self.flight.error is None:
            self.flight.has_arrived, self.flight.error = True, Lost(name)

    def resume(self) -> None:
        """The mover hears of its message, and sends the next one."""
        mover, flight = self.mover, self.flight
        assert mover is not None
        self.flight = None
        try:
            if flight is None:
                sent = next(mover)
            elif flight.error is not None:
                sent = mover.throw(flight.error)
            else:
                sent = mover.send(flight.answer)
            self.flight = Flight(*sent)
        except StopIteration:
            self.mover = self.marks = None

    # --- the scheduler -------------------------------------------------------------------------

    def owned_by(self, name: str) -> tuple[int, ...]:
        head = (HEAD,) if self.placement.head == name else ()
        return (*sorted(self.placement.blocks_on(name)), *head)

    def settle(self) -> None:
        for name in SIZES:
            self.ask(name, Own(self.owned_by(name), self.placement.epoch))

    def recover(self) -> None:
        """After a loss: every sequence begins again."""
        self.guests = ()
        self.placement = replace(self.placement, epoch=self.placement.epoch + 1)
        for stream in self.running:
            stream.computed = 0
            if self.marks is not None:
                self.marks.fell_back(stream.id, 0)
        self.waiting, self.running = self.waiting + self.running, []
        self.settle()

    def open(self, stream: Stream) -> None:
        limit = MAX_TOKENS
        while True:
            counts = []
            for name in self.placement.devices:
                opened = self.ask(name, replace(stream.opening, max_cached=limit))
                assert isinstance(opened, Opened)
                counts.append(opened.num_cached)
            limit = min(counts)
            if limit == max(counts):
                break
        for name in self.guests:
            self.open_at_guest(name, stream)
        stream.computed = limit
        self.running.append(stream)

    def open_at_guest(self, name: str, stream: Stream) -> None:
        with suppress(Lost):  # its move fails then
            self.ask(name, stream.opening)

    def admit(self, stream: Stream) -> None:
        try:
            self.open(stream)
        except Lost:
            self.waiting.append(stream)
            self.recover()

    def compute(self, spans: tuple[Span, ...]) -> None:
        self.num_steps += 1
        hidden = None
        for leg in self.placement.legs():
            step = Step(
                self.num_steps, spans, leg.start, leg.stop, leg.has_head, hidden, inline=True
            )
            try:
                hidden = self.ask(leg.device, step).hidden
            except Lost:
                self.recover()
                return
        for span in spans:
            stream = next(s for s in self.running if s.id == span.sequence)
            stream.computed = span.stop

    # --- the mover -----------------------------------------------------------------------------

    def moving(self, base: Placement, target: Placement) -> Sending:
        """What it sends, step by step; the reverse of what `actors.relocate` awaits."""
        leaving = leaving_of(base, target)
        try:
            yield from self.prepare(base, target, leaving)
            self.is_locked = True
            self.check(base)
            yield from self.catch_up(base, target, leaving)
            for name, blocks in leaving.items():
                yield name, Hand(blocks, target.epoch)
            yield receiver(base, target), Adopt(moved(base, target), target.epoch)
        except JitllmError:
            yield from self.abandon(base, target, leaving)
            self.is_locked = False
            return
        self.placement, self.guests, self.is_locked = target, (), False
        for name in leaving:
            try:
                yield name, Drop(target.epoch)
            except Lost:
                self.nodes[name].is_unsure = True
            yield from self.leave(name)

    def check(self, base: Placement) -> None:
        if self.placement.epoch != base.epoch:
            raise PlacementError("a device was lost meanwhile")

    def prepare(
        self, base: Placement, target: Placement, leaving: dict[str, tuple[int, ...]]
    ) -> Sending:
        to = receiver(base, target)
        if isinstance((yield to, Prepare(moved(base, target), target.epoch)), Refused):
            raise PlacementError("no room")
        self.check(base)
        is_guest = to not in base.devices
        if is_guest:
            self.guests = (to,)
        num_positions = len([b for b in moved(base, target) if b != HEAD])
        marks = self.marks = Watermarks(num_positions, PARCEL * max(num_positions, 1))
        for stream in tuple(self.running):
            if stream not in self.running:
                continue
            if is_guest:
                self.check(base)
                yield to, stream.opening
            missing = yield to, Missing(stream.id)
            marks.begin(stream.id, min(missing, stream.computed))
        for _ in range(3):
            if marks.lag(self.computed()) > CLOSE * len(self.running):
                yield from self.catch_up(base, target, leaving)

    def catch_up(
        self, base: Placement, target: Placement, leaving: dict[str, tuple[int, ...]]
    ) -> Sending:
        """A round: what is computed at its beginning."""
        assert self.marks is not None
        computed = self.computed()
        while pieces := self.marks.next(self.computed() if self.is_locked else computed):
            streams = {stream.id: stream for stream in self.running}
            named = tuple(
                Piece(p.sequence, p.start, tuple(streams[p.sequence].tokens[p.start : p.stop]))
                for p in pieces
                if p.sequence in streams
            )
            for name, blocks in leaving.items():
                self.check(base)
                self.num_steps += 1  # any number that grows
                held = tuple(block for block in blocks if block != HEAD)
                parcel = yield name, Pack(held, named, True, target.epoch, self.num_steps)
                yield receiver(base, target), Unpack(parcel)
            for piece in pieces:
                self.marks.arrived(piece)

    def computed(self) -> dict[int, int]:
        return {stream.id: stream.computed for stream in self.running}

    def abandon(self, base: Placement, target: Placement, leaving: Iterable[str]) -> Sending:
        self.guests = ()
        if self.placement.epoch == base.epoch:
            self.placement = replace(base, epoch=target.epoch)
        for name in (receiver(base, target), *leaving):
            try:
                yield name, Abandon(target.epoch)
            except Lost:
                self.nodes[name].is_unsure = True
        yield from self.leave(receiver(base, target))

    def leave(self, name: str) -> Sending:
        for _ in range(3):
            if name in self.placement.devices:
                return
            try:
                yield name, Own((), self.placement.epoch)
            except Lost:
                self.nodes[name].is_unsure = True
            else:
                return

    # --- what happens --------------------------------------------------------------------------

    @precondition(lambda self: not self.is_locked)
    @precondition(lambda self: len(self.running) + len(self.waiting) < MAX_STREAMS)
    @rule(tokens=TOKENS, shares=st.booleans())
    def submit(self, tokens: list[int], shares: bool) -> None:
        self.num_streams += 1
        self.admit(Stream(self.num_streams, tokens, shares))

    @precondition(lambda self: self.waiting and not self.is_locked)
    @rule()
    def admit_who_waits(self) -> None:
        self.admit(self.waiting.pop(0))

    @precondition(lambda self: self.running and not self.is_locked)
    @rule(more=st.lists(st.integers(0, 1), min_size=1, max_size=6), times=st.integers(1, 4))
    def go_a_few_steps(self, more: list[int], times: int) -> None:
        self.step(more, times)

    def step(self, more: list[int], times: int) -> None:
        if self.is_locked:
            return
        for token in more[:times]:
            spans = []
            for stream in self.running:
                if stream.computed == len(stream.tokens) < MAX_TOKENS:
                    stream.tokens.append(token)
                tokens = tuple(stream.tokens[stream.computed : stream.computed + len(more)])
                if tokens:
                    start = stream.computed
                    spans.append(Span(stream.id, start, tokens, SpanOutputs.LAST, sample=True))
            if spans:
                self.compute(tuple(spans))

    @precondition(lambda self: self.running and not self.is_locked)
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        stream = self.running.pop(which % len(self.running))
        for name in (*self.placement.devices, *self.guests):
            self.ask(name, Close((stream.id,)))

    @precondition(lambda self: self.running and not self.is_locked)
    @rule(which=st.integers(0, 99), depth=st.integers(1, 20), tokens=TOKENS)
    def roll_back(self, which: int, depth: int, tokens: list[int]) -> None:
        """Some positions are computed again with other tokens; what others may share is not."""
        stream = self.running[which % len(self.running)]
        lowest = stream.computed // SMALLEST * SMALLEST if stream.shares else 0
        position = max(stream.computed - depth, lowest)
        if position < stream.computed:
            stream.computed = position
            stream.tokens[position:] = tokens[: MAX_TOKENS - position]
            if self.marks is not None:
                self.marks.fell_back(stream.id, position)

    @precondition(lambda self: self.mover is None)
    @rule(blocks=st.sets(st.integers(0, HEAD), min_size=1), to=NAMES)
    def ask_for_a_move(self, blocks: set[int], to: str) -> None:
        base = self.placement
        try:
            target = base.moved(blocks - {HEAD}, to, head=HEAD in blocks)
        except PlacementError:
            return
        self.mover = self.moving(base, target)
        self.resume()

    @precondition(lambda self: self.flight is not None)
    @rule(num=st.integers(1, 60))
    def go_on(self, num: int) -> None:
        """So many messages of the mover arrive and are answered."""
        for _ in range(num):
            if self.flight is not None:
                if not self.flight.has_arrived:
                    self.arrive(self.flight)
                self.resume()

    @precondition(lambda self: self.flight is not None)
    @rule(kind=st.sampled_from([Unpack, Hand, Adopt, Abandon]), arrives=st.booleans())
    def go_on_until(self, kind: type, arrives: bool) -> None:
        """The next one that is sent is of this kind, if there is one."""
        while self.flight is not None and not isinstance(self.flight.message, kind):
            self.go_on(1)
        if self.flight is not None and arrives and not self.flight.has_arrived:
            self.arrive(self.flight)

    @precondition(lambda self: self.flight is not None and not self.flight.has_arrived)
    @rule()
    def one_arrives(self) -> None:
        assert self.flight is not None
        self.arrive(self.flight)

    @precondition(lambda self: self.flight is not None and self.flight.error is None)
    @rule(how=st.sampled_from(["refuses", "hangs", "dies"]))
    def who_was_asked_fails(self, how: str) -> None:
        """Before or after it did what it was asked. Who hangs lives on."""
        flight = self.flight
        assert flight is not None
        node = self.nodes[flight.to]
        if how == "dies":
            self.die(flight.to)
        elif how == "hangs":
            flight.has_arrived, flight.error = True, Lost(flight.to)
        elif not flight.has_arrived:
            node.device.room = 0
            self.arrive(flight)
            node.device.room = 1 << 30

    @rule(name=NAMES, odds=st.integers(0, 4))
    def one_dies(self, name: str, odds: int) -> None:
        if not odds:
            self.die(name)
            self.step([0], 1)  # most of the time that is how it is found out

    @rule(name=NAMES, which=st.integers(0, 999))
    def one_comes_late_or_twice(self, name: str, which: int) -> None:
        node = self.nodes[name]
        if not node.sent:
            return
        before = node.device.state
        with suppress(JitllmError):
            node.device.receive(node.sent[which % len(node.sent)])
        assert node.device.state == before, node.sent[which % len(node.sent)]

    # --- what holds at every instant -----------------------------------------------------------

    @invariant()
    def no_block_has_two_owners(self) -> None:
        for block in range(BLOCKS + 1):
            sure = [node.device for node in self.nodes.values() if not node.is_unsure]
            owners = [device.name for device in sure if block in device.ownership.owned]
            assert len(owners) <= 1, (block, owners)

    @invariant()
    def the_owner_has_all_that_was_computed(self) -> None:
        if self.is_locked:
            return
        for block in range(BLOCKS + 1):
            owner = self.placement.head if block == HEAD else self.placement.blocks[block]
            node = self.nodes[owner]
            if node.is_fresh or node.is_unsure:
                continue
            assert block in node.device.ownership.owned, (block, owner)
            for stream in self.running if block < HEAD else ():
                expected = contents(block, stream.tokens[: stream.computed])
                found = node.device.content(stream.id, block, stream.computed)
                assert found == expected, (owner, stream)

    @invariant()
    def nothing_is_where_it_should_not_be(self) -> None:
        for name, node in self.nodes.items():
            node.device.check()
            if self.mover is None and not node.is_unsure and not node.is_fresh:
                assert node.device.ownership.held == node.device.ownership.owned
                assert node.device.ownership.held or not node.device.seats
                live = {stream.id for stream in self.running}
                assert node.device.seats.keys() <= live, (name, node.device.seats.keys())

    def check_all(self) -> None:
        self.no_block_has_two_owners()
        self.the_owner_has_all_that_was_computed()
        self.nothing_is_where_it_should_not_be()

    def teardown(self) -> None:
        """Nothing is left that a move would stumble over."""
        self.is_locked = False
        for _ in range(1000):
            if self.flight is not None:
                self.go_on(1)
        assert self.mover is None
        self.recover()
        for stream in list(self.waiting):
            self.waiting.remove(stream)
            self.open(stream)
        for to in SIZES:
            for end in (to, "a"):
                self.step([0, 1], 2)
                self.ask_for_a_move(set(range(BLOCKS + 1)), end)
                self.go_on(1000)
                assert set(self.placement.blocks) == {end} == {self.placement.head}
                self.the_owner_has_all_that_was_computed()


def made(name: str) -> ModelDevice:
    return ModelDevice(name, BLOCKS, SIZES[name])


def moved(base: Placement, target: Placement) -> tuple[int, ...]:
    return tuple(sorted(b for blocks in leaving_of(base, target).values() for b in blocks))


def receiver(base: Placement, target: Placement) -> str:
    owners = (*target.blocks, target.head)
    return owners[moved(base, target)[0]]


def leaving_of(base: Placement, target: Placement) -> dict[str, tuple[int, ...]]:
    """What changes its device, by the one that it leaves."""
    leaving: dict[str, list[int]] = {}
    before, after = (*base.blocks, base.head), (*target.blocks, target.head)
    for block, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            leaving.setdefault(old, []).append(block)
    return {name: tuple(blocks) for name, blocks in leaving.items()}


@pytest.mark.parametrize("how", ["hangs", "dies", "refuses"])
@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("kind", [Prepare, Open, Missing, Pack, Unpack, Hand, Adopt, Drop])
def test_what_holds_at_every_instant_after_a_failure(kind: type, arrives: bool, how: str) -> None:
    """The same as below, at each message once."""
    scene = Relocation()
    scene.begin(["a", "a", "c", "c"])
    for tokens in ([0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]):
        scene.submit(tokens, True)
    scene.step([0, 1], 2)
    scene.ask_for_a_move({0, 1, 2, HEAD}, "b")
    scene.go_on_until(kind, arrives)
    assert scene.flight is not None
    scene.who_was_asked_fails(how)
    while scene.flight is not None:
        if not scene.flight.has_arrived:
            scene.arrive(scene.flight)
        scene.check_all()
        scene.resume()
        scene.check_all()
    scene.teardown()


TestRelocation = Relocation.TestCase
TestRelocation.settings = settings(max_examples=120, stateful_step_count=60)
