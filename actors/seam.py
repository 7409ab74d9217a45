"""Blocks that wait at home, on the host, for room on a device: when they go and when they come.

A device with memory of its own has one budget for weights and for keys and values. Once there is no
memory for one more page of every reply, the last block of that device goes home while replies go
on; where a page is needed before that is done, they wait for it. So one block after the other,
until the pages fit. A block comes back once the replies that end, and those that run, have less
history than there was when it had to go. Blocks may also begin at home, and go to their device one
by one, a token after the other. Knows the placement and counts of positions. Knows no request, and
of bytes only who refused some.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from actors.relocate import MoveLost, Mover, Replies
from actors.route import MAX_LOSSES, Route
from actors.tune import Tuner
from jitllm.errors import JitllmError, OutOfPages
from jitllm.log import logger
from jitllm.schedule.placement import Move, Placement
from jitllm.schedule.seam_trial import SeamTrial

_log = logger(__name__)

NEVER_TRIED = 1 << 62
"""More history than there can be."""


@dataclass(frozen=True, slots=True)
class _Away:
    """What waits at home. to: where it belongs. num_tokens: so much history was too much for it.

    is_new: it was never there.
    """

    to: str
    is_streamed: bool
    num_tokens: int
    is_new: bool


class Seam:
    """The blocks of one model that went home. relocates: whether any may.

    begin: runs work beside the scheduler's handler; see `Context.begin`. grows_to: where blocks
    are to go that begin at home. tunes: find out whether a device is better off with fewer blocks.
    """

    def __init__(
        self,
        route: Route,
        mover: Mover,
        replies: Replies,
        begin: Callable[[Coroutine[Any, Any, object], str], None],
        *,
        relocates: bool,
        grows_to: Placement | None = None,
        tunes: bool = False,
    ) -> None:
        self._route = route
        self._mover = mover
        self._replies = replies
        self._begin = begin
        self._relocates = relocates
        # By block; the number after the last one is the head.
        self._away = dict(_new(route.placement, grows_to) if grows_to is not None else ())
        self._is_coming = self._is_leaving = False
        self._num_told = 0  # times that somebody said where blocks are to be
        self._may_leave = True  # the last one that was to go could
        self._num_failed = 0  # moves home in a row
        self._tuner = Tuner(route, mover)
        self._is_to_tune = tunes
        self.num_home = 0
        """Blocks that went home so far."""
        self.num_back = 0
        """Blocks that came back."""

    def forget(self) -> None:
        """Somebody says where blocks are to be: they stay there."""
        self._away.clear()
        self._num_told += 1
        self._end_tuning()

    def _end_tuning(self) -> None:
        self._is_to_tune = False
        self._tuner.end()

    @property
    def trials(self) -> tuple[SeamTrial, ...]:
        """What tuning came to so far."""
        return self._tuner.trials

    def observe(self, num_replies: int, prompt_tokens: int, seconds: float) -> None:
        """A step took so long, with so many rows of replies and so many tokens of prompts."""
        if self._route.short and self._relocates and not self._is_leaving and self._may_leave:
            self._is_leaving = True
            self._begin(self._leave(self._route.short[0]), "make room")
        if num_replies and self._away:
            self._grow()
        elif num_replies and not prompt_tokens:
            if self._is_to_tune:
                self._is_to_tune = False
                self._begin(self._tuner.tune(), "tune the seam")
            self._tuner.observe(num_replies, seconds)

    # --- home --------------------------------------------------------------------------------

    async def make_room(self, error: OutOfPages) -> bool:
        """Have the last block go home of a device that had no memory for a sequence.

        Between two steps, of which none begins meanwhile. False where no block can go; then
        nothing has changed.
        """
        if not self._relocates:
            return False
        before = self._route.placement
        async with self._mover.turn():
            if self._route.placement is not before:  # a move has ended, and there may be room
                return True
            num_tokens = self._num_held(without=error.sequence) + error.num_tokens
            name = self._route.name_of(error.device)
            return await self._send_home(name, num_tokens, is_live=False)

    async def _leave(self, name: str) -> None:
        """Have the last block of a device that is short of memory go home while replies go on."""
        before = self._route.placement
        try:
            async with self._mover.turn():
                if self._route.placement is before:
                    num_tokens = self._num_held()
                    self._may_leave = await self._send_home(name, num_tokens, is_live=True)
        finally:
            self._is_leaving = False

    async def _send_home(self, name: str, num_tokens: int, *, is_live: bool) -> bool:
        """Have the last block of a device go home, for so much history; whether one went, or
        another try makes sense."""
        if (move := self._last_of(name)) is None:
            return False
        self._end_tuning()
        placement, num_told = self._route.placement, self._num_told
        try:
            await self._mover.carry_out(move, is_live=is_live, share=1.0)
        except JitllmError as refused:
            _log.warning("%s does not go: %s", move, refused)
            self._num_failed = self._num_failed + 1 if isinstance(refused, MoveLost) else MAX_LOSSES
            return self._num_failed < MAX_LOSSES
        self._num_failed = 0
        if num_told == self._num_told:
            for part in (*move.blocks, *((placement.num_blocks,) if move.head else ())):
                is_streamed = part in placement.streamed
                self._away[part] = _Away(name, is_streamed, num_tokens, is_new=False)
        self.num_home += len(move.blocks)
        _log.info("%s, so that keys and values have room on %s", move, name)
        return True

    def _last_of(self, name: str) -> Move | None:
        """What goes next: the last block that is not pinned, and the head with the only one.

        A head without a block on its device would cost two crossings and make no room for pages.
        """
        placement, home = self._route.placement, self._route.host_of(name)
        blocks = placement.blocks_on(name)
        free = blocks - placement.pinned
        if not free or home is None:
            return None
        is_free_head = placement.head == name and placement.num_blocks not in placement.pinned
        return Move((max(free),), is_free_head and len(blocks) == 1, home)

    def refusal(self, error: OutOfPages) -> OutOfPages:
        """`error` for whoever asked, when no block could go home for it."""
        if not self._relocates:
            has_host = any(not site.has_memory for site in self._route.sites.values())
            how = "-relocate on" if has_host else "-devices with cpu"
            error.remedy = f"let its blocks go to the host ({how}), {error.remedy}"
        return error

    # --- and back ----------------------------------------------------------------------------

    def came_free(self, num_tokens: int) -> None:
        """A sequence that had so many positions has left its seats."""
        num_tokens += self._num_held()
        self._may_leave = True
        if not self._is_coming and self._next(num_tokens) is not None:
            self._is_coming = True
            self._begin(self._return(num_tokens), "bring blocks back")

    def _grow(self) -> None:
        """One block that was never at its device goes there, if none is on its way."""
        block = self._next(self._num_held())
        if block is not None and self._away[block].is_new and not self._is_coming:
            self._is_coming = True
            self._begin(self._bring_one(block), f"bring block {block}")

    async def _return(self, num_tokens: int) -> None:
        """One block after the other, as long as there is room."""
        try:
            while (block := self._next(max(num_tokens, self._num_held()))) is not None:
                if not await self._bring(block):
                    return
        finally:
            self._is_coming = False

    async def _bring_one(self, block: int) -> None:
        try:
            await self._bring(block)
        finally:
            self._is_coming = False

    def _next(self, num_tokens: int) -> int | None:
        """The first block that waits, if it was more history than this that was too much for it."""
        block = min(self._away, default=None)
        return block if block is not None and num_tokens < self._away[block].num_tokens else None

    async def _bring(self, block: int) -> bool:
        """Bring a block to its device, while replies go on; whether it waits no more."""
        away, num_blocks = self._away[block], self._route.placement.num_blocks
        both = sorted({block, num_blocks} & self._away.keys())
        parts = [part for part in both if self._away[part].to == away.to]
        if away.to not in self._route.sites:  # it was lost
            self._end_wait(parts)
            return True
        move = Move(tuple(i for i in parts if i < num_blocks), num_blocks in parts, away.to)
        streamed = frozenset((block,) if away.is_streamed else ())
        try:
            async with self._mover.turn():
                if self._away.get(block) is away:
                    await self._mover.carry_out(move, streamed=streamed)
                    self._end_wait(parts)
                    self.num_back += not away.is_new
        except JitllmError as refused:
            _log.info("%s does not go yet: %s", move, refused)
            if self._away.get(block) is away:
                self._away[block] = replace(away, num_tokens=self._num_held())
            return False
        return True

    def _end_wait(self, parts: Iterable[int]) -> None:
        for part in parts:
            self._away.pop(part, None)

    def _num_held(self, without: int = -1) -> int:
        """Positions of the sequences that run that have been computed."""
        running = self._replies.running()
        return sum(sequence.num_computed for sequence in running if sequence.id != without)


def _new(now: Placement, target: Placement) -> Iterator[tuple[int, _Away]]:
    """What is to go where it never was."""
    for index in range(now.num_blocks + 1):
        if (to := target.owner(index)) != now.owner(index):
            yield index, _Away(to, index in target.streamed, NEVER_TRIED, is_new=True)
