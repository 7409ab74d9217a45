"""The scheduler of one served model: token ids, the plan of each step, replies.

A step reads as a sentence: admit, plan, compute, apply. Decisions live in `jitllm.schedule`; this
actor remembers. Knows no bytes of weights or KV.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from collections.abc import Sequence as Seq
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import assert_never

from actors.actor import Actor
from actors.arrange import Arranger
from actors.checks import check
from actors.mailbox import Stopped
from actors.messages import (
    Arrange,
    Arranged,
    Drain,
    Move,
    Open,
    Opened,
    Park,
    Rebudget,
    Refused,
    Resume,
    SchedulerMessage,
    SchedulerStats,
    SchedulerStatsRequest,
    Sessions,
    SessionsRequest,
    StepDone,
    Submit,
)
from actors.park import Parker
from actors.parts import Parts
from actors.relocate import Mover
from actors.remember import PrefixCache
from actors.reply import Reply
from actors.route import Route
from actors.seam import Seam
from jitllm.engine import (
    Delta,
    Finish,
    Outputs,
    ParkedIn,
    Priority,
    Request,
    SequenceState,
    SessionState,
)
from jitllm.errors import (
    Draining,
    HistoryError,
    JitllmError,
    OutOfPages,
    PageError,
    QueueFull,
    UnknownSession,
)
from jitllm.log import logger
from jitllm.memory import prefix
from jitllm.memory.prefix_store import PrefixFolder
from jitllm.schedule import plan
from jitllm.schedule.fair import Fairness
from jitllm.schedule.pace import Pace
from jitllm.schedule.placement import Decline, Placement
from jitllm.schedule.sequence import Sequence
from jitllm.schedule.step import Span, following

RETRY_STEPS = 32
"""After so many steps a request that there was no room for is tried again, whatever happened."""

MAX_LOSSES = 2
"""Deaths of a device that a request survives."""

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


class Scheduler(Actor):
    """Batches the sequences of one model on one route.

    budget: rows, tokens and outputs that a step of a device holds. block_bytes, kv_bytes: as a
    `Mover` wants them. page_tokens: positions of a page that prompts can share; 0 when they share
    nothing. max_queue: requests that may wait, -1 for any number. falls_back: requests survive the
    death of a device. move_share: largest part of the time that a move may take from replies.
    declines: what was asked for of the route's placement in vain. fairness: level of time slices, 0
    for none. park_folder: where files of parked sequences go. relocates: blocks of a device with
    memory of its own go home for keys and values that it has no room for. grows_to: a placement to
    which blocks go one by one, once there are replies. tunes: fewer blocks are tried on such a
    device. prefixes: where prefixes are kept, if they are.
    """

    def __init__(
        self,
        route: Route,
        budget: plan.Budget,
        *,
        context_tokens: int,
        vocab: int,
        block_bytes: Seq[int] = (),
        kv_bytes: Seq[int] = (),
        page_tokens: int = 0,
        max_queue: int = -1,
        falls_back: bool = True,
        move_share: float = 0.1,
        declines: Iterable[Decline] = (),
        fairness: int = 0,
        park_folder: Path | None = None,
        relocates: bool = False,
        grows_to: Placement | None = None,
        tunes: bool = False,
        prefixes: PrefixFolder | None = None,
    ) -> None:
        self._route = route
        self._mover = Mover(route, self, block_bytes, kv_bytes, move_share)
        self._arranger = Arranger(route, self._mover, declines)
        self._seam = Seam(
            route,
            self._mover,
            self,
            lambda work, name: self.context.begin(work, name),
            relocates=relocates,
            grows_to=grows_to,
            tunes=tunes,
        )
        self._parker = Parker(route, kv_bytes, park_folder or Path(gettempdir()))
        self._fairness = Fairness(fairness)
        self._budget = budget
        self._falls_back = falls_back
        self._page_tokens = page_tokens
        self._max_queue = max_queue
        self._is_draining = False
        self._pace = Pace(budget.tokens)
        self._refused_tokens: int | None = None
        self._refused: _Refusal | None = None
        self._slices_from = 0  # the step from which on sequences make way again, after a failure
        self._context_tokens = context_tokens
        self._vocab = vocab
        self._next_id = 0
        self._num_steps = 0
        self._replies: dict[int, Reply] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._held: list[Sequence] = []  # parked, until somebody wants them to go on
        self._cancelled: set[int] = set()
        self._goes_on = False  # whether the device may begin the next step
        self._done_s = 0.0  # when the last step was done
        self._wake = asyncio.Event()
        self._stepping = asyncio.Lock()
        self._prefixes = PrefixCache(
            route,
            prefixes,
            self._mover.undisturbed,
            self._step_when_due,
            lambda work, name: self.context.begin(work, name),
            self._wake.set,
        )
        self.num_losses = 0
        """Losses that sequences began again after."""
        self._recovery_s = 0.0  # until devices could go on, the last time
        self.num_sampled = 0
        """Tokens that were sampled so far."""

    async def on_start(self) -> None:
        """Every device learns what is its own; then begin stepping."""
        await self._route.settle()
        self.context.begin(self._prefixes.scan(), "find prefixes")
        self.context.begin(self._run(), "steps")

    async def on_stop(self) -> None:
        """Requests under way are cancelled."""
        for reply in list(self._replies.values()):
            if not reply.is_done:
                self._finish(reply, Finish.CANCELLED)
        self._parker.close()
        await self._prefixes.close()

    async def receive(self, message: SchedulerMessage) -> object:
        """Handle one message."""
        match message:
            case Submit():
                return self._submit(message.request)
            case Move():
                self._seam.forget()
                move = self._mover.move(
                    message.blocks, message.to, head=message.head, is_live=message.is_live
                )
                return self.context.later(move, f"move to {message.to}")
            case Arrange():
                self._seam.forget()
                return self.context.later(self._arrange(message), "arrange blocks")
            case Park():
                return self.context.later(self._park_all(message), f"park {message.name}")
            case Resume():
                return self._resume_all(message.name)
            case SessionsRequest():
                return self._states()
            case Rebudget():
                return self.context.later(self._rebudget(message.num_bytes), "divide the budget")
            case Drain():
                self._is_draining = message.is_draining
                if self._is_draining:  # what is parked could never end
                    self._resume(list(self._held))
                return None
            case SchedulerStatsRequest():
                return self._statistics()
            case _:
                assert_never(message)

    def _statistics(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            steps=self._num_steps,
            placement=self._route.placement,
            declines=self._arranger.declines,
            moves=self._mover.num_moves,
            moved_blocks=self._mover.num_moved,
            move_totals=self._mover.totals,
            sent_home=self._seam.num_home,
            brought_back=self._seam.num_back,
            seam_trials=self._seam.trials,
            last_move=self._mover.last,
            losses=self.num_losses,
            recovery_s=self._recovery_s,
            lost=self._route.lost,
            is_draining=self._is_draining,
            parked=len(self._held),
            parked_disk_bytes=self._parker.held_bytes("disk"),
            parked_memory_bytes=self._parker.held_bytes("memory"),
            park_totals=self._parker.totals,
            prefix_disk_bytes=self._prefixes.held_bytes,
            prefix_waiting_bytes=self._prefixes.waiting_bytes,
            prefix_totals=self._prefixes.totals,
        )

    async def _arrange(self, message: Arrange) -> Arranged:
        return Arranged(await self._arranger.arrange(message.wanted, strict=message.strict))

    async def _rebudget(self, num_bytes: int) -> None:
        async with self.between_steps():
            await self._route.set_budget(num_bytes)
            self._refused_tokens = None
        self._wake.set()

    # --- requests ----------------------------------------------------------------------------

    def _submit(self, request: Request) -> Parts[Delta]:
        if self._is_draining:
            raise Draining()
        check(request, vocab=self._vocab, context_tokens=self._context_tokens)
        if not plan.has_room(self._waiting, self._running, self._budget, self._max_queue):
            raise QueueFull(self._max_queue)
        num_prompt, root = len(request.prompt), prefix.root(request.namespace)
        wanted = self._context_tokens if request.max_tokens is None else request.max_tokens
        sequence = Sequence(
            id=self._next_id,
            tokens=list(request.prompt),
            num_prompt=num_prompt,
            max_tokens=min(num_prompt + wanted, self._context_tokens),
            chunk_tokens=request.chunk_tokens,
            is_high=request.priority is Priority.HIGH,
            prefix=self._prefix(request, root),
            all_outputs=request.outputs is Outputs.ALL,
            queued_s=time.perf_counter(),
            namespace=root,
        )
        is_held = bool(request.name) and request.name in map(self._name, self._held)
        self._next_id += 1
        deltas: Parts[Delta] = Parts(partial(self._cancel, sequence.id))
        self._replies[sequence.id] = Reply(request, sequence, deltas, sequence.queued_s)
        (self._held if is_held else self._waiting).append(sequence)
        self._interrupt()
        return deltas

    def _prefix(self, request: Request, root: bytes) -> tuple[bytes, ...]:
        """Of the pages that need not be computed for it; none where all positions give outputs."""
        if not self._page_tokens or request.outputs is Outputs.ALL:
            return ()
        return prefix.reusable(request.prompt, self._page_tokens, root)

    def _push(self, reply: Reply, delta: Delta) -> None:
        """Hand a delta to the client; one with a finish is the last."""
        reply.deltas.put(delta)
        reply.is_done = delta.finish is not None
        if reply.is_done:
            reply.deltas.end()
            self._replies.pop(reply.sequence.id, None)
            self._parker.forget(reply.sequence.id)
            self._prefixes.forget(reply.sequence.id)

    def _cancel(self, request_id: int) -> None:
        """The client has gone: end its request between two steps."""
        if request_id in self._replies:
            self._cancelled.add(request_id)
            self._interrupt()

    def _interrupt(self) -> None:
        """The next step is another one than this one led to expect."""
        self._wake.set()
        if self._goes_on:
            self._goes_on = False
            self.context.begin(self._route.cut(), "cut")

    # --- sessions ----------------------------------------------------------------------------

    def _name(self, sequence: Sequence) -> str:
        return self._replies[sequence.id].request.name

    def _states(self, name: str | None = None) -> Sessions:
        """All sequences under way, or those of a request."""
        replies = [reply for reply in self._replies.values() if not reply.is_done]
        return Sessions(tuple(self._state(r) for r in replies if name in (None, r.request.name)))

    def _state(self, reply: Reply) -> SessionState:
        sequence = reply.sequence
        parked = self._parker.get(sequence.id)
        queues = (
            (self._running, SequenceState.RUNNING),
            (self._held, SequenceState.PARKED),
            (self._waiting, SequenceState.WAITING),
        )
        state = next((state for queue, state in queues if sequence in queue), SequenceState.WAITING)
        return SessionState(
            name=reply.request.name,
            state=state,
            prompt_tokens=sequence.num_prompt,
            generated_tokens=sequence.num_generated,
            kv_bytes=sequence.num_computed * self._parker.position_bytes,
            parked_in=parked.where if parked is not None else "",
            parked_bytes=parked.num_bytes if parked is not None else 0,
        )

    def _named(self, name: str) -> list[Sequence]:
        """The sequences of a request. Raises `UnknownSession` when there are none."""
        found = [
            reply.sequence
            for reply in self._replies.values()
            if name and reply.request.name == name and not reply.is_done
        ]
        if not found:
            raise UnknownSession(name)
        return found

    async def _park_all(self, message: Park) -> Sessions:
        if self._is_draining:
            raise Draining()
        self._named(message.name)
        async with self.between_steps():
            for sequence in self._named(message.name):
                if sequence in self._running:
                    await self._park_running(sequence, message.to)
                if sequence in self._waiting:
                    self._waiting.remove(sequence)
                    self._held.append(sequence)
            if self._is_draining:  # meanwhile: what is parked could never end
                self._resume(list(self._held))
        return self._states(message.name)

    async def _park_running(self, sequence: Sequence, to: ParkedIn) -> None:
        """Park one that runs; where a device died of it, it waits, and has nothing to be parked."""
        try:
            await self._park(sequence, to, self._held)
        except Stopped:
            if sequence not in self._waiting:
                raise

    def _resume_all(self, name: str) -> Sessions:
        self._resume(self._named(name))
        return self._states(name)

    def _resume(self, sequences: Iterable[Sequence]) -> None:
        """Those of them that are parked wait for their turn from now on."""
        for sequence in sequences:
            if sequence in self._held:
                self._held.remove(sequence)
                sequence.queued_s = time.perf_counter()
                self._waiting.append(sequence)
        self._interrupt()

    async def _park(
        self, sequence: Sequence, to: ParkedIn, queue: list[Sequence], *, is_slice: bool = False
    ) -> None:
        """Between two steps, put the history of a sequence that runs away, and it into a queue.

        Raises what hinders it; then it runs on, or begins again if a device died of it.
        """
        async with self._mover.without(sequence.id):
            try:
                await self._parker.store(sequence, to, is_slice=is_slice)
            except Stopped as error:
                await self._recover(error)
                raise
            await self._vacate(sequence, queue)

    # --- what a mover needs ------------------------------------------------------------------

    def running(self) -> Seq[Sequence]:
        """See `Replies`."""
        return self._running

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[float]:
        """See `Replies`."""
        self._interrupt()
        async with self._stepping:
            yield self._done_s if self._running else time.perf_counter()

    async def begin_again(self, error: JitllmError, num_losses: int) -> None:
        """See `Replies`."""
        async with self.between_steps():
            # Where something runs, the next step finds out who it was.
            if not self._running and self.num_losses == num_losses:
                await self._recover(error)

    # --- stepping ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except Exception as error:  # whatever it was, nobody may wait for ever
                _log.exception("a step failed")
                async with self._stepping:  # no move hands anything over meanwhile
                    for reply in list(self._replies.values()):
                        if not reply.is_done:
                            await self._end(reply, Finish.ERROR, error)

    async def _turn(self) -> None:
        """One step, or a wait for something to do."""
        self._wake.clear()
        async with self._stepping:
            await self._drop_cancelled()
            short = await self._admit()
            spans = self._plan() if short is None else ()
            if spans:
                short = await self._step(spans)
        if short is not None:
            await self._relieve(short)
        elif not spans and not self._cancelled:
            await self._wake.wait()

    async def _relieve(self, error: OutOfPages) -> None:
        """Make room on a device that had none for a reply; else that one waits until others have
        ended, or ends where there are none."""
        reply = self._replies[error.sequence]
        if await self._seam.make_room(error):
            return
        async with self._stepping:
            if len(self._running) > 1 and reply.sequence in self._running:
                try:
                    await self._park(reply.sequence, "disk", self._waiting, is_slice=True)
                    return
                except Stopped:  # all begin again
                    return
                except JitllmError as hindrance:
                    _log.warning("a reply cannot wait for room: %s", hindrance)
            if not reply.is_done:
                await self._end(reply, Finish.ERROR, self._seam.refusal(error))

    async def _drop_cancelled(self) -> None:
        for request_id in list(self._cancelled):
            self._cancelled.discard(request_id)
            reply = self._replies.get(request_id)
            if reply is not None and not reply.is_done:
                await self._end(reply, Finish.CANCELLED)
            self._replies.pop(request_id, None)

    async def _admit(self) -> OutOfPages | None:
        """Give seats to whoever there is room for; what there is no memory for, though nothing
        else runs."""
        await self._parker.charge()
        await self._prefixes.charge()
        if self._num_steps % RETRY_STEPS == 0 or not self._running or self._victims():
            self._refused_tokens = None
        while sequence := plan.next_admission(
            self._waiting,
            self._running,
            self._budget,
            self._page_tokens,
            self._refused_tokens,
            self._fairness.urgency,
        ):
            try:
                opened = await self._seat(sequence)
            except Stopped as error:
                await self._recover(error, sequence)
                return None
            except OutOfPages as error:
                return error
            except JitllmError as error:
                self._waiting.remove(sequence)
                self._finish(self._replies[sequence.id], Finish.ERROR, error)
                continue
            if isinstance(opened, Opened):
                self._begin(sequence, opened.num_cached)
                if (hidden := self._prefixes.take_hidden(sequence.id)) is not None:
                    sequence.num_computed -= 1  # its last token still goes through the head
                    await self._step(plan.spans([sequence], self._budget), hidden)
                continue
            if self._refused_tokens is None:  # others need less, and may still be let in
                self._refused = _Refusal(sequence, opened)
            if not await self._make_way():
                self._refused_tokens = sequence.promised_tokens
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
            if not self._running:
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

    async def _step_when_due(self) -> None:
        """While a history is filled in for one that waits, those that run keep their rate."""
        is_due = time.perf_counter() - self._done_s > self._pace.step_s
        if is_due and (spans := self._plan()):
            await self._step(spans)

    def _victims(self) -> tuple[Sequence, ...]:
        """Who has to make way for the one that there was no room for, if that is of use."""
        if self._refused is None or self._num_steps < self._slices_from:
            return ()
        waiting = self._refused.sequence
        if waiting not in self._waiting:
            self._refused = None
            return ()
        num_rows, pace, swap_s = len(self._running), self._pace, self._parker.swap_s
        quantum = self._fairness.quantum_tokens(num_rows, swap_s, pace.step_s)
        missing, now_s = self._refused.missing_tokens, time.perf_counter()
        return self._fairness.victims(waiting, self._running, missing, quantum, now_s)

    async def _make_way(self) -> bool:
        """Park who has had its time slice, if that makes room for the one that was refused."""
        victims = self._victims()
        for victim in victims:
            try:
                await self._park(victim, "disk", self._waiting, is_slice=True)
            except JitllmError as error:
                _log.warning("a time slice goes on: %s", error)
                self._slices_from = self._num_steps + RETRY_STEPS
                return False
            victim.queued_s = time.perf_counter()
        return bool(victims)

    def opening(self, sequence: Sequence) -> Open:
        """See `Replies`."""
        request = self._replies[sequence.id].request
        return Open(
            sequence.id,
            tuple(sequence.tokens) if self._page_tokens and not sequence.all_outputs else (),
            sequence.max_tokens,
            sequence.promised_tokens,
            request.sampling,
            request.logprobs,
            request.top_logprobs,
            must_fit=not self._running,
            stop_ids=frozenset(request.stop_ids),
            namespace=sequence.namespace,
        )

    def _begin(self, sequence: Sequence, num_cached: int) -> None:
        """A sequence was admitted; its first positions may exist already."""
        if not sequence.num_computed:  # else its history came back
            sequence.num_cached = num_cached
        sequence.num_computed = max(sequence.num_computed, num_cached)
        sequence.num_before, sequence.num_passed = sequence.num_generated, 0
        self._waiting.remove(sequence)
        for other in self._waiting:
            other.num_passed += other.queued_s < sequence.queued_s
        self._running.append(sequence)
        reply = self._replies[sequence.id]
        reply.started_s = reply.started_s or time.perf_counter()

    def _plan(self) -> tuple[Span, ...]:
        """The rows of the next step."""
        num_replies = sum(sequence.is_replying for sequence in self._running)
        others_wait = len(self._running) + len(self._waiting) > 1
        prompt_tokens = self._pace.prompt_tokens(num_replies, others_wait)
        return plan.spans(self._running, self._budget, prompt_tokens)

    async def _step(
        self, spans: tuple[Span, ...], hidden: bytes | None = None
    ) -> OutOfPages | None:
        """Compute a step, and those that go on from it; what there was no memory for.

        hidden: what its last block would end with, so that only the head is left.
        """
        replies = [self._replies[span.sequence] for span in spans]
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
            self._pace.is_quick
            and not wants_logits
            and not wants_hidden
            and hidden is None
            and not self._cancelled
            and plan.goes_on(spans, self._running, self._waiting)
        )
        began_s = time.perf_counter()
        num_replies, num_prompt = len(spans) - len(prompts), sum(prompts)
        ended: list[tuple[Reply, Delta]] = []
        short: OutOfPages | None = None
        lost: HistoryError | None = None
        first = spans
        try:
            async for done in self._compute(spans, wants_logits, wants_hidden, hidden):
                now_s = self._done_s = time.perf_counter()
                self._pace.observe(num_replies, num_prompt, now_s - began_s)
                self._seam.observe(num_replies, num_prompt, now_s - began_s)
                ended += self._apply(spans, done, now_s)
                began_s, num_replies, num_prompt = now_s, len(spans), 0
                spans = following(spans, done.results)
            last_hidden = dict(done.last_hidden)
            over = {reply.sequence.id for reply, _ in ended}
            for span, reply in zip(first, replies, strict=True):
                if span.sequence in over or span.start < reply.sequence.num_prompt:
                    await self._prefixes.keep(
                        reply.sequence,
                        hidden=last_hidden.get(span.sequence, b""),
                        is_over=span.sequence in over,
                    )
        except Stopped as error:
            for reply, last in ended:  # before it died
                self._running.remove(reply.sequence)
                self._push(reply, last)
            await self._recover(error)
            return None
        except OutOfPages as error:  # the last step was not computed
            short = error
        except HistoryError as error:  # nor was it then
            lost = error
        except Exception as error:
            rows = error.rows if isinstance(error, PageError) else ()
            for row, reply in enumerate(replies):  # the step is taken again for the others
                if not rows or row in rows:
                    await self._end(reply, Finish.ERROR, error)
            return None
        finally:
            self._goes_on = False
        for reply, last in ended:
            await self._close(reply)
            if not reply.is_done:  # the device may have died now, for the last time
                self._push(reply, last)
        if lost is not None:
            await self._part_with(lost)
        return short

    async def _part_with(self, error: HistoryError) -> None:
        """Those of whom something cannot be read begin again, and who has no room ends."""
        for sequence in [s for s in self._running if s.id in error.sequences]:
            reply = self._replies[sequence.id]
            reply.losses += 1
            if error.is_lost and self._falls_back and reply.losses <= MAX_LOSSES:
                _log.warning("%s; a sequence begins again", error)
                await self._vacate(sequence, self._waiting)
                sequence.restart()
                self._mover.fell_back(sequence.id, 0)
            else:
                await self._end(reply, Finish.ERROR, error)

    async def _compute(
        self,
        spans: tuple[Span, ...],
        wants_logits: tuple[int, ...],
        wants_hidden: tuple[int, ...],
        hidden: bytes | None,
    ) -> AsyncIterator[StepDone]:
        """A step, and those that go on from it while nobody comes or goes."""
        if not self._goes_on:
            number = self._num_steps + 1
            if hidden is None:
                done = await self._route.step(number, spans, wants_logits, wants_hidden)
            else:
                done = await self._route.head(number, spans, wants_logits, hidden)
            self._num_steps = number
            yield done
            return
        async with aclosing(self._route.steps(self._num_steps + 1, spans)) as steps:
            async for done in steps:
                self._num_steps += 1
                yield done

    def _apply(
        self, spans: Iterable[Span], done: StepDone, now_s: float
    ) -> list[tuple[Reply, Delta]]:
        """Take results in and hand them out; those that end, each with its last delta."""
        logits = dict(done.logits)
        ended: list[tuple[Reply, Delta]] = []
        for span, result in zip(spans, done.results, strict=True):
            reply = self._replies[span.sequence]
            reply.sequence.num_computed = span.stop
            finish = reply.advance(result, now_s)
            delta = reply.delta(result, finish, logits.get(span.sequence))
            self.num_sampled += len(delta.tokens)
            if finish is not None:
                ended.append((reply, delta))
            elif delta.tokens or delta.prompt_logprobs or delta.logits:
                self._push(reply, delta)
        return ended

    async def _end(self, reply: Reply, finish: Finish, error: Exception | None = None) -> None:
        await self._close(reply)
        self._finish(reply, finish, error)

    async def _close(self, reply: Reply) -> None:
        """Give a sequence's place on the device back."""
        if reply.sequence in self._running:
            await self._vacate(reply.sequence)
        for queue in (self._waiting, self._held):
            if reply.sequence in queue:
                queue.remove(reply.sequence)

    async def _vacate(self, sequence: Sequence, queue: list[Sequence] | None = None) -> None:
        """A sequence runs no more; it waits in a queue from now on, if there is one for it."""
        self._running.remove(sequence)
        if queue is not None:
            queue.append(sequence)
        self._refused_tokens = None
        try:
            await self._route.close(sequence.id)
        except Stopped as error:
            await self._recover(error)
        self._seam.came_free(sequence.num_computed)

    async def _recover(self, error: JitllmError, *others: Sequence) -> None:
        """What a device had computed is gone; it is computed again, from the tokens.

        others: sequences that it was occupied with besides those that run. A sequence that was
        there too often when a device died may be why.
        """
        began_s = time.perf_counter()
        lost = [*self._running, *others]
        _log.warning("%s; %d sequences begin again", error, len(lost))
        self._running.clear()
        self._refused_tokens = None
        self._wake.set()
        fatal: JitllmError | None = None if self._falls_back else error
        try:
            await self._route.recover()
        except JitllmError as last:  # and so nothing can be computed any more
            fatal = last
            lost += [s for s in (*self._waiting, *self._held) if s not in lost]
            self._held.clear()
        for sequence in lost:
            reply = self._replies[sequence.id]
            reply.losses += 1
            if self._parker.get(sequence.id) is None:  # else nothing of it was lost
                sequence.restart()
            self._mover.fell_back(sequence.id, 0)
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            if fatal is not None or reply.losses > MAX_LOSSES:
                self._finish(reply, Finish.ERROR, fatal or error)
        self._waiting[:0] = [s for s in lost if s.id in self._replies]
        self.num_losses += 1
        self._recovery_s = time.perf_counter() - began_s

    def _finish(self, reply: Reply, finish: Finish, error: Exception | None = None) -> None:
        usage = reply.usage(time.perf_counter())
        self._push(reply, Delta(finish=finish, usage=usage, error=error))
