"""The thread of a device that computes: a step at a time, or one after the other by themselves.

Knows leases and what the program of a device runs. Decides nothing about what is computed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from actors.decode import Decode
from actors.hosted import ExpertHost
from actors.messages.device import AskExperts, Carried, Outcome, Step
from actors.messages.pager import Lease
from actors.mixtures import Mixtures
from actors.overflow import Overflow
from actors.parts import Parts
from actors.seats import Seats
from actors.supply import Supply
from jitllm.devices.runner import Runner
from jitllm.errors import JitllmError
from jitllm.memory.pages import KvPages
from jitllm.memory.use import Phase
from jitllm.schedule.step import Span, phase_of

# Whose the memory of a step is (tokens, positions, sampling records, histories)
#   a flight    the compute thread's, from `take_off` to its landing
#   no flight   the handler's: what touches pages, seats or the lease halts the flight before


@dataclass(slots=True, eq=False)
class Flight:
    """Steps that the compute thread does one after the other while messages are handled.

    outcomes: where each of them is answered. decode: how one follows another. goes_on: another one
    may follow.
    """

    outcomes: Parts[Outcome]
    decode: Decode
    goes_on: bool = True
    landing: Future[None] | None = None


class Compute:
    """See above. mixtures: what runs blocks whose experts are asked in the middle. expert_host:
    what computes experts of others' blocks. failure: what a flight that failed ends with."""

    def __init__(
        self,
        runner: Runner,
        pages: KvPages,
        seats: Seats,
        supply: Supply,
        mixtures: Mixtures | None,
        expert_host: ExpertHost | None,
        failure: Callable[[Exception], Exception],
    ) -> None:
        self._runner = runner
        self._seats = seats
        self._supply = supply
        self._mixtures = mixtures
        self._expert_host = expert_host
        self._failure = failure
        self._thread = ThreadPoolExecutor(1, "jitllm compute")
        self._flight: Flight | None = None
        self.overflow = Overflow(pages, self._thread, self.halt, runner.is_lost)
        """Of keys and values beyond their budget, which this thread reads and writes."""
        self.num_tokens: Counter[Phase] = Counter()
        """Computed so far."""

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    async def run(self, message: Step, lease: Lease | None = None) -> None:
        """The blocks of a leg in order, as long a run at a time as is resident.

        lease: of the first run, where it was acquired before.
        """
        start, is_first = message.start, True
        phase = phase_of(message.spans)
        self.num_tokens[phase] += _num_tokens(message.spans)
        rows = [(span.sequence, span.start) for span in message.spans]
        while is_first or start < message.stop:
            if lease is None and start < message.stop:
                lease = await self._supply.acquire(start, message.stop, phase)
            stop = start if lease is None else min(lease.stop, message.stop)
            try:
                await self._run_blocks(
                    rows,
                    phase,
                    start,
                    stop,
                    embeds=is_first and message.hidden is None,
                    begins=is_first,
                    ends=message.has_head and stop == message.stop,
                )
            finally:
                if lease is not None:
                    await self._supply.release(lease)
            start, is_first, lease = stop, False, None

    @property
    def asks_experts(self) -> bool:
        """Whether experts of some blocks are asked in the middle of a step."""
        return self._mixtures is not None

    async def answer(self, message: AskExperts) -> Carried:
        """Compute for a step of another device; there is none here meanwhile."""
        await self.halt()
        if self._expert_host is None:
            raise JitllmError("this device computes no experts for others")
        return await self._expert_host.answer(self._thread, message)

    async def _run_blocks(
        self, rows: Sequence[tuple[int, int]], phase: Phase, start: int, stop: int, **parts: bool
    ) -> None:
        """Blocks [start, stop) of a step that was described; see `Runner.run`.

        rows: sequences, and the first position of each that is computed. phase: of the step.
        """
        if self._mixtures is not None:
            passes_of = partial(self.overflow.passes, rows)
            await self._mixtures.run(self._thread, start, stop, passes_of, phase, **parts)
            return
        work = partial(self._run_together, rows, start, stop, **parts)
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _run_together(
        self, rows: Iterable[tuple[int, int]], start: int, stop: int, **parts: bool
    ) -> None:
        """The same in the compute thread, where all that the blocks need is there."""
        with closing(self.overflow.passes(rows, range(start, stop))) as passes:
            self._runner.run(start, stop, passes=passes, **parts)

    # --- flights -----------------------------------------------------------------------------

    def take_off(self, decode: Decode, spans: tuple[Span, ...], outcomes: Parts[Outcome]) -> None:
        """Begin a flight with a step that was described, under the standing lease."""
        flight = self._flight = Flight(outcomes, decode)
        flight.landing = self._thread.submit(self._fly, flight, spans, asyncio.get_running_loop())

    def _fly(
        self, flight: Flight, spans: tuple[Span, ...], loop: asyncio.AbstractEventLoop
    ) -> None:
        """In the compute thread: step after step, until there is a reason to ask."""
        try:
            try:
                self._go_on(flight, spans, loop)
            finally:
                flight.decode.settle()
            loop.call_soon_threadsafe(self._land, flight)
        except Exception as error:
            loop.call_soon_threadsafe(self._crash, flight, error)

    def _go_on(
        self, flight: Flight, spans: tuple[Span, ...], loop: asyncio.AbstractEventLoop
    ) -> None:
        phase, num_tokens = phase_of(spans), _num_tokens(spans)
        stop, goes_on = self._runner.num_blocks, True
        while goes_on:
            rows = flight.decode.rows
            self._run_together(rows, 0, stop, embeds=True, begins=True, ends=True)
            self.num_tokens[phase] += num_tokens
            phase, num_tokens = "decode", len(spans)
            outcome = flight.decode.outcome()
            goes_on = flight.goes_on and flight.decode.advance(outcome)
            flight.outcomes.send(outcome, loop)

    def _land(self, flight: Flight) -> None:
        """The last step of a flight is done."""
        for sequence, num_tokens in flight.decode.computed.items():
            self._seats.publish(sequence, num_tokens)
        self._flight = None
        flight.outcomes.end()

    def _crash(self, flight: Flight, error: Exception) -> None:
        """A step of a flight failed, and so none follows."""
        self._flight = None
        flight.outcomes.fail(self._failure(error))

    def cut(self) -> None:
        """No step after this one without being asked."""
        if self._flight is not None:
            self._flight.goes_on = False

    async def halt(self) -> None:
        """Wait until the compute thread rests."""
        self.cut()
        if self._flight is not None and self._flight.landing is not None:
            await asyncio.wrap_future(self._flight.landing)
            self._flight = None


def _num_tokens(spans: Iterable[Span]) -> int:
    return sum(len(span.tokens) for span in spans)
