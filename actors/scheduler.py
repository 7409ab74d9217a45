"""The scheduler of one served model: its requests, a step after the other, moves and parking.

A turn reads as a sentence: admit, plan, step (`actors.admission`, `actors.stepper`). Decisions live
in `jitllm.schedule`; this actor remembers. Knows no bytes of weights or KV.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any, assert_never

from actors.actor import Actor
from actors.admission import Admission
from actors.arrange import Arranger
from actors.checks import check
from actors.departures import Departures
from actors.mailbox import Stopped
from actors.messages.device import Open
from actors.messages.scheduler import (
    Arrange,
    Arranged,
    Drain,
    Move,
    Park,
    Rebudget,
    Resume,
    SchedulerMessage,
    SchedulerStatsRequest,
    Sessions,
    SessionsRequest,
    Submit,
)
from actors.park import Parker
from actors.parts import Parts
from actors.queues import Queues
from actors.relocate import Mover
from actors.remember import PrefixCache
from actors.reply import Reply
from actors.route import Route
from actors.seam import Seam
from actors.stepper import Stepper
from jitllm.engine import (
    Delta,
    Finish,
    Outputs,
    ParkedIn,
    Priority,
    Request,
    SchedulerStats,
    SessionState,
)
from jitllm.errors import Draining, JitllmError, OutOfPages, QueueFull
from jitllm.log import logger
from jitllm.memory import prefix
from jitllm.memory.prefix_store import PrefixFolder
from jitllm.schedule import plan
from jitllm.schedule.fair import Fairness
from jitllm.schedule.placement import Decline, Placement
from jitllm.schedule.sequence import Sequence

_log = logger(__name__)


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
        def begin(work: Coroutine[Any, Any, object], name: str) -> None:
            self.context.begin(work, name)

        self._route = route
        self._mover = Mover(route, self, block_bytes, kv_bytes, move_share)
        self._arranger = Arranger(route, self._mover, declines)
        self._seam = Seam(
            route,
            self._mover,
            self,
            begin,
            relocates=relocates,
            grows_to=grows_to,
            tunes=tunes,
        )
        self._parker = Parker(route, kv_bytes, park_folder or Path(gettempdir()))
        self._budget = budget
        self._page_tokens = page_tokens
        self._max_queue = max_queue
        self._is_draining = False
        self._context_tokens = context_tokens
        self._vocab = vocab
        self._next_id = 0
        self._wake = asyncio.Event()
        self._stepping = asyncio.Lock()
        self._queues = Queues(self._forget)
        self._prefixes = PrefixCache(
            route,
            prefixes,
            self._mover.undisturbed,
            lambda: self._stepper.step_when_due(),
            begin,
            self._wake.set,
        )
        self._departures = Departures(
            self._queues,
            route,
            self._mover,
            self._parker,
            self._seam,
            self._came_free,
            falls_back=falls_back,
        )
        self._stepper = Stepper(
            self._queues, route, self._departures, self._seam, self._prefixes, budget, begin
        )
        self._admission = Admission(
            self._queues,
            route,
            self._departures,
            self._stepper,
            self._parker,
            self._prefixes,
            Fairness(fairness),
            budget,
            page_tokens,
            falls_back=falls_back,
        )

    async def on_start(self) -> None:
        """Every device learns what is its own; then begin stepping."""
        await self._route.settle()
        self.context.begin(self._prefixes.scan(), "find prefixes")
        self.context.begin(self._run(), "steps")

    async def on_stop(self) -> None:
        """Requests under way are cancelled."""
        for reply in self._queues.under_way():
            self._queues.finish(reply, Finish.CANCELLED)
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
                    self._resume(list(self._queues.held))
                return None
            case SchedulerStatsRequest():
                return self._statistics()
            case _:
                assert_never(message)

    def _statistics(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._queues.running),
            waiting=len(self._queues.waiting),
            steps=self._stepper.num_steps,
            placement=self._route.placement,
            declines=self._arranger.declines,
            moves=self._mover.num_moves,
            moved_blocks=self._mover.num_moved,
            move_totals=self._mover.totals,
            sent_home=self._seam.num_home,
            brought_back=self._seam.num_back,
            seam_trials=self._seam.trials,
            last_move=self._mover.last,
            losses=self._departures.num_losses,
            recovery_s=self._departures.recovery_s,
            lost=self._route.lost,
            is_draining=self._is_draining,
            parked=len(self._queues.held),
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
            self._admission.retry()
        self._wake.set()

    # --- requests ----------------------------------------------------------------------------

    def _submit(self, request: Request) -> Parts[Delta]:
        if self._is_draining:
            raise Draining()
        check(request, vocab=self._vocab, context_tokens=self._context_tokens)
        if not plan.has_room(
            self._queues.waiting, self._queues.running, self._budget, self._max_queue
        ):
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
        self._next_id += 1
        deltas: Parts[Delta] = Parts(partial(self._cancel, sequence.id))
        self._queues.add(Reply(request, sequence, deltas, sequence.queued_s))
        self._interrupt()
        return deltas

    def _prefix(self, request: Request, root: bytes) -> tuple[bytes, ...]:
        """Of the pages that need not be computed for it; none where all positions give outputs."""
        if not self._page_tokens or request.outputs is Outputs.ALL:
            return ()
        return prefix.reusable(request.prompt, self._page_tokens, root)

    def _cancel(self, request_id: int) -> None:
        """The client has gone: end its request between two steps."""
        if request_id in self._queues.replies:
            self._queues.cancelled.add(request_id)
            self._interrupt()

    def _interrupt(self) -> None:
        """The next step is another one than this one led to expect."""
        self._wake.set()
        self._stepper.cut()

    def _came_free(self) -> None:
        """There may be room for who was refused."""
        self._admission.retry()
        self._wake.set()

    def _forget(self, sequence: int) -> None:
        self._parker.forget(sequence)
        self._prefixes.forget(sequence)

    # --- sessions ----------------------------------------------------------------------------

    def _states(self, name: str | None = None) -> Sessions:
        """All sequences under way, or those of a request."""
        replies = self._queues.under_way()
        return Sessions(tuple(self._state(r) for r in replies if name in (None, r.request.name)))

    def _state(self, reply: Reply) -> SessionState:
        sequence = reply.sequence
        parked = self._parker.get(sequence.id)
        return SessionState(
            name=reply.request.name,
            state=self._queues.state_of(sequence),
            prompt_tokens=sequence.num_prompt,
            generated_tokens=sequence.num_generated,
            kv_bytes=sequence.num_computed * self._parker.position_bytes,
            parked_in=parked.where if parked is not None else "",
            parked_bytes=parked.num_bytes if parked is not None else 0,
        )

    async def _park_all(self, message: Park) -> Sessions:
        if self._is_draining:
            raise Draining()
        self._queues.named(message.name)
        async with self.between_steps():
            for sequence in self._queues.named(message.name):
                if sequence in self._queues.running:
                    await self._park_running(sequence, message.to)
                if sequence in self._queues.waiting:
                    self._queues.waiting.remove(sequence)
                    self._queues.held.append(sequence)
            if self._is_draining:  # meanwhile: what is parked could never end
                self._resume(list(self._queues.held))
        return self._states(message.name)

    async def _park_running(self, sequence: Sequence, to: ParkedIn) -> None:
        """Park one that runs; where a device died of it, it waits, and has nothing to be parked."""
        try:
            await self._departures.park(sequence, to, self._queues.held)
        except Stopped:
            if sequence not in self._queues.waiting:
                raise

    def _resume_all(self, name: str) -> Sessions:
        self._resume(self._queues.named(name))
        return self._states(name)

    def _resume(self, sequences: Iterable[Sequence]) -> None:
        self._queues.resume(sequences)
        self._interrupt()

    # --- what a mover needs ------------------------------------------------------------------

    def running(self) -> Seq[Sequence]:
        """See `Replies`."""
        return self._queues.running

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[float]:
        """See `Replies`."""
        self._interrupt()
        async with self._stepping:
            yield self._stepper.done_s if self._queues.running else time.perf_counter()

    async def begin_again(self, error: JitllmError, num_losses: int) -> None:
        """See `Replies`."""
        async with self.between_steps():
            # Where something runs, the next step finds out who it was.
            if not self._queues.running and self.num_losses == num_losses:
                await self._departures.recover(error)

    def opening(self, sequence: Sequence) -> Open:
        """See `Replies`."""
        return self._admission.opening(sequence)

    @property
    def num_losses(self) -> int:
        """See `Replies`."""
        return self._departures.num_losses

    @property
    def num_sampled(self) -> int:
        """See `Replies`."""
        return self._stepper.num_sampled

    # --- stepping ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except Exception as error:  # whatever it was, nobody may wait for ever
                _log.exception("a step failed")
                async with self._stepping:  # no move hands anything over meanwhile
                    for reply in self._queues.under_way():
                        if not reply.is_done:
                            await self._departures.end(reply, Finish.ERROR, error)

    async def _turn(self) -> None:
        """One step, or a wait for something to do."""
        self._wake.clear()
        async with self._stepping:
            await self._drop_cancelled()
            short = await self._admission.admit()
            spans = self._stepper.plan() if short is None else ()
            if spans:
                short = await self._stepper.step(spans)
        if short is not None:
            await self._relieve(short)
        elif not spans and not self._queues.cancelled:
            await self._wake.wait()

    async def _relieve(self, error: OutOfPages) -> None:
        """Make room on a device that had none for a reply; else that one waits until others have
        ended, or ends where there are none."""
        reply = self._queues.replies[error.sequence]
        if await self._seam.make_room(error):
            return
        async with self._stepping:
            if len(self._queues.running) > 1 and reply.sequence in self._queues.running:
                try:
                    await self._departures.park(
                        reply.sequence, "disk", self._queues.waiting, is_slice=True
                    )
                    return
                except Stopped:  # all begin again
                    return
                except JitllmError as hindrance:
                    _log.warning("a reply cannot wait for room: %s", hindrance)
            if not reply.is_done:
                await self._departures.end(reply, Finish.ERROR, self._seam.refusal(error))

    async def _drop_cancelled(self) -> None:
        for request_id in list(self._queues.cancelled):
            self._queues.cancelled.discard(request_id)
            reply = self._queues.replies.get(request_id)
            if reply is not None and not reply.is_done:
                await self._departures.end(reply, Finish.CANCELLED)
            self._queues.replies.pop(request_id, None)
