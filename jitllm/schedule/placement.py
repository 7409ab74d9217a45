"""Where the blocks of a model and its output head are computed: an immutable value with an epoch.

Knows names of devices and indices of blocks. Knows no device, no memory and no message: what
fits is decided elsewhere, and who goes there too. Printed one way everywhere:
`0-8=cpu:0,9-17=cpu:1,head=cpu:0`, with `!` for pinned, `~` for streamed, and behind these `%host`
where the host computes the routed experts of a block, `%card` where they come to it one by one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

from jitllm.devices.grammar import is_cpu
from jitllm.errors import PlacementError

HEAD = "head"
PIN, STREAM, HOSTED, CARDED = "!", "~", "%host", "%card"


@dataclass(frozen=True, slots=True)
class Leg:
    """Blocks [start, stop) on one device, then the head if `has_head`; start == stop: it alone."""

    device: str
    start: int
    stop: int
    has_head: bool


@dataclass(frozen=True, slots=True)
class Move:
    """What leaves its device for `to`: some blocks, holes allowed, and perhaps the head."""

    blocks: tuple[int, ...]
    head: bool
    to: str

    def __str__(self) -> str:
        return f"{shown_blocks(self.blocks, self.head)} to {self.to}"


@dataclass(frozen=True, slots=True)
class Decline:
    """What was asked for and is not so, and why."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of each block and of the output head."""

    blocks: tuple[str, ...]
    head: str
    epoch: int = 0
    """Goes up by one with every change, so that what travels late is known to be late."""
    pinned: frozenset[int] = frozenset()
    """Blocks that only a map may move; num_blocks stands for the head."""
    streamed: frozenset[int] = frozenset()
    """Blocks whose weights pass through their device's memory at each step."""
    hosted: frozenset[int] = frozenset()
    """Blocks whose routed experts `host` computes, wherever the block is: for good."""
    host: str = ""
    """The device that does."""
    carded: frozenset[int] = frozenset()
    """Blocks whose routed experts come one by one to whichever GPU the block is on: for good."""

    @classmethod
    def all_on(cls, device: str, num_blocks: int) -> Self:
        """Everything on one device."""
        return cls((device,) * num_blocks, device)

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return len(self.blocks)

    @property
    def devices(self) -> tuple[str, ...]:
        """Those with anything on them, in the order of the route, each once."""
        return tuple(dict.fromkeys((*self.blocks, self.head)))

    def blocks_on(self, device: str) -> frozenset[int]:
        """Indices of the blocks that a device owns."""
        return frozenset(i for i, owner in enumerate(self.blocks) if owner == device)

    def experts_mark(self, index: int) -> str:
        """What a block has behind its device: where its routed experts are, if not with it. On the
        host no block has any, and where there is no memory to bring experts to there is no
        `%card`."""
        owner = self.owner(index)
        if index in self.hosted and owner != self.host:
            return HOSTED
        return CARDED if index in self.carded and not is_cpu(owner) else ""

    def owner(self, index: int) -> str:
        """The device of a block, or of the head, whose number comes after the last block."""
        return self.head if index == self.num_blocks else self.blocks[index]

    def legs(self) -> tuple[Leg, ...]:
        """The route of a step: runs of blocks, and the head at its end."""
        legs: list[Leg] = []
        start = 0
        for device, run in groupby(self.blocks):
            stop = start + len(list(run))
            legs.append(Leg(device, start, stop, stop == self.num_blocks and device == self.head))
            start = stop
        if not legs or not legs[-1].has_head:
            legs.append(Leg(self.head, self.num_blocks, self.num_blocks, True))
        return tuple(legs)

    def moved(
        self,
        blocks: Iterable[int],
        to: str,
        *,
        head: bool = False,
        pins_hold: bool = True,
        streamed: frozenset[int] = frozenset(),
    ) -> Self:
        """The same with these blocks on `to`, one epoch later. What is there already stays.

        Of those that go, the `streamed` ones pass through the memory of `to`, and no others.
        Raises PlacementError for a block that there is not, for a pinned one unless pins do not
        hold, and for no move.
        """
        asked = sorted(set(blocks))
        if outside := [i for i in asked if not 0 <= i < self.num_blocks]:
            raise PlacementError(
                f"{_count(outside)} {runs_text(outside)}: {range_text(self.num_blocks)}"
            )
        going = [i for i in asked if self.blocks[i] != to]
        takes_head = head and self.head != to
        if not going and not takes_head:
            raise _no_move(asked, head, to)
        if pins_hold:
            self._refuse_pinned(going, takes_head)
        owners = list(self.blocks)
        for i in going:
            owners[i] = to
        return replace(
            self,
            blocks=tuple(owners),
            head=to if takes_head else self.head,
            epoch=self.epoch + 1,
            streamed=self.streamed.difference(going) | streamed.intersection(going),
        )

    def without(self, gone: str, heirs: Sequence[str]) -> Self:
        """The same where what is on `gone` is on `heirs`, of which there is one at least.

        Each block goes to the heir that comes before it on the route, or else after it, and passes
        through its memory no more; pins and epoch stay.
        """
        owners = [*self.blocks, self.head]
        for index, owner in enumerate(owners):
            if owner == gone:
                near = (*reversed(owners[:index]), *owners[index:])
                owners[index] = next((device for device in near if device in heirs), heirs[0])
        streamed = self.streamed - self.blocks_on(gone)
        return replace(self, blocks=tuple(owners[:-1]), head=owners[-1], streamed=streamed)

    def at_home(self, host: str, leaving: Container[str]) -> Self:
        """The same where all that is on the devices `leaving` and not pinned is on `host`."""
        owners = [self.owner(index) for index in range(self.num_blocks + 1)]
        gone = {i for i, o in enumerate(owners) if o in leaving and i not in self.pinned}
        owners = [host if index in gone else owner for index, owner in enumerate(owners)]
        streamed = self.streamed - gone
        return replace(self, blocks=tuple(owners[:-1]), head=owners[-1], streamed=streamed)

    def marked(self, pinned: Iterable[int] = (), streamed: Iterable[int] = ()) -> Self:
        """The same with these pins and streamed blocks and no others, one epoch later."""
        return replace(
            self, pinned=frozenset(pinned), streamed=frozenset(streamed), epoch=self.epoch + 1
        )

    def moves_to(self, other: Placement) -> tuple[Move, ...]:
        """What must go where until this is `other`, a move for each device that something goes to.

        Pins hold nobody back, since `other` is what somebody asked for; marks are not compared.
        """
        if other.num_blocks != self.num_blocks:
            raise PlacementError(
                f"a placement of {other.num_blocks} blocks is none for a model of {self.num_blocks}"
            )
        moves = []
        for to in other.devices:
            arriving = sorted(other.blocks_on(to) - self.blocks_on(to))
            head = other.head == to != self.head
            if arriving or head:
                moves.append(Move(tuple(arriving), head, to))
        return tuple(moves)

    def __str__(self) -> str:
        return ",".join(self._entries())

    def _entries(self) -> Iterator[str]:
        def where(i: int) -> str:
            marks = PIN * (i in self.pinned) + STREAM * (i in self.streamed)
            return self.owner(i) + marks + self.experts_mark(i)

        for place, run in groupby(range(self.num_blocks), where):
            yield f"{runs_text(run)}={place}"
        yield f"{HEAD}={where(self.num_blocks)}"

    def _refuse_pinned(self, going: Sequence[int], head: bool) -> None:
        pinned = [i for i in going if i in self.pinned]
        head = head and self.num_blocks in self.pinned
        if not pinned and not head:
            return
        free = [
            f"{run}={owner}"
            for owner, blocks in groupby(pinned, self.blocks.__getitem__)
            for run in runs_text(blocks).split(",")
        ]
        free += [f"{HEAD}={self.head}"] if head else []
        raise PlacementError(
            f"{shown_blocks(pinned, head)} {_are(pinned, head)} pinned",
            f"-placement {','.join(free)} takes the pin off",
        )


def range_text(num_blocks: int) -> str:
    """Which blocks a model has, for messages."""
    return f"the model has blocks 0 to {num_blocks - 1}" if num_blocks else "it has no blocks"


def runs_text(blocks: Iterable[int]) -> str:
    """Sorted indices as people write them: "0-3,7"."""
    runs: list[list[int]] = []
    for i in blocks:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def shown_blocks(blocks: Sequence[int], head: bool) -> str:
    """Blocks and perhaps the head in words: "blocks 0-3,7 and the head"."""
    parts = [f"{_count(blocks)} {runs_text(blocks)}"] if blocks else []
    return " and ".join([*parts, *(["the head"] if head else [])])


def _no_move(blocks: Sequence[int], head: bool, to: str) -> PlacementError:
    if not blocks and not head:
        return PlacementError("no block is named", "name some, like 0:9, or head")
    what = f"{shown_blocks(blocks, head)} {_are(blocks, head)}"
    return PlacementError(f"{what} on {to} already", "name another device")


def _are(blocks: Sequence[int], head: bool) -> str:
    return "is" if len(blocks) + head == 1 else "are"


def _count(blocks: Sequence[int]) -> str:
    return "block" if len(blocks) == 1 else "blocks"
