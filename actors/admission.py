"""Who gets seats next: those that there is room for, and who makes way for one that waits long.

Knows queues, and what the devices said to those that wait. Computes nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from actors.departures import Departures
from actors.mailbox import Stopped
from actors.messages.device import Open, Opened, Refused
from actors.park import Parker
from actors.queues import Queues
from actors.remember import PrefixCache
from actors.route import Route
from actors.stepper import Stepper
from jitllm.engine import Finish
from jitllm.errors import JitllmError, OutOfPages
from jitllm.log import logger
from jitllm.schedule import plan
from jitllm.schedule.fair import Fairness
from jitllm.schedule.sequence import Sequence

RETRY_STEPS = 32
"""After so many steps a request that there was no room for is tried again, whatever happened."""

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The most urgent one that there was no room for, and what was missing."""

    sequence: Sequence
    refused: Refused

    @property
    def missing_tokens(self) -> float:
        """Positions that there was no room for."""
        need, room = self.refused.need_bytes, self.refused.room_bytes
        return self.sequence.promised_tokens * (need - room) / max(need, 1)


class Admission:
    """See above. page_tokens: positions of a page that prompts can share; 0 when they share
    nothing. falls_back: what cannot be brought back is computed again."""

    def __init__(
        self,
        queues: Queues,
        route: Route,
        departures: Departures,
        stepper: Stepper,
        parker: Parker,
        prefixes: PrefixCache,
        fairness: Fairness,
        budget: plan.Budget,
        page_tokens: int,
        *,
        falls_back: bool,
    ) -> None:
        self._queues = queues
        self._route = route
        self._departures = departures
        self._stepper = stepper
        self._parker = parker
        self._prefixes = prefixes
        self._fairness = fairness
        self._budget = budget
        self._page_tokens = page_tokens
        self._falls_back = falls_back
        self._refused: _Refusal | None = None
        self._slices_from = 0  # the step from which on sequences make way again, after a failure

    def retry(self) -> None:
        """There may be room for those that were refused."""
        self._queues.refused_tokens = None

    async def admit(self) -> OutOfPages | None:
        """Give seats to whoever there is room for; what there is no memory for, though nothing
        else runs."""
        await self._parker.charge()
        await self._prefixes.charge()
        if (
            self._stepper.num_steps % RETRY_STEPS == 0
            or not self._queues.running
            or self._victims()
        ):
            self._queues.refused_tokens = None
        while sequence := plan.next_admission(
            self._queues.waiting,
            self._queues.running,
            self._budget,
            self._page_tokens,
            self._queues.refused_tokens,
            self._fairness.urgency,
        ):
            try:
                opened = await self._seat(sequence)
            except Stopped as error:
                await self._departures.recover(error, sequence)
                return None
            except OutOfPages as error:
                return error
            except JitllmError as error:
                self._queues.waiting.remove(sequence)
                self._queues.finish(self._queues.replies[sequence.id], Finish.ERROR, error)
                continue
            if isinstance(opened, Opened):
                self._begin(sequence, opened.num_cached)
                if (hidden := self._prefixes.take_hidden(sequence.id)) is not None:
                    sequence.num_computed -= 1  # its last token still goes through the head
                    await self._stepper.step(plan.spans([sequence], self._budget), hidden)
                continue
            if self._queues.refused_tokens is None:  # others need less, and may still be let in
                self._refused = _Refusal(sequence, opened)
            if not await self._make_way():
                self._queues.refused_tokens = sequence.promised_tokens
        return None

    async def _seat(self, sequence: Sequence) -> Opened | Refused:
        """Give a sequence its seats, and what is parked of it, or kept of what it begins with."""
        await self._parker.charge(without=sequence.id)
        opening = self.opening(sequence)
        opened = await self._route.open(opening)
        if isinstance(opened, Refused):
            return opened
        if self._parker.get(sequence.id) is None:
            num_cached = await self._prefixes.restore(sequence, opened.num_cached)
            if num_cached > opened.num_cached:
                await self._route.open_at_guests(opening)  # where a move began meanwhile
            return replace(opened, num_cached=num_cached)
        try:
            await self._parker.restore(sequence, opened.num_cached)
        except Stopped:
            raise
        except OutOfPages as error:  # it was said to fit, and does not by a little
            await self._route.close(sequence.id)
            if not self._queues.running:
                raise
            return Refused(error.needed_bytes, error.budget_bytes)
        except JitllmError as error:
            if not self._falls_back:
                await self._route.close(sequence.id)
                raise
            _log.warning("%s; its request begins again", error)
            self._parker.forget(sequence.id)
            sequence.restart()
        await self._route.open_at_guests(opening)  # where a move began meanwhile
        return opened

    def _victims(self) -> tuple[Sequence, ...]:
        """Who has to make way for the one that there was no room for, if that is of use."""
        if self._refused is None or self._stepper.num_steps < self._slices_from:
            return ()
        waiting = self._refused.sequence
        if waiting not in self._queues.waiting:
            self._refused = None
            return ()
        num_rows, pace, swap_s = len(self._queues.running), self._stepper.pace, self._parker.swap_s
        quantum = self._fairness.quantum_tokens(num_rows, swap_s, pace.step_s)
        missing, now_s = self._refused.missing_tokens, time.perf_counter()
        return self._fairness.victims(waiting, self._queues.running, missing, quantum, now_s)

    async def _make_way(self) -> bool:
        """Park who has had its time slice, if that makes room for the one that was refused."""
        victims = self._victims()
        for victim in victims:
            try:
                await self._departures.park(victim, "disk", self._queues.waiting, is_slice=True)
            except JitllmError as error:
                _log.warning("a time slice goes on: %s", error)
                self._slices_from = self._stepper.num_steps + RETRY_STEPS
                return False
            victim.queued_s = time.perf_counter()
        return bool(victims)

    def opening(self, sequence: Sequence) -> Open:
        """See `Replies`."""
        request = self._queues.replies[sequence.id].request
        return Open(
            sequence.id,
            tuple(sequence.tokens) if self._page_tokens and not sequence.all_outputs else (),
            sequence.max_tokens,
            sequence.promised_tokens,
            request.sampling,
            request.logprobs,
            request.top_logprobs,
            must_fit=not self._queues.running,
            stop_ids=frozenset(request.stop_ids),
            namespace=sequence.namespace,
        )

    def _begin(self, sequence: Sequence, num_cached: int) -> None:
        """A sequence was admitted; its first positions may exist already."""
        if not sequence.num_computed:  # else its history came back
            sequence.num_cached = num_cached
        sequence.num_computed = max(sequence.num_computed, num_cached)
        sequence.num_before, sequence.num_passed = sequence.num_generated, 0
        self._queues.waiting.remove(sequence)
        for other in self._queues.waiting:
            other.num_passed += other.queued_s < sequence.queued_s
        self._queues.running.append(sequence)
        reply = self._queues.replies[sequence.id]
        reply.started_s = reply.started_s or time.perf_counter()
