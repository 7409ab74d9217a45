"""A device: KV pages, scratch and compiled programs of one model's blocks.

What computes is its runner (`jitllm.devices.runner`), a CPU or a GPU; how weights get there is its
supply's to say (`actors.supply`). Knows spans, pages, and which blocks are its own. Decides nothing
about who runs, and where blocks are.
"""

from __future__ import annotations

import asyncio
import mmap
from array import array
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from ctypes import c_char_p, c_void_p, cast, string_at
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TypeVar, assert_never

from actors.actor import Actor
from actors.decode import Decode, Seat, outcome_of, results
from actors.mailbox import Lost
from actors.messages import (
    Abandon,
    Adopt,
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
    Piece,
    Prepare,
    Recall,
    Refused,
    Reserved,
    Restore,
    Shrink,
    Slice,
    Step,
    StepDone,
    Steps,
    Stream,
    Unpack,
    Unpacked,
)
from actors.mixtures import Mixtures
from actors.overflow import Overflow
from actors.parts import Parts
from actors.supply import Supply
from jitllm.devices import memory
from jitllm.devices.runner import Runner, SeatMemory
from jitllm.engine import Logits
from jitllm.errors import JitllmError, OutOfPages, OverBudget, PlacementError
from jitllm.kernels.op import Buffer
from jitllm.kernels.sample import (
    RECORD_BYTES,
    Settings,
    pack_pairs,
)
from jitllm.memory import prefix
from jitllm.memory.history import History
from jitllm.memory.ownership import Ownership, Stale
from jitllm.memory.pages import KvPages
from jitllm.memory.use import Phase
from jitllm.schedule.placement import shown_blocks
from jitllm.schedule.sequence import MIN_PROMISED_TOKENS
from jitllm.schedule.step import Span, SpanOutputs, phase_of
from jitllm.units import format_size

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class _Flight:
    """Steps that the compute thread does one after the other while messages are handled.

    outcomes: where each of them is answered. decode: how one follows another. goes_on: another one
    may follow.
    """

    outcomes: Parts[Outcome]
    decode: Decode
    goes_on: bool = True
    landing: Future[None] | None = None


@dataclass(frozen=True, slots=True)
class _Settled:
    """What there is no memory for, now or once promises are kept."""

    missing_bytes: int
    over_budget_bytes: int


# Whose the memory of a step is (tokens, positions, sampling records, histories)
#   a flight    the compute thread's, from `_take_off` to its landing
#   no flight   the handler's: what touches pages, seats or the lease halts the flight before


class Device(Actor):
    """One device, with any of a model's blocks.

    hidden, logits: what goes in and out of the blocks. outbox: memory that others read what is
    handed to them from. compiled_kernels, compile_s: what making the program took. owned: what ends
    with the device. mixtures: what runs blocks whose experts come one by one.
    """

    def __init__(
        self,
        runner: Runner,
        pages: KvPages,
        history: History,
        supply: Supply,
        outbox: memory.Span,
        *,
        hidden: Buffer,
        logits: Buffer,
        context_tokens: int,
        compiled_kernels: int,
        compile_s: float,
        owned: ExitStack,
        mixtures: Mixtures | None = None,
    ) -> None:
        self._runner = runner
        self._mixtures = mixtures
        self._pages = pages
        self._history = history
        self._supply = supply
        self._outbox = outbox
        self._hidden = hidden
        self._logits = logits
        self._context_tokens = context_tokens
        self._compiled_kernels = compiled_kernels
        self._compile_s = compile_s
        self._owned = owned
        self._attachments = owned.enter_context(ExitStack())
        self._attached: dict[memory.Handle, int] = {}
        self._ownership = Ownership()
        self._streamed: frozenset[int] = frozenset()
        self._seats: dict[int, Seat] = {}
        self._compute = ThreadPoolExecutor(1, "jitllm compute")
        self._overflow = Overflow(pages, self._compute, self._halt, runner.is_lost)
        self._flight: _Flight | None = None
        self._is_short = False  # since the last step that took pages
        self._problem = ""
        self._num_tokens: Counter[Phase] = Counter()

    async def on_start(self) -> None:
        """Scratch is charged to the host's budget, in place of what a predecessor held."""
        num_bytes = self._runner.host_bytes + self._outbox.num_bytes
        await self._supply.begin(self.context.me, num_bytes)

    async def on_stop(self) -> None:
        """Give threads and memory back."""
        self._cut()
        await self._supply.close()
        self._compute.shutdown()
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
            raise self._break(error) from error

    def _break(self, error: Exception) -> Lost:
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
                self._cut()
            case Close():
                await self._close(message.sequence)
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
            prompt_tokens=self._num_tokens["prompt"],
            decode_tokens=self._num_tokens["decode"],
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
        await self._close(message.sequence)
        wanted = prefix.reusable(message.tokens, self._pages.page_tokens, message.namespace)
        wanted = wanted[: message.max_cached // self._pages.page_tokens]
        try:
            seat_memory, num_cached = self._take_seat(message, wanted)
        except OverBudget as error:
            if message.must_fit:
                what, num_tokens = "a seat", message.max_tokens
                need = error.needed_bytes
                raise self._refusal(message.sequence, num_tokens, what, need) from error
            return Refused(error.needed_bytes, error.budget_bytes)
        num_published = num_cached // self._pages.page_tokens
        seat = self._seats[message.sequence] = Seat(
            message.sampling,
            message.logprobs,
            message.top_logprobs,
            seat_memory,
            message.max_tokens,
            message.promised_tokens,
            bool(message.tokens),
            num_published,
            wanted[num_published - 1] if num_published else message.namespace,
            message.stop_ids,
            message.namespace,
        )
        seat.memory.write(0, array("i", message.tokens[:num_cached]))
        reserved = await self._charge()
        if reserved.over_budget_bytes and not message.must_fit:
            need = self._pages.set_bytes * self._pages.num_sets(message.promised_tokens)
            await self._close(message.sequence)
            return Refused(need, need - reserved.over_budget_bytes)
        return Opened(message.sequence, num_cached)

    def _take_seat(self, message: Open, wanted: tuple[bytes, ...]) -> tuple[SeatMemory, int]:
        """Memory for what kernels read of a sequence; what is only kept goes for it. And how many
        positions exist already."""
        while True:
            try:
                seat_memory = self._seat_memory(message)
                with ExitStack() as undone:
                    undone.callback(seat_memory.close)
                    num_cached = self._pages.open(message.sequence, message.max_tokens, wanted)
                    undone.pop_all()
                return seat_memory, num_cached
            except OverBudget:
                if not self._pages.idle_bytes:
                    raise
                self._pages.shrink(0)

    async def _close(self, sequence: int) -> None:
        """Free what a sequence holds; closing one twice does nothing."""
        await self._halt()
        if sequence in self._seats:
            self._unseat(sequence)
            await self._charge()

    def _unseat(self, sequence: int) -> None:
        self._seats.pop(sequence).memory.close()
        self._pages.close(sequence)

    def _seat_memory(self, message: Open) -> SeatMemory:
        sampling = message.sampling
        penalises = (
            sampling.repeat_penalty != 1
            or sampling.frequency_penalty != 0
            or sampling.presence_penalty != 0
        )
        biases = pack_pairs(sampling.logit_bias)
        return self._runner.seat(message.max_tokens, biases, reads_history=penalises)

    async def _charge(self) -> Reserved:
        """Tell the supply what KV takes, and give up what was only kept where there is no room.

        What sequences hold counts once, however many share it, and so does what they were promised
        and have not taken yet.
        """
        pages = self._pages
        promised = sum(
            max(pages.num_sets(seat.promised_tokens) - pages.num_taken(sequence), 0)
            for sequence, seat in self._seats.items()
        )
        reserved = await self._supply.charge(
            pages.promised_bytes(promised), pages.beyond_bytes(promised)
        )
        pages.shrink(reserved.spare_bytes)
        return reserved

    async def _grow(self, sequence: int, num_tokens: int) -> None:
        """Pages for a sequence's positions; the promise grows with a reply that outruns it."""
        seat, pages = self._seats[sequence], self._pages
        if num_tokens > seat.promised_tokens:
            seat.promised_tokens = min(num_tokens + MIN_PROMISED_TOKENS, seat.max_tokens)
            await self._charge()
        if not pages.grow(sequence, num_tokens):
            num_bytes = (pages.num_sets(num_tokens) - pages.num_taken(sequence)) * pages.set_bytes
            raise self._refusal(sequence, num_tokens, "KV", num_bytes)

    def _refusal(self, sequence: int, num_tokens: int, what: str, needed_bytes: int) -> OutOfPages:
        """That a sequence cannot have something here that so many positions need."""
        memory, supply = self._supply.memory(), self._supply
        free_bytes = self._pages.num_free * self._pages.set_bytes
        return OutOfPages(
            self._name,
            sequence,
            num_tokens,
            f"{what} of {num_tokens} positions on {supply.place_name}",
            needed_bytes,
            free_bytes if memory is None else memory.budget_bytes - memory.used_bytes,
            supply.remedy,
        )

    def _lacks_pages(self) -> bool:
        """Whether there is no memory for one more page of every sequence that may need it."""
        pages, room_bytes = self._pages, self._supply.room_bytes()
        if room_bytes is None:
            return False
        num_sets = sum(
            pages.num_taken(sequence) < pages.num_sets(seat.max_tokens)
            for sequence, seat in self._seats.items()
        )
        need = pages.promised_bytes(num_sets) - pages.promised_bytes(0)  # none beyond a budget
        return need > room_bytes + pages.idle_bytes

    def _publish(self, sequence: int, num_tokens: int) -> None:
        """Pages that so many positions fill may be shared: nobody writes to a full page again."""
        seat, size = self._seats[sequence], self._pages.page_tokens
        while seat.shares and (stop := (seat.num_published + 1) * size) <= num_tokens:
            seat.digest = prefix.extend(seat.digest, seat.memory.history[stop - size : stop])
            self._pages.publish(sequence, seat.num_published, seat.digest)
            seat.num_published += 1

    # --- steps -------------------------------------------------------------------------------

    async def _step(self, message: Step) -> StepDone:
        await self._begin(message)
        await self._run(message)
        for span in message.spans:
            self._publish(span.sequence, span.stop)
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

    async def _begin(self, message: Step) -> None:
        """Have pages for a leg, and everything written down that its kernels read."""
        await self._halt()
        self._check(message)
        for span in message.spans:
            await self._grow(span.sequence, span.stop)
        await self._overflow.fit([(span.sequence, span.start, span.stop) for span in message.spans])
        self._is_short = self._lacks_pages()
        self._describe(message.spans)
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
        with self._readable(hidden) as address:
            self._runner.take_hidden(address, num_bytes)

    def _hand_hidden(self, message: Step) -> Carried:
        """What the next leg begins with."""
        num_bytes = self._hidden.stride_bytes * sum(len(span.tokens) for span in message.spans)
        self._runner.hand_hidden(self._outbox.address, num_bytes)
        return self._carried(0, num_bytes, inline=message.inline)

    def _last_hidden(self, message: Step) -> tuple[tuple[int, bytes], ...]:
        """Copies of the hidden states that are asked for; the head leaves them as they are."""
        self._hand_hidden(message)
        rows, size, token = [], self._hidden.stride_bytes, 0
        for span in message.spans:
            token += len(span.tokens)
            if span.sequence in message.last_hidden:
                row = string_at(self._outbox.address + (token - 1) * size, size)
                rows.append((span.sequence, row))
        return tuple(rows)

    def _carried(self, offset: int, num_bytes: int, *, inline: bool) -> Carried:
        """Bytes of the outbox, for whoever asked."""
        if inline:
            return string_at(self._outbox.address + offset, num_bytes)
        return Slice(self._outbox.handle(), offset, num_bytes)

    @contextmanager
    def _readable(self, data: Carried) -> Iterator[int]:
        """Where it can be read within the block. Raises `Lost` at its end for what had gone."""
        if isinstance(data, bytes):
            yield cast(c_char_p(data), c_void_p).value or 0
            return
        yield self._address(data)
        if not memory.holds(data.handle):
            raise Lost(self._name, "what it was handed had gone before it could read it")

    def _address(self, piece: Slice) -> int:
        """Where bytes of another device can be read here."""
        if piece.handle not in self._attached:
            try:
                attached = self._attachments.enter_context(memory.attach(piece.handle))
            except JitllmError as error:  # who handed it on has died since
                raise Lost(self._name, f"it could not read what it was handed: {error}") from error
            self._attached[piece.handle] = attached
        return self._attached[piece.handle] + piece.offset

    def _describe(self, spans: tuple[Span, ...]) -> None:
        """Write the step down for kernels: per token, per row, per output."""
        step = self._runner.step
        token = output = 0
        for row, span in enumerate(spans):
            count, stop = len(span.tokens), token + len(span.tokens)
            ids = array("i", span.tokens)
            step.tokens[token:stop] = ids
            step.positions[token:stop] = array("i", range(span.start, span.stop))
            step.row_of[token:stop] = array("i", [row]) * count
            step.tables[row] = self._pages.table_address(span.sequence)
            seat = self._seats[span.sequence]
            seat.memory.write(span.start, ids)
            first = token if span.outputs is SpanOutputs.ALL else stop - 1
            num = span.num_outputs
            step.outputs[output : output + num] = array("i", range(first, first + num))
            self._describe_sampling(span, seat, output)
            token, output = stop, output + num
        step.set_counts(token, output)

    def _describe_sampling(self, span: Span, seat: Seat, output: int) -> None:
        sampling = seat.sampling
        targets = [*span.tokens[1:], span.target][-span.num_outputs :]
        for index, target in enumerate(targets if span.num_outputs else ()):
            position = span.stop - span.num_outputs + index
            settings = Settings(
                seed=sampling.seed,
                position=position + 1,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                repeat_penalty=sampling.repeat_penalty,
                frequency_penalty=sampling.frequency_penalty,
                presence_penalty=sampling.presence_penalty,
                target=target,
                want_logprob=seat.logprobs,
            )
            record = settings.pack(
                *seat.history(position),
                bias=seat.memory.biases,
                num_bias=len(sampling.logit_bias),
                top=self._runner.top_at(output + index),
                num_top=seat.num_top(span),
            )
            start = RECORD_BYTES * (output + index)
            self._runner.records[start : start + RECORD_BYTES] = record

    async def _run(self, message: Step) -> None:
        """The blocks of a leg in order, as long a run at a time as is resident."""
        start, is_first = message.start, True
        phase = phase_of(message.spans)
        self._num_tokens[phase] += _num_tokens(message.spans)
        rows = [(span.sequence, span.start) for span in message.spans]
        while is_first or start < message.stop:
            is_any = start < message.stop
            lease = await self._supply.acquire(start, message.stop, phase) if is_any else None
            stop = start if lease is None else min(lease.stop, message.stop)
            try:
                await self._run_blocks(
                    rows,
                    start,
                    stop,
                    embeds=is_first and message.hidden is None,
                    begins=is_first,
                    ends=message.has_head and stop == message.stop,
                )
            finally:
                if lease is not None:
                    await self._supply.release(lease)
            start, is_first = stop, False

    async def _run_blocks(
        self, rows: Sequence[tuple[int, int]], start: int, stop: int, **parts: bool
    ) -> None:
        """Blocks [start, stop) of a step that was described; see `Runner.run`.

        rows: sequences, and the first position of each that is computed.
        """
        if self._mixtures is not None:
            passes_of = partial(self._overflow.passes, rows)
            await self._mixtures.run(self._compute, start, stop, passes_of, **parts)
            return
        work = partial(self._run_together, rows, start, stop, **parts)
        await asyncio.get_running_loop().run_in_executor(self._compute, work)

    def _run_together(
        self, rows: Iterable[tuple[int, int]], start: int, stop: int, **parts: bool
    ) -> None:
        """The same in the compute thread, where all that the blocks need is there."""
        with closing(self._overflow.passes(rows, range(start, stop))) as passes:
            self._runner.run(start, stop, passes=passes, **parts)

    @property
    def _is_alone(self) -> bool:
        """Whether the whole model is here, and may stay for any number of steps."""
        return self._supply.has_all(self._head) and self._head in self._ownership.owned

    # --- steps without a message for each ----------------------------------------------------

    async def _steps(self, message: Steps) -> Parts[Outcome]:
        """As many as can be without anything between them; one at the least."""
        outcomes: Parts[Outcome] = Parts(self._cut)
        if self._is_alone:
            await self._begin(message.first)
            self._take_off(message.first.spans, outcomes)
        else:  # the first step brings the lease with which the next ones fly
            await self._step(message.first)
            outcomes.put(self._outcome(message.first.spans))
            outcomes.end()
        return outcomes

    def _outcome(self, spans: tuple[Span, ...]) -> Outcome:
        seats = [self._seats[span.sequence] for span in spans]
        return outcome_of(self._runner, spans, seats, is_short=self._is_short)

    def _take_off(self, spans: tuple[Span, ...], outcomes: Parts[Outcome]) -> None:
        """Begin a flight with a step that was described, under the standing lease."""
        seats = [self._seats[span.sequence] for span in spans]
        num_left = min(map(self._num_left, spans))
        decode = Decode(
            self._runner, spans, seats, num_left, self._describe, is_short=self._is_short
        )
        flight = self._flight = _Flight(outcomes, decode)
        flight.landing = self._compute.submit(self._fly, flight, spans, asyncio.get_running_loop())

    def _num_left(self, span: Span) -> int:
        """Steps that may follow one by themselves: until its sequence is full, or needs a page."""
        if not span.sample:
            return 0
        seat = self._seats[span.sequence]
        room = self._pages.num_taken(span.sequence) * self._pages.page_tokens
        return max(min(seat.max_tokens - 1, room) - span.stop, 0)

    def _fly(
        self, flight: _Flight, spans: tuple[Span, ...], loop: asyncio.AbstractEventLoop
    ) -> None:
        """In the compute thread: step after step, until there is a reason to ask."""
        try:
            phase, num_tokens = phase_of(spans), _num_tokens(spans)
            goes_on = True
            while goes_on:
                rows = flight.decode.rows
                self._run_together(rows, 0, self._head, embeds=True, begins=True, ends=True)
                self._num_tokens[phase] += num_tokens
                phase, num_tokens = "decode", len(spans)
                outcome = flight.decode.outcome()
                goes_on = flight.goes_on and flight.decode.advance(outcome)
                flight.outcomes.send(outcome, loop)
            loop.call_soon_threadsafe(self._land, flight)
        except Exception as error:
            loop.call_soon_threadsafe(self._crash, flight, error)

    def _land(self, flight: _Flight) -> None:
        """The last step of a flight is done."""
        for sequence, num_tokens in flight.decode.computed.items():
            self._publish(sequence, num_tokens)
        self._flight = None
        flight.outcomes.end()

    def _crash(self, flight: _Flight, error: Exception) -> None:
        """A step of a flight failed, and so none follows."""
        self._flight = None
        flight.outcomes.fail(self._break(error) if self._runner.is_lost(error) else error)

    def _cut(self) -> None:
        """No step after this one without being asked."""
        if self._flight is not None:
            self._flight.goes_on = False

    async def _halt(self) -> None:
        """Wait until the compute thread rests."""
        self._cut()
        if self._flight is not None and self._flight.landing is not None:
            await asyncio.wrap_future(self._flight.landing)
            self._flight = None

    # --- blocks that come and go -------------------------------------------------------------

    async def _own(self, message: Own) -> None:
        if self._ownership.settle(message.blocks, message.epoch):
            await self._halt()
            await self._supply.let_go()
            for sequence in tuple(self._seats):
                self._unseat(sequence)
            self._attachments.close()
            self._attached.clear()
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
        for seat in self._seats.values():  # what others may share is whole again
            seat.num_published, seat.digest = 0, seat.namespace

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
        lacking = pages.num_sets_held * pages.column_bytes(held - pages.columns)
        missing = 0 if pages.hold(held) else lacking
        pages.adopt(held & ownership.owned)
        lacking = await self._supply.place(ownership.held, ownership.wanted)
        if lacking and pages.idle_bytes:
            pages.shrink(0)
            lacking = await self._supply.place(ownership.held, ownership.wanted)
        missing += lacking
        reserved = await self._charge()
        return _Settled(missing, 0 if missing else reserved.over_budget_bytes)

    # --- history that comes and goes ---------------------------------------------------------

    async def _pack(self, message: Pack) -> Parcel:
        if not self._ownership.owned.issuperset(message.blocks):
            raise Stale("pack the history of", message.blocks, message.epoch)
        began_s = perf_counter()
        pieces = tuple(piece for piece in message.pieces if piece.sequence in self._seats)
        num_bytes = self._num_bytes(message.blocks, pieces)
        if num_bytes:
            tables = partial(self._copies, message.blocks, pieces, out=True)
            start = self._outbox.address + self._hidden_bytes
            async with self._overflow.at_hand(message.blocks, pieces, is_written=False):
                await self._runner.pack(tables, num_bytes, start)
        data = self._carried(self._hidden_bytes, num_bytes, inline=message.inline)
        seconds = perf_counter() - began_s
        return Parcel(message.blocks, pieces, data, seconds, message.epoch, message.number)

    def _num_bytes(self, blocks: tuple[int, ...], pieces: Iterable[Piece]) -> int:
        return sum(self._history.num_bytes(blocks, len(piece.tokens)) for piece in pieces)

    def _copies(
        self,
        blocks: tuple[int, ...],
        pieces: Iterable[Piece],
        address: int,
        *,
        out: bool,
        first: int = 0,
        last: int = 1 << 62,
    ) -> array[int]:
        """The copies between pieces at an address, one after the other, and pages; of sequences
        that have ended there are none. See `History.copies`."""
        table = array("Q")
        for piece in pieces:
            if piece.sequence in self._seats:
                table += self._history.copies(
                    self._pages,
                    piece.sequence,
                    blocks,
                    piece.start,
                    piece.stop,
                    address,
                    out=out,
                    first=first,
                    last=last,
                )
            address += self._num_bytes(blocks, (piece,))
        return table

    async def _unpack(self, parcel: Parcel) -> Unpacked:
        if not self._ownership.take(parcel.blocks, parcel.epoch, parcel.number):
            return Unpacked(0, 0.0)
        unpacked = await self._take_in(parcel)
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
        unpacked = await self._take_in(parcel, message.start, message.stop)
        for piece in parcel.pieces:
            self._publish(piece.sequence, message.whole)
        return unpacked

    async def _take_in(self, parcel: Parcel, first: int = 0, last: int = 1 << 62) -> Unpacked:
        """Copy what is in a parcel of positions [first, last) into the pages of its sequences."""
        began_s = perf_counter()
        num_pages = 0
        # Some may have ended while this was on its way.
        pieces = [piece for piece in parcel.pieces if piece.sequence in self._seats]
        taken = [replace(piece, tokens=piece.tokens[: last - piece.start]) for piece in pieces]
        for piece in taken:
            seat = self._seats[piece.sequence]
            await self._grow(piece.sequence, piece.stop)
            start = max(piece.start, first)
            seat.memory.write(start, array("i", piece.tokens[start - piece.start :]))
            size = self._pages.page_tokens
            num_pages += len(parcel.blocks) * (-(-piece.stop // size) - start // size)
        blocks, whole = parcel.blocks, parcel.pieces
        tables = partial(self._copies, blocks, whole, out=False, first=first, last=last)
        await self._overflow.fit_around(taken)
        if num_pages:
            at_hand = self._overflow.at_hand(blocks, taken, is_written=True, first=first)
            with self._readable(parcel.data) as address:
                async with at_hand:
                    await self._runner.unpack(tables, parcel.num_bytes, address)
        return Unpacked(num_pages, perf_counter() - began_s)

    @property
    def _hidden_bytes(self) -> int:
        """The part of the outbox that hidden states leave through; parcels do behind it."""
        return self._hidden.stride_bytes * self._runner.limits.tokens

    # --- logits ------------------------------------------------------------------------------

    def _rows(self, row: int, count: int) -> Logits:
        """A copy of logits rows that the receiver owns."""
        width = 4 * self._logits.width
        rows = mmap.mmap(-1, count * width)
        self._runner.read_logits(row, memoryview(rows))
        return Logits(rows, count, self._logits.width)


def _num_tokens(spans: Iterable[Span]) -> int:
    return sum(len(span.tokens) for span in spans)
