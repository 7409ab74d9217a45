"""A device: KV pages, scratch and compiled programs of one model's blocks.

What computes is its runner (`jitllm.devices.runner`), a CPU or a GPU; how weights get there is its
supply's to say (`actors.supply`). Here is what its messages come to: who has a seat
(`actors.seats`), what its thread computes (`actors.compute`), which history leaves and comes
(`actors.parcels`). Knows which blocks are its own. Decides nothing about who runs, and where blocks
are.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable
from contextlib import ExitStack
from ctypes import string_at
from dataclasses import dataclass
from typing import TypeVar, assert_never

from actors.actor import Actor
from actors.compute import Compute
from actors.decode import Decode, outcome_of, results
from actors.describe import describe
from actors.hosted import ExpertHost
from actors.mailbox import Lost
from actors.messages.device import (
    Abandon,
    Adopt,
    AskExperts,
    Bring,
    Brought,
    Carried,
    Close,
    Command,
    Cut,
    DeviceMessage,
    DeviceStats,
    DeviceStatsRequest,
    Drop,
    Hand,
    Missing,
    Open,
    Opened,
    Outcome,
    Own,
    Pack,
    Parcel,
    Prepare,
    Recall,
    Refused,
    Restore,
    Shrink,
    Step,
    StepDone,
    Steps,
    Stream,
    Unpack,
    Unpacked,
)
from actors.messages.pager import Lease
from actors.mixtures import Mixtures
from actors.outbox import Outbox
from actors.parcels import Parcels
from actors.parts import Parts
from actors.seats import Seats
from actors.supply import Supply
from jitllm.devices.runner import Runner
from jitllm.engine import Logits
from jitllm.errors import JitllmError, PlacementError
from jitllm.kernels.op import Buffer
from jitllm.memory.history import History
from jitllm.memory.ownership import Ownership, Stale
from jitllm.memory.pages import KvPages
from jitllm.schedule.placement import shown_blocks
from jitllm.schedule.step import Span, phase_of
from jitllm.units import format_size

R = TypeVar("R")

CLEAR_BYTES = 1 << 20
"""Most of what was handed over that is given back before others have their turn: it takes a
fraction of a millisecond."""


@dataclass(frozen=True, slots=True)
class _Settled:
    """What there is no memory for, now or once promises are kept."""

    missing_bytes: int
    over_budget_bytes: int


class Device(Actor):
    """One device, with any of a model's blocks.

    hidden, logits: what goes in and out of the blocks. outbox: memory that others read what is
    handed to them from. compiled_kernels, compile_s: what making the program took. owned: what ends
    with the device. mixtures: what runs blocks whose experts are asked in the middle. expert_host:
    what computes experts of blocks that other devices have.
    """

    def __init__(
        self,
        runner: Runner,
        pages: KvPages,
        history: History,
        supply: Supply,
        outbox: Outbox,
        *,
        hidden: Buffer,
        logits: Buffer,
        context_tokens: int,
        compiled_kernels: int,
        compile_s: float,
        owned: ExitStack,
        mixtures: Mixtures | None = None,
        expert_host: ExpertHost | None = None,
    ) -> None:
        self._runner = runner
        self._pages = pages
        self._supply = supply
        self._hidden = hidden
        self._logits = logits
        self._context_tokens = context_tokens
        self._compiled_kernels = compiled_kernels
        self._compile_s = compile_s
        self._owned = owned
        self._ownership = Ownership()
        self._streamed: frozenset[int] = frozenset()
        self._is_clearing = False
        self._is_short = False  # since the last step that took pages
        self._problem = ""
        self._seats = Seats(runner, pages, supply, lambda: self._name)
        self._compute = Compute(
            runner, pages, self._seats, supply, mixtures, expert_host, self._failure
        )
        self._overflow = self._compute.overflow
        self._outbox = outbox
        owned.callback(outbox.detach)
        self._parcels = Parcels(runner, pages, self._seats, history, self._overflow, self._outbox)

    async def on_start(self) -> None:
        """Scratch is charged to the host's budget, in place of what a predecessor held."""
        self._outbox.name = self._name
        num_bytes = self._runner.host_bytes + self._outbox.num_bytes
        await self._supply.begin(self.context.me, num_bytes)

    async def on_stop(self) -> None:
        """Give threads and memory back."""
        self._compute.cut()
        await self._supply.close()
        self._compute.close()
        self._runner.close()
        self._owned.close()

    async def receive(self, message: DeviceMessage) -> object:
        """Handle one message."""
        return await self._guarded(self._receive(message))

    async def _guarded(self, work: Awaitable[R]) -> R:
        """Do it; hardware that is gone takes everything here with it, and stays so."""
        try:
            return await work
        except JitllmError as error:
            if not self._runner.is_lost(error):
                raise
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> Exception:
        """What an error comes to: the loss of everything here, if hardware is gone."""
        if not self._runner.is_lost(error):
            return error
        self._problem = str(error)
        return Lost(self._name, self._problem)

    async def _receive(self, message: DeviceMessage) -> object:
        if self._problem:
            raise Lost(self._name, self._problem)
        match message:
            case Step():
                return await self._step(message)
            case Steps():
                return await self._steps(message)
            case Open():
                return await self._open(message)
            case Stream():
                return await self._stream(message)
            case Prepare():
                return await self._prepare(message)
            case Bring():
                work = self._guarded(self._bring(message))
                return self.context.later(work, f"bring {message.block}")
            case AskExperts():
                return await self._compute.answer(message)
            case Missing():
                is_here = message.sequence in self._seats
                return self._pages.missing(message.sequence) if is_here else 0
            case Pack():
                return await self._pack(message)
            case Unpack():
                return await self._unpack(message.parcel)
            case Restore():
                return await self._restore(message)
            case DeviceStatsRequest():
                return self._statistics()
            case _:
                await self._obey(message)
                return None

    async def _obey(self, message: Command) -> None:
        """Handle a message that is answered when it is done."""
        match message:
            case Cut():
                self._compute.cut()
            case Close():
                await self._halt()
                await self._seats.close(message.sequences)
            case Recall():
                await self._halt()
                await self._supply.let_go()
            case Shrink():
                await self._halt()
                self._pages.shrink(message.max_bytes)
            case Own():
                await self._own(message)
            case Hand():
                await self._hand(message)
            case Adopt():
                await self._adopt(message)
            case Drop():
                await self._forget(self._ownership.drop(message.epoch))
            case Abandon():
                await self._forget(self._ownership.abandon(message.epoch))
            case _:
                assert_never(message)

    def _statistics(self) -> DeviceStats:
        return DeviceStats(
            kv_bytes=self._pages.held_bytes,
            kv_pages=self._pages.num_held,
            kv_idle_bytes=self._pages.idle_bytes,
            page_tokens=self._pages.page_tokens,
            scratch_bytes=self._runner.scratch_bytes,
            threads=self._runner.threads,
            tier=self._runner.kind,
            context_tokens=self._context_tokens,
            compiled_kernels=self._compiled_kernels,
            compile_s=self._compile_s,
            memory=self._supply.memory(),
            kv_spill=self._overflow.totals,
            prompt_tokens=self._compute.num_tokens["prompt"],
            decode_tokens=self._compute.num_tokens["decode"],
        )

    @property
    def _name(self) -> str:
        """Under which the pager knows what is held here."""
        return self.context.me.name

    # --- sequences ---------------------------------------------------------------------------

    async def _open(self, message: Open) -> Opened | Refused:
        """Promise a sequence its KV room; one that is there already begins again.

        Raises `Lost` where no block is: only a predecessor could have any.
        """
        if not self._ownership.held:
            raise Lost(self._name, "it began again, and knows nothing of before")
        await self._halt()
        return await self._seats.open(message)

    # --- steps -------------------------------------------------------------------------------

    async def _step(self, message: Step) -> StepDone:
        await self._begin(message)
        await self._run(message)
        if not message.has_head:
            hidden = self._hand_hidden(message)
            return StepDone(message.step_id, (), (), hidden, is_short=self._is_short)
        found, logits = results(message.spans, self._outcome(message.spans)), []
        row = 0
        for span in message.spans:
            if span.sequence in message.logits and span.num_outputs:
                logits.append((span.sequence, self._rows(row, span.num_outputs)))
            row += span.num_outputs
        last_hidden = self._last_hidden(message) if message.last_hidden else ()
        return StepDone(
            message.step_id,
            found,
            tuple(logits),
            last_hidden=last_hidden,
            is_short=self._is_short,
        )

    async def _run(self, message: Step, lease: Lease | None = None) -> None:
        await self._compute.run(message, lease)
        for span in message.spans:
            self._seats.publish(span.sequence, span.stop)

    async def _begin(self, message: Step) -> None:
        """Have pages for a leg, and everything written down that its kernels read."""
        await self._halt()
        self._check(message)
        for span in message.spans:
            await self._seats.grow(span.sequence, span.stop)
        await self._overflow.fit([(span.sequence, span.start, span.stop) for span in message.spans])
        self._is_short = self._seats.lacks_pages()
        self._describe(message.spans, message.logits)
        if message.hidden is not None:
            self._take_hidden(message.hidden)

    def _check(self, message: Step) -> None:
        """Raise `Lost` for what only a predecessor could do."""
        blocks = range(message.start, message.stop)
        is_mine = self._ownership.owned.issuperset(blocks)
        if message.has_head:
            is_mine = is_mine and self._head in self._ownership.owned
        if not is_mine or any(span.sequence not in self._seats for span in message.spans):
            raise Lost(self._name, "it began again, and knows nothing of before")

    @property
    def _head(self) -> int:
        """The number that stands for the output head."""
        return self._runner.num_blocks

    def _take_hidden(self, hidden: Carried) -> None:
        """Begin with what the leg before ended with."""
        num_bytes = len(hidden) if isinstance(hidden, bytes) else hidden.num_bytes
        with self._outbox.readable(hidden) as address:
            self._runner.take(self._hidden, address, num_bytes // self._hidden.stride_bytes)

    def _hand_hidden(self, message: Step) -> Carried:
        """What the next leg begins with."""
        num_tokens = sum(len(span.tokens) for span in message.spans)
        self._runner.hand(self._hidden, self._outbox.step_address, num_tokens)
        num_bytes = self._hidden.stride_bytes * num_tokens
        return self._outbox.of_step(num_bytes, inline=message.inline)

    def _last_hidden(self, message: Step) -> tuple[tuple[int, bytes], ...]:
        """Copies of the hidden states that are asked for; the head leaves them as they are."""
        self._hand_hidden(message)
        rows, size, token = [], self._hidden.stride_bytes, 0
        for span in message.spans:
            token += len(span.tokens)
            if span.sequence in message.last_hidden:
                row = string_at(self._outbox.step_address + (token - 1) * size, size)
                rows.append((span.sequence, row))
        return tuple(rows)

    def _describe(self, spans: tuple[Span, ...], wants_logits: tuple[int, ...] = ()) -> None:
        describe(spans, self._runner, self._pages, self._seats, wants_logits)

    @property
    def _is_alone(self) -> bool:
        """Whether the whole model is here, may stay for any number of steps, and asks nobody."""
        has_all = self._supply.has_all(self._head) and self._head in self._ownership.owned
        return has_all and not self._compute.asks_experts

    # --- steps without a message for each ----------------------------------------------------

    async def _steps(self, message: Steps) -> Parts[Outcome]:
        """As many as can be without anything between them; one at the least."""
        outcomes: Parts[Outcome] = Parts(self._compute.cut)
        first = message.first
        await self._begin(first)
        lease = await self._supply.acquire(first.start, first.stop, phase_of(first.spans))
        if self._is_alone:  # the lease stays
            self._take_off(first.spans, outcomes)
        else:
            await self._run(first, lease)
            outcomes.put(self._outcome(first.spans))
            outcomes.end()
        return outcomes

    def _outcome(self, spans: tuple[Span, ...]) -> Outcome:
        seats = [self._seats[span.sequence] for span in spans]
        return outcome_of(self._runner, spans, seats, is_short=self._is_short)

    def _take_off(self, spans: tuple[Span, ...], outcomes: Parts[Outcome]) -> None:
        seats = [self._seats[span.sequence] for span in spans]
        num_left = min(map(self._seats.num_left, spans))
        decode = Decode(
            self._runner, spans, seats, num_left, self._describe, is_short=self._is_short
        )
        self._compute.take_off(decode, spans, outcomes)

    async def _halt(self) -> None:
        await self._compute.halt()

    # --- blocks that come and go -------------------------------------------------------------

    async def _own(self, message: Own) -> None:
        if self._ownership.settle(message.blocks, message.epoch):
            await self._halt()
            await self._supply.let_go()
            self._seats.clear()
            self._outbox.detach()
            if missing := (await self._settle()).missing_bytes:
                blocks = [block for block in message.blocks if block != self._head]
                shown = shown_blocks(blocks, self._head in message.blocks)
                raise PlacementError(
                    f"no room for {shown} on {self._supply.place_name}: "
                    f"{format_size(missing)} are missing",
                    f"place fewer blocks there or {self._supply.remedy}",
                )
            await self._supply.complete(message.blocks)

    async def _stream(self, message: Stream) -> Refused | None:
        before = self._streamed
        if missing := await self._stream_only(frozenset(message.blocks)):
            await self._stream_only(before)
            return Refused(missing, 0)
        return None

    async def _stream_only(self, blocks: frozenset[int]) -> int:
        """Have these blocks pass through, and no others; how many bytes that lacks."""
        self._streamed = blocks
        if not self._supply.stream(blocks) or not self._ownership.held:
            return 0
        await self._halt()
        await self._supply.let_go()
        if missing := (await self._settle()).missing_bytes:
            return missing
        await self._supply.complete(self._ownership.owned)
        return 0

    async def _prepare(self, message: Prepare) -> Refused | None:
        over = self._ownership.expect(message.blocks, message.epoch)
        await self._halt()
        await self._supply.let_go()
        self._pages.drop(over - {self._head})
        settled = await self._settle()
        if need := settled.missing_bytes + settled.over_budget_bytes:
            await self._forget(self._ownership.abandon(message.epoch))
            return Refused(need, 0)
        return None

    async def _bring(self, message: Bring) -> Brought:
        return await self._supply.bring(message.block, message.source, message.share)

    async def _hand(self, message: Hand) -> None:
        await self._halt()
        await self._supply.let_go()
        self._ownership.hand(message.blocks, message.epoch)

    async def _adopt(self, message: Adopt) -> None:
        if not self._ownership.adopt(message.blocks, message.epoch):
            return
        await self._supply.complete(message.blocks)
        self._pages.adopt(block for block in message.blocks if block != self._head)
        self._seats.share_anew()

    async def _forget(self, gone: frozenset[int]) -> None:
        """Give back what is here of some blocks."""
        if gone:
            await self._halt()
            await self._supply.let_go()
            await self._settle()

    async def _settle(self) -> _Settled:
        """Have memory for the blocks that are held, and for no others; what there is not."""
        pages, ownership = self._pages, self._ownership
        held = ownership.held - {self._head}
        pages.drop(pages.columns - held)
        self._clear_away()
        lacking = pages.num_sets_held * pages.column_bytes(held - pages.columns)
        missing = 0 if pages.hold(held) else lacking
        pages.adopt(held & ownership.owned)
        lacking = await self._supply.place(ownership.held, ownership.wanted)
        if lacking and pages.idle_bytes:
            pages.shrink(0)
            lacking = await self._supply.place(ownership.held, ownership.wanted)
        missing += lacking
        reserved = await self._seats.charge()
        return _Settled(missing, 0 if missing else reserved.over_budget_bytes)

    def _clear_away(self) -> None:
        """Give back the pages that were dropped, at once only where others need their room."""
        if self._supply.room_bytes() is not None:
            self._pages.clear()
        elif not self._is_clearing and self._pages.clear(CLEAR_BYTES):
            self._is_clearing = True
            self.context.begin(self._clear_slowly(), "clear away")

    async def _clear_slowly(self) -> None:
        """Messages are answered in between."""
        is_more = True
        try:
            while is_more:
                await asyncio.sleep(0)
                is_more = self._pages.clear(CLEAR_BYTES)
        finally:
            self._is_clearing = False

    # --- history that comes and goes ---------------------------------------------------------

    async def _pack(self, message: Pack) -> Parcel:
        if not self._ownership.owned.issuperset(message.blocks):
            raise Stale("pack the history of", message.blocks, message.epoch)
        return await self._parcels.pack(message)

    async def _unpack(self, parcel: Parcel) -> Unpacked:
        if not self._ownership.take(parcel.blocks, parcel.epoch, parcel.number):
            return Unpacked(0, 0.0)
        unpacked = await self._parcels.take_in(parcel)
        for piece in parcel.pieces:
            if piece.sequence in self._seats:
                self._pages.fill(piece.sequence, piece.stop)
        return unpacked

    async def _restore(self, message: Restore) -> Unpacked:
        parcel = message.parcel
        is_mine = self._ownership.owned.issuperset(parcel.blocks)
        if not is_mine or any(piece.sequence not in self._seats for piece in parcel.pieces):
            raise Lost(self._name, "it began again, and knows nothing of before")
        await self._halt()
        unpacked = await self._parcels.take_in(parcel, message.start, message.stop)
        for piece in parcel.pieces:
            self._seats.publish(piece.sequence, message.whole)
        return unpacked

    # --- logits ------------------------------------------------------------------------------

    def _rows(self, row: int, count: int) -> Logits:
        """A copy of logits rows that the receiver owns."""
        width = 4 * self._logits.width
        rows = mmap.mmap(-1, count * width)
        self._runner.read_logits(row, memoryview(rows))
        return Logits(rows, count, self._logits.width)
