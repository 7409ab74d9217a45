"""A CPU device: KV pages, scratch and compiled programs of one model's blocks.

Computes straight from the pager's frames: a lease pins the blocks of a run while they compute.
Knows spans, pages and launches. Decides nothing about who runs.
"""

from __future__ import annotations

import asyncio
import mmap
from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from actors.actor import Actor, Ref
from actors.mailbox import Lost
from actors.messages import (
    Acquire,
    Close,
    Cut,
    DeviceMessage,
    DeviceStats,
    DeviceStatsRequest,
    Forget,
    Lease,
    Open,
    Opened,
    Recall,
    Refused,
    Release,
    Reserve,
    Reserved,
    Shrink,
    Step,
    StepDone,
)
from jitllm.devices.host import HostProgram
from jitllm.engine import MAX_TOP_LOGPROBS, Logits, Sampling, TopLogprobs
from jitllm.errors import OverBudget
from jitllm.kernels.op import Buffer, Ctx
from jitllm.kernels.sample import (
    PAIR_BYTES,
    RECORD_BYTES,
    Sampled,
    Settings,
    pack_pairs,
    unpack_top,
)
from jitllm.memory import prefix
from jitllm.memory.pages import KvPages
from jitllm.schedule.sequence import MIN_PROMISED_TOKENS
from jitllm.schedule.step import Span, SpanOutputs, SpanResult

_TOP_BYTES = PAIR_BYTES * MAX_TOP_LOGPROBS
"""Room for the likeliest tokens of one output."""


@dataclass(slots=True)
class _Seat:
    """What the device keeps of a sequence: its history for penalties, and the room promised.

    biases: the pairs of `sampling.logit_bias` as the kernel reads them. num_published: page sets
    that others may share, and digest: the name of the last of them. shares: whether it takes part.
    """

    sampling: Sampling
    logprobs: bool
    top_logprobs: int
    biases: array[int]
    history: array[int]
    max_tokens: int
    promised_tokens: int
    shares: bool
    num_published: int
    digest: bytes
    stop_ids: frozenset[int]

    def num_top(self, span: Span) -> int:
        """Likeliest tokens to name at each output of a span."""
        has_logprobs = self.logprobs or span.outputs is SpanOutputs.ALL
        return self.top_logprobs if has_logprobs else 0


@dataclass(slots=True, eq=False)
class _Flight:
    """A step that the compute thread does while messages are handled.

    goes_on: the next one begins as soon as it is done. results: once it is done. reply: to the
    `Step` that asked for it; None while it is ahead of that.
    """

    spans: tuple[Span, ...]
    step_id: int = 0
    goes_on: bool = False
    results: tuple[SpanResult, ...] = ()
    reply: asyncio.Future[StepDone] | None = None


# Whose the memory of a step is (tokens, positions, sampling records, histories)
#   a flight    the compute thread's, from `_begin` to `_land`
#   no flight   the handler's: what touches pages, seats or the lease halts the flight before


class Device(Actor):
    """One CPU device with all blocks of a model.

    pager: whose frames the blocks lie in. logits: the epilogue's output buffer. compiled_kernels,
    compile_s: what making the program took. owned: what ends with the device.
    """

    def __init__(
        self,
        program: HostProgram,
        pages: KvPages,
        pager: Ref,
        logits: Buffer,
        *,
        tier: str,
        threads: int,
        context_tokens: int,
        compiled_kernels: int,
        compile_s: float,
        owned: ExitStack,
    ) -> None:
        self._program = program
        self._pages = pages
        self._pager = pager
        self._logits = logits
        self._tier = tier
        self._threads = threads
        self._context_tokens = context_tokens
        self._compiled_kernels = compiled_kernels
        self._compile_s = compile_s
        self._owned = owned
        self._seats: dict[int, _Seat] = {}
        self._lease: Lease | None = None
        self._sampling = array("B", bytes(RECORD_BYTES * program.limits.outputs))
        self._tops = array("B", bytes(_TOP_BYTES * program.limits.outputs))
        self._program.step.set(Ctx.SAMPLING, self._sampling.buffer_info()[0])
        self._compute = ThreadPoolExecutor(1, "jitllm compute")
        self._flight: _Flight | None = None
        self._landing: Future[None] | None = None

    async def on_start(self) -> None:
        """Scratch is charged to the host's budget, in place of what a predecessor held."""
        await self._pager.ask(Forget(self.context.me))
        await self._pager.ask(Reserve("scratch", self._program.scratch_bytes, self._name))

    async def on_stop(self) -> None:
        """Give threads and memory back."""
        self._cut()
        self._compute.shutdown()
        self._program.close()
        self._owned.close()

    async def receive(self, message: DeviceMessage) -> object:
        """Handle one message."""
        match message:
            case Open():
                return await self._open(message)
            case Close():
                await self._close(message.sequence)
                return None
            case Step():
                return await self._step(message)
            case Cut():
                self._cut()
                return None
            case Recall():
                await self._halt()
                await self._let_go()
                return None
            case Shrink():
                await self._halt()
                self._pages.shrink(message.max_bytes)
                return None
            case DeviceStatsRequest():
                return DeviceStats(
                    kv_bytes=self._pages.held_bytes,
                    kv_idle_bytes=self._pages.idle_bytes,
                    scratch_bytes=self._program.scratch_bytes,
                    threads=self._threads,
                    tier=self._tier,
                    context_tokens=self._context_tokens,
                    compiled_kernels=self._compiled_kernels,
                    compile_s=self._compile_s,
                )
            case _:
                assert_never(message)

    @property
    def _name(self) -> str:
        """Under which the pager knows what is held here."""
        return self.context.me.name

    # --- sequences ---------------------------------------------------------------------------

    async def _open(self, message: Open) -> Opened | Refused:
        """Promise a sequence its KV room; one that is there already begins again."""
        await self._close(message.sequence)
        wanted = prefix.reusable(message.tokens, self._pages.page_tokens)
        num_cached = self._pages.open(message.sequence, message.max_tokens, wanted)
        num_published = num_cached // self._pages.page_tokens
        seat = self._seats[message.sequence] = _Seat(
            message.sampling,
            message.logprobs,
            message.top_logprobs,
            array("B", pack_pairs(message.sampling.logit_bias)),
            array("i", bytes(4 * message.max_tokens)),
            message.max_tokens,
            message.promised_tokens,
            bool(message.tokens),
            num_published,
            wanted[num_published - 1] if num_published else b"",
            message.stop_ids,
        )
        seat.history[:num_cached] = array("i", message.tokens[:num_cached])
        reserved = await self._charge()
        if reserved.over_budget_bytes and not message.must_fit:
            need = self._pages.set_bytes * self._pages.num_sets(message.promised_tokens)
            await self._close(message.sequence)
            return Refused(need, max(need - reserved.over_budget_bytes, 0))
        return Opened(message.sequence, num_cached)

    async def _close(self, sequence: int) -> None:
        """Free what a sequence holds; closing one twice does nothing."""
        await self._halt()
        if self._seats.pop(sequence, None) is not None:
            self._pages.close(sequence)
            await self._charge()

    async def _charge(self) -> Reserved:
        """Tell the pager what KV takes, and give up what was only kept where there is no room.

        What sequences hold counts once, however many share it, and so does what they were promised
        and have not taken yet.
        """
        pages = self._pages
        promised = sum(
            max(pages.num_sets(seat.promised_tokens) - pages.num_taken(sequence), 0)
            for sequence, seat in self._seats.items()
        )
        num_bytes = pages.held_bytes + promised * pages.set_bytes
        await self._let_go()
        reserved: Reserved = await self._pager.ask(Reserve("kv", num_bytes, self._name))
        pages.shrink(reserved.spare_bytes)
        return reserved

    async def _grow(self, span: Span) -> None:
        """Pages for a span's positions; the promise grows with a reply that outruns it."""
        seat, pages = self._seats[span.sequence], self._pages
        if span.stop > seat.promised_tokens:
            seat.promised_tokens = min(span.stop + MIN_PROMISED_TOKENS, seat.max_tokens)
            await self._charge()
        if not pages.grow(span.sequence, span.stop):
            raise OverBudget(
                f"KV of {span.stop} positions",
                pages.num_sets(span.stop) * pages.set_bytes,
                pages.num_free * pages.set_bytes,
            )

    def _publish(self, span: Span) -> None:
        """What a span filled may be shared from now on: nobody writes to a full page again."""
        seat, size = self._seats[span.sequence], self._pages.page_tokens
        while seat.shares and (stop := (seat.num_published + 1) * size) <= span.stop:
            seat.digest = prefix.extend(seat.digest, seat.history[stop - size : stop])
            self._pages.publish(span.sequence, seat.num_published, seat.digest)
            seat.num_published += 1

    # --- steps -------------------------------------------------------------------------------

    async def _step(self, message: Step) -> StepDone | asyncio.Future[StepDone]:
        flight = self._flight
        if flight is not None and flight.reply is None and flight.spans == message.spans:
            return self._join(flight, message)  # no logits: a step that hands them out stays alone
        await self._halt()
        if any(span.sequence not in self._seats for span in message.spans):
            raise Lost(self._name, "it began again, and knows no sequence of before")
        for span in message.spans:
            await self._grow(span)
        self._describe(message.spans)
        if message.goes_on and self._lease is not None:
            return self._join(self._begin(message.spans), message)
        await self._run()
        for span in message.spans:
            self._publish(span)
        results, logits = self._results(message.spans), []
        row = 0
        for span in message.spans:
            if span.sequence in message.logits and span.num_outputs:
                logits.append((span.sequence, self._rows(row, span.num_outputs)))
            row += span.num_outputs
        return StepDone(message.step_id, results, tuple(logits))

    def _describe(self, spans: tuple[Span, ...]) -> None:
        """Write the step into native memory: per token, per row, per output."""
        step = self._program.step
        token = output = 0
        for row, span in enumerate(spans):
            count, stop = len(span.tokens), token + len(span.tokens)
            ids = array("i", span.tokens)
            step.tokens[token:stop] = ids
            step.positions[token:stop] = array("i", range(span.start, span.stop))
            step.row_of[token:stop] = array("i", [row]) * count
            step.tables[row] = self._pages.table_address(span.sequence)
            seat = self._seats[span.sequence]
            seat.history[span.start : span.stop] = ids
            first = token if span.outputs is SpanOutputs.ALL else stop - 1
            num = span.num_outputs
            step.outputs[output : output + num] = array("i", range(first, first + num))
            self._describe_sampling(span, seat, output)
            token, output = stop, output + num
        step.set_counts(token, output)

    def _describe_sampling(self, span: Span, seat: _Seat, output: int) -> None:
        sampling = seat.sampling
        targets = [*span.tokens[1:], span.target][-span.num_outputs :]
        for index, target in enumerate(targets if span.num_outputs else ()):
            position = span.stop - span.num_outputs + index
            window = position + 1
            if sampling.repeat_last_n >= 0:
                window = min(sampling.repeat_last_n, window)
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
            history = seat.history.buffer_info()[0] + 4 * (position + 1 - window)
            record = settings.pack(
                history,
                window,
                bias=seat.biases.buffer_info()[0],
                num_bias=len(sampling.logit_bias),
                top=self._tops.buffer_info()[0] + _TOP_BYTES * (output + index),
                num_top=seat.num_top(span),
            )
            start = RECORD_BYTES * (output + index)
            self._sampling[start : start + RECORD_BYTES] = array("B", record)

    async def _run(self) -> None:
        """All blocks in order, as long a run at a time as is resident."""
        loop = asyncio.get_running_loop()
        program, start, num_blocks = self._program, 0, self._program.num_blocks
        while start < num_blocks:
            lease = self._lease
            if lease is None:
                lease = await self._pager.ask(Acquire(start, num_blocks, self._name))
            first, last = start == 0, lease.stop == num_blocks
            try:
                work = partial(program.run, start, lease.stop, first=first, last=last)
                await loop.run_in_executor(self._compute, work)
            finally:
                if lease.is_standing:
                    self._lease = lease
                else:
                    await self._pager.tell(Release(lease))
            start = lease.stop

    # --- steps ahead of their messages -------------------------------------------------------

    def _begin(self, spans: tuple[Span, ...]) -> _Flight:
        """Compute a step that was described, under the standing lease."""
        flight = self._flight = _Flight(spans)
        self._landing = self._compute.submit(self._fly, flight, asyncio.get_running_loop())
        return flight

    def _join(self, flight: _Flight, message: Step) -> asyncio.Future[StepDone]:
        """The reply to the message that asks for a flight."""
        reply = flight.reply = asyncio.get_running_loop().create_future()
        flight.step_id, flight.goes_on = message.step_id, message.goes_on
        if flight.results:
            self._answer(flight)
        return reply

    def _fly(self, flight: _Flight, loop: asyncio.AbstractEventLoop) -> None:
        """In the compute thread: step after step, until one of them does not go on."""
        following: _Flight | None = flight
        try:
            while following is not None:
                flight = following
                self._program.run(0, self._program.num_blocks, first=True, last=True)
                results = self._results(flight.spans)
                spans = self._following(flight.spans, results) if flight.goes_on else ()
                following = _Flight(spans) if spans else None
                if spans:
                    self._describe(spans)
                loop.call_soon_threadsafe(self._land, flight, results, following)
        except Exception as error:
            loop.call_soon_threadsafe(self._crash, error)

    def _following(
        self, spans: tuple[Span, ...], results: tuple[SpanResult, ...]
    ) -> tuple[Span, ...]:
        """The step after one; none if a sequence ends with it, or needs a page."""
        following = []
        for span, result in zip(spans, results, strict=True):
            seat, stop = self._seats[span.sequence], span.stop + 1
            room = self._pages.num_taken(span.sequence) * self._pages.page_tokens
            if result.token is None or result.token in seat.stop_ids:
                return ()
            if stop >= seat.max_tokens or stop > room:
                return ()
            tokens = (result.token,)
            following.append(Span(span.sequence, span.stop, tokens, SpanOutputs.LAST, sample=True))
        return tuple(following)

    def _land(
        self, flight: _Flight, results: tuple[SpanResult, ...], following: _Flight | None
    ) -> None:
        """A flight is done, and `following` has begun."""
        flight.results = results
        if following is not None:
            self._flight = following
        if flight.reply is not None:
            self._answer(flight)

    def _answer(self, flight: _Flight) -> None:
        """A flight is done and was asked for; the next one begins, if it has not yet."""
        for span in flight.spans:
            self._publish(span)
        if flight.reply is not None and not flight.reply.done():
            flight.reply.set_result(StepDone(flight.step_id, flight.results, ()))
        if self._flight is not flight:
            return
        self._flight = None
        if flight.goes_on and (spans := self._following(flight.spans, flight.results)):
            self._describe(spans)
            self._begin(spans)

    def _crash(self, error: Exception) -> None:
        """A flight failed; one that nobody asked for yet is begun again by who does."""
        flight, self._flight = self._flight, None
        if flight is not None and flight.reply is not None and not flight.reply.done():
            flight.reply.set_exception(error)

    def _cut(self) -> None:
        """No flight after this one."""
        if self._flight is not None:
            self._flight.goes_on = False

    async def _halt(self) -> None:
        """Wait until the compute thread rests; what it did ahead is dropped."""
        self._cut()
        if self._flight is not None and self._landing is not None:
            await asyncio.wrap_future(self._landing)
            self._flight = None

    # --- leases ------------------------------------------------------------------------------

    async def _let_go(self) -> None:
        """Release the lease that was kept from the last step."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await self._pager.tell(Release(lease))

    # --- results -----------------------------------------------------------------------------

    def _results(self, spans: tuple[Span, ...]) -> tuple[SpanResult, ...]:
        results = []
        row = 0
        for span in spans:
            results.append(self._result(span, row))
            row += span.num_outputs
        return tuple(results)

    def _result(self, span: Span, row: int) -> SpanResult:
        if not span.num_outputs:
            return SpanResult(span.sequence, None, 0.0)
        sampled = [self._sampled(row + i) for i in range(span.num_outputs)]
        targets = [*span.tokens[1:], span.target][-span.num_outputs :]
        known = [s.target_logprob for s, t in zip(sampled, targets, strict=True) if t >= 0]
        num_top = self._seats[span.sequence].num_top(span)
        tops = [self._top(row + i, num_top) for i in range(span.num_outputs)] if num_top else []
        wants_prompt = span.outputs is SpanOutputs.ALL
        return SpanResult(
            sequence=span.sequence,
            token=sampled[-1].token if span.sample else None,
            logprob=sampled[-1].token_logprob,
            prompt_logprobs=tuple(known) if wants_prompt else (),
            top_logprobs=tops[-1] if span.sample and tops else (),
            prompt_top_logprobs=tuple(tops[: len(known)]) if wants_prompt else (),
        )

    def _sampled(self, output: int) -> Sampled:
        start = RECORD_BYTES * output
        return Sampled.unpack(memoryview(self._sampling)[start : start + RECORD_BYTES])

    def _top(self, output: int, num_top: int) -> TopLogprobs:
        start = _TOP_BYTES * output
        return unpack_top(memoryview(self._tops)[start : start + PAIR_BYTES * num_top])

    def _rows(self, row: int, count: int) -> Logits:
        """A copy of logits rows that the receiver owns."""
        stride = self._logits.stride_bytes
        source = self._program.rows(self._logits, row + count)
        width = 4 * self._logits.width
        memory = mmap.mmap(-1, count * width)
        for i in range(count):
            at = (row + i) * stride
            memory[i * width : (i + 1) * width] = source[at : at + width]
        return Logits(memory, count, self._logits.width)
