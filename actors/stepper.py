"""One step of the sequences that run, and those that go on from it: planned, computed, applied.

Knows the route and the results of steps. Decides nothing about who runs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any

from actors.departures import Departures
from actors.mailbox import Stopped
from actors.messages.device import StepDone
from actors.queues import Queues
from actors.remember import PrefixCache
from actors.reply import Reply
from actors.route import Route
from actors.seam import Seam
from jitllm.engine import Delta, Finish
from jitllm.errors import HistoryError, OutOfPages, PageError
from jitllm.schedule import plan
from jitllm.schedule.pace import Pace
from jitllm.schedule.step import Span


class Stepper:
    """See above. budget: rows, tokens and outputs that a step of a device holds. begin: runs work
    beside the scheduler's handler; see `Context.begin`."""

    def __init__(
        self,
        queues: Queues,
        route: Route,
        departures: Departures,
        seam: Seam,
        prefixes: PrefixCache,
        budget: plan.Budget,
        begin: Callable[[Coroutine[Any, Any, object], str], None],
    ) -> None:
        self._queues = queues
        self._route = route
        self._departures = departures
        self._seam = seam
        self._prefixes = prefixes
        self._budget = budget
        self._begin = begin
        self._goes_on = False  # whether the device may begin the next step
        self.pace = Pace(budget.tokens)
        """How long steps take."""
        self.num_steps = 0
        """That were computed so far."""
        self.num_sampled = 0
        """Tokens that were sampled so far."""
        self.done_s = 0.0
        """When the last step was done."""

    def plan(self) -> tuple[Span, ...]:
        """The rows of the next step."""
        queues = self._queues
        num_replies = sum(sequence.is_replying for sequence in queues.running)
        newcomers = plan.newcomers(
            queues.waiting, queues.running, self._budget, queues.refused_tokens
        )
        prompt_tokens = self.pace.prompt_tokens(num_replies, *newcomers)
        return plan.spans(queues.running, self._budget, prompt_tokens)

    async def step(self, spans: tuple[Span, ...], hidden: bytes | None = None) -> OutOfPages | None:
        """Compute a step, and those that go on from it; what there was no memory for.

        hidden: what its last block would end with, so that only the head is left.
        """
        replies = [self._queues.replies[span.sequence] for span in spans]
        wants_logits = tuple(r.sequence.id for r in replies if r.request.logits)
        wants_hidden = tuple(
            span.sequence
            for span, reply in zip(spans, replies, strict=True)
            if hidden is None and self._prefixes.wants_hidden(reply.sequence, span.stop)
        )
        prompts = [
            len(span.tokens)
            for span, reply in zip(spans, replies, strict=True)
            if not reply.sequence.is_replying
        ]
        self._goes_on = (
            self.pace.is_quick
            and not wants_logits
            and not wants_hidden
            and hidden is None
            and not self._queues.cancelled
            and plan.goes_on(spans, self._queues.running, self._queues.waiting)
        )
        began_s = time.perf_counter()
        num_replies, num_prompt = len(spans) - len(prompts), sum(prompts)
        ended: list[tuple[Reply, Delta]] = []
        short: OutOfPages | None = None
        lost: HistoryError | None = None
        try:
            async for computed, done in self._compute(spans, wants_logits, wants_hidden, hidden):
                now_s = self.done_s = time.perf_counter()
                self.pace.observe(num_replies, num_prompt, now_s - began_s)
                self._seam.observe(num_replies, num_prompt, now_s - began_s)
                ended += self._apply(computed, done, now_s)
                began_s, num_replies, num_prompt = now_s, len(spans), 0
            last_hidden = dict(done.last_hidden)
            over = {reply.sequence.id for reply, _ in ended}
            for span, reply in zip(spans, replies, strict=True):
                if span.sequence in over or span.start < reply.sequence.num_prompt:
                    await self._prefixes.keep(
                        reply.sequence,
                        hidden=last_hidden.get(span.sequence, b""),
                        is_over=span.sequence in over,
                    )
        except Stopped as error:
            for reply, last in ended:  # before it died
                self._queues.running.remove(reply.sequence)
                self._queues.push(reply, last)
            await self._departures.recover(error)
            return None
        except OutOfPages as error:  # the last step was not computed
            short = error
        except HistoryError as error:  # nor was it then
            lost = error
        except Exception as error:
            rows = error.rows if isinstance(error, PageError) else ()
            for row, reply in enumerate(replies):  # the step is taken again for the others
                if not rows or row in rows:
                    await self._departures.end(reply, Finish.ERROR, error)
            return None
        finally:
            self._goes_on = False
        await self._departures.close(reply for reply, _ in ended)
        for reply, last in ended:
            self._queues.push(reply, last)
        if lost is not None:
            await self._departures.part_with(lost)
        return short

    async def _compute(
        self,
        spans: tuple[Span, ...],
        wants_logits: tuple[int, ...],
        wants_hidden: tuple[int, ...],
        hidden: bytes | None,
    ) -> AsyncIterator[tuple[tuple[Span, ...], StepDone]]:
        """A step, and those that go on from it while nobody comes or goes; each with its spans."""
        if not self._goes_on:
            number = self.num_steps + 1
            if hidden is None:
                done = await self._route.step(number, spans, wants_logits, wants_hidden)
            else:
                done = await self._route.head(number, spans, wants_logits, hidden)
            self.num_steps = number
            yield spans, done
            return
        async with aclosing(self._route.steps(self.num_steps + 1, spans)) as steps:
            async for computed in steps:
                self.num_steps += 1
                yield computed

    def _apply(
        self, spans: Iterable[Span], done: StepDone, now_s: float
    ) -> list[tuple[Reply, Delta]]:
        """Take results in and hand them out; those that end, each with its last delta."""
        logits = dict(done.logits)
        ended: list[tuple[Reply, Delta]] = []
        for span, result in zip(spans, done.results, strict=True):
            reply = self._queues.replies[span.sequence]
            reply.sequence.num_computed = span.stop
            finish = reply.advance(result, now_s)
            delta = reply.delta(result, finish, logits.get(span.sequence))
            self.num_sampled += len(delta.tokens)
            if finish is not None:
                ended.append((reply, delta))
            elif delta.tokens or delta.prompt_logprobs or delta.logits:
                self._queues.push(reply, delta)
        return ended

    async def step_when_due(self) -> None:
        """While a history is filled in for one that waits, those that run keep their rate."""
        is_due = time.perf_counter() - self.done_s > self.pace.step_s
        if is_due and (spans := self.plan()):
            await self.step(spans)

    def cut(self) -> None:
        """The next step is another one than this one led to expect."""
        if self._goes_on:
            self._goes_on = False
            self._begin(self._route.cut(), "cut")
