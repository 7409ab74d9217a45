"""Moves blocks from one device to another while replies go on.

Prepare: the destination makes room, has weights brought, and takes the history of every sequence
in, in rounds up to a watermark, each parcel followed by a pause so that replies keep their rate.
Hand over, between two steps: what was computed since the last round, then ownership, in a new
epoch. Until then the source owns the blocks, and whatever fails before leaves everything as it was.

Knows the route and positions. Knows no request and no plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

from actors.actor import Ref
from actors.mailbox import Stopped
from actors.messages.device import (
    Abandon,
    Adopt,
    Bring,
    Brought,
    Drop,
    Hand,
    Missing,
    Open,
    Pack,
    Parcel,
    Piece,
    Prepare,
    Refused,
    Unpack,
    Unpacked,
)
from actors.messages.pager import Lend, Lent, Release
from actors.route import Route, Site
from jitllm.devices.grammar import more_memory
from jitllm.engine import Moved, MoveTotals
from jitllm.errors import JitllmError, PlacementError
from jitllm.log import logger
from jitllm.memory.ownership import Stale
from jitllm.schedule.placement import Move as PlannedMove
from jitllm.schedule.placement import Placement, shown_blocks
from jitllm.schedule.placement_map import attached
from jitllm.schedule.relocation import Range, Watermarks
from jitllm.schedule.sequence import Sequence as TokenStream
from jitllm.units import format_size

PARCEL_BYTES = 1 << 20
"""Most that is copied at once: a fraction of a millisecond, in which a device does nothing else."""

CLOSE_STEPS = 2
"""Once so few steps' positions are missing, they are handed over with the blocks."""

MAX_ROUNDS = 64
"""Rounds after which blocks are handed over, however far the history still lags."""

_log = logger(__name__)


class MoveLost(PlacementError):
    """A device was lost while blocks moved, and none has; the same move may do another time."""


class Replies(Protocol):
    """What a mover needs of the scheduler."""

    def running(self) -> Sequence[TokenStream]:
        """The sequences that have seats."""
        ...

    def opening(self, sequence: TokenStream) -> Open:
        """What gives a sequence a seat somewhere else."""
        ...

    def between_steps(self) -> AbstractAsyncContextManager[float]:
        """No step runs within it; the moment at which the last one ended."""
        ...

    async def begin_again(self, error: JitllmError, num_losses: int) -> None:
        """Somebody was lost; see to it that all devices know what is theirs, also where no step
        would find out. num_losses: as of before; when it has grown, somebody did."""
        ...

    @property
    def num_losses(self) -> int:
        """Losses that sequences began again after."""
        ...

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled so far."""
        ...


@dataclass(slots=True)
class _Move:
    """One move under way. blocks: by the device that they leave; the head is among them. share: of
    the time, that copying may take from replies."""

    to: str
    blocks: dict[str, tuple[int, ...]]
    base: Placement
    target: Placement
    marks: Watermarks
    began_s: float
    num_sampled: int
    share: float
    num_parcels: int = 0
    bytes_before: int = 0
    bytes_paused: int = 0
    weight_bytes: int = 0
    pages: int = 0
    rounds: int = 0
    origins: dict[str, int] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """That it leads to, or whose messages find that it is over."""
        return self.target.epoch

    @property
    def all_blocks(self) -> tuple[int, ...]:
        return tuple(sorted(block for blocks in self.blocks.values() for block in blocks))


class Mover:
    """The moves of one model, one at a time.

    block_bytes: what each block's weights take, and at the end the head's besides those that every
    node has. kv_bytes: what a position takes in each block. share: largest part of the time that
    copying may take from running replies.
    """

    def __init__(
        self,
        route: Route,
        replies: Replies,
        block_bytes: Sequence[int],
        kv_bytes: Sequence[int],
        share: float,
    ) -> None:
        self._route = route
        self._replies = replies
        self._block_bytes = tuple(block_bytes)
        self._kv_bytes = tuple(kv_bytes)
        self._share = share
        self._turn = asyncio.Lock()
        self._carrying = asyncio.Lock()
        self._claimed: set[int] = set()
        self._marks: Watermarks | None = None
        self.num_moves = 0
        self.num_moved = 0
        """Blocks that moved so far, in so many moves."""
        self.totals = MoveTotals()
        self.last: Moved | None = None

    async def move(
        self, blocks: Iterable[int], to: str, *, head: bool = False, is_live: bool = True
    ) -> Moved:
        """Move `blocks`, and the head if asked, to a device; answered when it owns them.

        is_live: copy while replies go on; otherwise they stand still all the time. Raises
        `PlacementError`, and nothing has changed.
        """
        move = PlannedMove(tuple(sorted(set(blocks))), head, attached(to, self._route.sites))
        self._route.placement.moved(move.blocks, move.to, head=head)  # or why not, at once
        async with self.turn([move]):
            return await self.carry_out(move, is_live=is_live)

    @asynccontextmanager
    async def turn(self, moves: Iterable[PlannedMove] = ()) -> AsyncIterator[None]:
        """Nothing else moves within it, and nobody may ask for what `moves` names until its end.

        Raises `PlacementError` when somebody has asked for a part of it before.
        """
        num_blocks = self._route.placement.num_blocks
        claimed = {b for m in moves for b in (*m.blocks, *((num_blocks,) if m.head else ()))}
        if both := claimed & self._claimed:
            shown = shown_blocks(sorted(both - {num_blocks}), num_blocks in both)
            verb = "is" if len(both) == 1 else "are"
            raise PlacementError(f"{shown} {verb} being moved already", "wait until that is done")
        self._claimed |= claimed
        try:
            async with self._turn:
                yield
        finally:
            self._claimed -= claimed

    async def carry_out(
        self,
        asked: PlannedMove,
        *,
        is_live: bool = True,
        pins_hold: bool = True,
        streamed: frozenset[int] = frozenset(),
        share: float | None = None,
    ) -> Moved:
        """A move whose turn it is; see `move`. streamed: blocks that pass through there. share: of
        the time, that copying may take from replies; by default as much as any move."""
        base, to = self._route.placement, attached(asked.to, self._route.sites)
        target = base.moved(
            asked.blocks, to, head=asked.head, pins_hold=pins_hold, streamed=streamed
        )
        leaving = _leaving(base, target)
        position_bytes = sum(
            self._kv_bytes[b] for of in leaving.values() for b in of if b < base.num_blocks
        )
        marks = self._marks = Watermarks(position_bytes, PARCEL_BYTES)
        began_s, sampled = perf_counter(), self._replies.num_sampled
        share = self._share if share is None else share
        move = _Move(to, leaving, base, target, marks, began_s, sampled, share)
        num_losses = self._replies.num_losses
        try:
            if is_live:
                await self._prepare(move)
            return await self._hand_over(move, is_live=is_live)
        except PlacementError as error:
            if isinstance(error.__cause__, JitllmError) and not self._was_guest(error.__cause__):
                await self._replies.begin_again(error.__cause__, num_losses)
            raise

    def _was_guest(self, error: JitllmError) -> bool:
        """Whether who was lost had nothing of the model."""
        if not isinstance(error, Stopped):
            return False
        try:
            return self._route.name_of(error.name) not in self._route.placement.devices
        except KeyError:  # it was given up
            return True

    def fell_back(self, sequence: int, position: int) -> None:
        """A sequence is computed again from a position on."""
        if self._marks is not None:
            self._marks.fell_back(sequence, position)

    @asynccontextmanager
    async def without(self, sequence: int) -> AsyncIterator[None]:
        """A sequence leaves its seats within it: what has arrived of it is not there any more.

        It is `undisturbed` too.
        """
        async with self.undisturbed():
            self.fell_back(sequence, 0)
            yield

    @asynccontextmanager
    async def undisturbed(self) -> AsyncIterator[None]:
        """Nothing is on its way within it, and so whoever is may have devices pack parcels, which
        would take the place of others that have not been read yet."""
        async with self._carrying:
            yield

    # --- prepare -----------------------------------------------------------------------------

    async def _prepare(self, move: _Move) -> None:
        """Have everything at the destination, but for what is computed meanwhile, or nothing."""
        try:
            with _losses_refused():
                await self._fill(move)
        except BaseException:
            await self._abandon(move)
            raise

    async def _fill(self, move: _Move) -> None:
        await self._make_room(move)
        await self._bring(move, move.share if self._replies.running() else 1.0)
        while move.rounds < MAX_ROUNDS and self._lags(move):
            move.rounds += 1
            computed = self._computed()
            while pieces := move.marks.next(self._still(computed)):
                began_s = perf_counter()
                busy_s = await self._carry(move, pieces)
                await self._rest(busy_s / move.share - (perf_counter() - began_s))

    async def _make_room(self, move: _Move) -> None:
        device = self._device(move, move.to)
        if self._route.sites[move.to].has_memory:  # through the host's one by one
            coming = max(self._block_bytes[block] for block in move.all_blocks)
        else:
            coming = sum(self._block_bytes[block] for block in move.all_blocks)
            for sequence in self._replies.running():
                coming += move.marks.position_bytes * sequence.promised_tokens
        await self._route.divide({move.to: coming})
        await self._route.stream(move.to, move.target)
        refused: Refused | None = await device.ask(Prepare(move.all_blocks, move.epoch))
        if refused is not None:
            raise PlacementError(
                f"no room for {shown_blocks(move.all_blocks, False)} on {move.to}: "
                f"{format_size(refused.need_bytes)} are missing",
                f"move fewer blocks or {self._more_memory(move.to)}",
            )
        self._check(move)
        is_guest = move.to not in move.base.devices
        if is_guest:
            self._route.guests = (move.to,)
        for sequence in tuple(self._replies.running()):
            async with self._carrying:
                if sequence in self._replies.running():  # it may have ended, or been parked
                    await self._expect(move, sequence, is_guest=is_guest)

    def _more_memory(self, name: str) -> str:
        return more_memory(name) if self._route.sites[name].has_memory else "raise -maxmem"

    async def _expect(self, move: _Move, sequence: TokenStream, *, is_guest: bool) -> None:
        """A sequence's history will come; the destination may have some of it already."""
        device = self._device(move, move.to)
        if is_guest:
            opened = await device.ask(self._replies.opening(sequence))
            if isinstance(opened, Refused):
                raise PlacementError(
                    f"no room for the history of a reply on {move.to}: "
                    f"{format_size(opened.need_bytes)} are missing",
                    f"{self._more_memory(move.to)}, or move after it has ended",
                )
        missing = await device.ask(Missing(sequence.id))
        move.marks.begin(sequence.id, min(missing, sequence.num_computed))

    async def _bring(self, move: _Move, share: float) -> None:
        """Weights, from wherever it is cheaper; share: of the time that may be spent on them."""
        for name, blocks in move.blocks.items():
            for block in blocks:
                self._check(move)
                source, to = self._route.sites[name], self._route.sites[move.to]
                lent = await self._lend(source, to, block)
                try:
                    frame = None if lent is None else lent.frame
                    brought: Brought = await to.device.ask(Bring(block, frame, share))
                finally:
                    if lent is not None:
                        await source.pager.tell(Release(lent.lease))
                move.weight_bytes += brought.num_bytes
                move.origins[brought.origin] = move.origins.get(brought.origin, 0) + 1

    async def _lend(self, source: Site, to: Site, block: int) -> Lent | None:
        """The frame of a block, where the destination can read it."""
        if source.node != to.node or block == self._route.placement.num_blocks:
            return None
        lent: Lent | None = await source.pager.ask(Lend(block, to.device.name))
        return lent

    def _computed(self) -> dict[int, int]:
        return {sequence.id: sequence.num_computed for sequence in self._replies.running()}

    def _still(self, computed: Mapping[int, int]) -> dict[int, int]:
        """Without sequences that run no more: they ended, or are parked."""
        running = self._computed()
        return {sequence: num for sequence, num in computed.items() if sequence in running}

    def _lags(self, move: _Move) -> bool:
        """Whether more is missing than a few steps compute."""
        computed = self._computed()
        return move.marks.lag(computed) > CLOSE_STEPS * len(computed)

    async def _carry(self, move: _Move, pieces: Iterable[Range]) -> float:
        """Copy pieces of history; how long the devices were busy with it."""
        async with self._carrying:
            return await self._carry_pieces(move, pieces)

    async def _carry_pieces(self, move: _Move, pieces: Iterable[Range]) -> float:
        streams = {sequence.id: sequence for sequence in self._replies.running()}
        pieces = [piece for piece in pieces if piece.sequence in streams]
        named = tuple(
            Piece(p.sequence, p.start, tuple(streams[p.sequence].tokens[p.start : p.stop]))
            for p in pieces
        )
        busy_s = 0.0
        for name, blocks in move.blocks.items():
            self._check(move)
            source, to = self._route.sites[name], self._route.sites[move.to]
            held = tuple(block for block in blocks if block < move.base.num_blocks)
            inline = source.node != to.node
            move.num_parcels += 1
            pack = Pack(held, named, inline, move.epoch, move.num_parcels)
            parcel: Parcel = await source.device.ask(pack)
            unpacked: Unpacked = await to.device.ask(Unpack(parcel))
            move.bytes_before += parcel.num_bytes
            move.pages += unpacked.num_pages
            busy_s += parcel.seconds + unpacked.seconds
        for piece in pieces:
            move.marks.arrived(piece)
        return busy_s

    async def _rest(self, seconds: float) -> None:
        """Leave replies their share of the time."""
        if self._replies.running():
            await asyncio.sleep(max(seconds, 0.0))

    # --- hand over ---------------------------------------------------------------------------

    async def _hand_over(self, move: _Move, *, is_live: bool) -> Moved:
        """What is left of the history, then ownership."""
        route = self._route
        async with self._replies.between_steps() as since_s:
            try:
                with _losses_refused():
                    if not is_live:
                        await self._make_room(move)
                        await self._bring(move, 1.0)
                    self._check(move)
                    before = move.bytes_before
                    while pieces := move.marks.next(self._computed()):
                        await self._carry(move, pieces)
                    for name, blocks in move.blocks.items():
                        await self._device(move, name).ask(Hand(blocks, move.epoch))
                    await self._device(move, move.to).ask(Adopt(move.all_blocks, move.epoch))
            except BaseException:  # before the next step finds blocks that nobody owns
                await self._abandon(move)
                raise
            route.placement, route.guests = move.target, ()
            done_s = perf_counter()
        move.bytes_paused = move.bytes_before - before
        move.bytes_before = before
        await self._clear_away(move)
        self.num_moved += len(move.all_blocks)
        self.num_moves += 1
        self.last = self._report(move, since_s, done_s)
        self.totals = self.totals.plus(self.last)
        return self.last

    async def _clear_away(self, move: _Move) -> None:
        """The source gives back what it held; one that died has."""
        route = self._route
        for name in move.blocks:
            if name in route.sites:
                with suppress(Stopped):
                    await route.sites[name].device.tell(Drop(move.epoch))
            await route.leave(name)
        with suppress(Stopped):
            await route.divide()

    def _report(self, move: _Move, since_s: float, done_s: float) -> Moved:
        return Moved(
            blocks=shown_blocks(
                [b for b in move.all_blocks if b < move.base.num_blocks],
                move.base.num_blocks in move.all_blocks,
            ),
            to=move.to,
            placement=str(move.target),
            epoch=move.target.epoch,
            pause_s=done_s - since_s,
            prepare_s=max(since_s - move.began_s, 0.0),  # of one that is not live it is all pause
            bytes_before=move.bytes_before,
            bytes_paused=move.bytes_paused,
            weight_bytes=move.weight_bytes,
            weights_from=dict(move.origins),
            pages=move.pages,
            rounds=move.rounds,
            tokens_meanwhile=self._replies.num_sampled - move.num_sampled,
        )

    def _check(self, move: _Move) -> None:
        """Raise `PlacementError` when a loss has ended a move."""
        if self._route.placement.epoch != move.base.epoch:
            raise MoveLost("a device was lost meanwhile", "move again")

    def _device(self, move: _Move, name: str) -> Ref:
        """A device that a move is about."""
        self._check(move)
        return self._route.sites[name].device

    async def _abandon(self, move: _Move) -> None:
        """Nothing has happened."""
        route = self._route
        route.guests = ()
        if route.placement.epoch == move.base.epoch:
            # Late messages of this move must find that it is over.
            route.placement = replace(move.base, epoch=move.epoch)
        for name in (move.to, *move.blocks):  # in this order, or a block may have two owners
            if name in route.sites:
                with suppress(Stopped):  # its successor knows of no move
                    await route.sites[name].device.ask(Abandon(move.epoch))
                    await route.stream(name, route.placement)
        await route.leave(move.to)
        with suppress(Stopped):
            await route.divide()


@contextmanager
def _losses_refused() -> Iterator[None]:
    """Whoever is lost within it ends a move, and no more than that: nothing has moved."""
    try:
        yield
    except (Stopped, Stale) as error:  # stale: it began again, and knows of no move
        raise MoveLost(f"{error.problem}; no block has moved", "move again") from error


def _leaving(base: Placement, target: Placement) -> dict[str, tuple[int, ...]]:
    """What changes its device, by the one that it leaves; the head is the number after the last
    block."""
    leaving: dict[str, list[int]] = {}
    for block, (before, after) in enumerate(zip(base.blocks, target.blocks, strict=True)):
        if before != after:
            leaving.setdefault(before, []).append(block)
    if base.head != target.head:
        leaving.setdefault(base.head, []).append(base.num_blocks)
    return {name: tuple(blocks) for name, blocks in leaving.items()}
