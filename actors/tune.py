"""Trials of the seam between a GPU and the host, while replies run.

Moves blocks there and back and takes the time of the steps in between; what is faster stays. Knows
the placement, moves and seconds. Knows no request.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from actors.relocate import Mover
from actors.route import Route
from jitllm.errors import JitllmError, PlacementError
from jitllm.log import logger
from jitllm.schedule.placement import Move
from jitllm.schedule.seam_trial import NUM_QUADS, RUN_STEPS, SKIP_STEPS, SeamTrial, judge, seams

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class _Timed:
    """What a token of each reply took in a run, with so many replies."""

    num_replies: int
    seconds: float


class _Run:
    """Steps of as many replies one after the other; those right after a move do not count."""

    def __init__(self) -> None:
        self.timed: asyncio.Future[_Timed] = asyncio.get_running_loop().create_future()
        self._num_replies = 0
        self._seconds: list[float] = []

    def add(self, num_replies: int, seconds: float) -> None:
        """A step; with another number of replies all begins again."""
        if num_replies != self._num_replies:
            self._num_replies, self._seconds = num_replies, []
        self._seconds.append(seconds)
        if len(self._seconds) == SKIP_STEPS + RUN_STEPS and not self.timed.done():
            self.timed.set_result(_Timed(num_replies, median(self._seconds[SKIP_STEPS:])))


@dataclass(frozen=True, slots=True)
class _Seam:
    """Blocks of a device that may go to the host, in order, and whether the head goes with them."""

    device: str
    host: str
    blocks: tuple[int, ...]
    streamed: frozenset[int]
    has_head: bool


class Tuner:
    """The seam of the first device with memory of its own, which is tuned once."""

    def __init__(self, route: Route, mover: Mover) -> None:
        self._route = route
        self._mover = mover
        self._run: _Run | None = None
        self._is_over = False
        self.trials: tuple[SeamTrial, ...] = ()
        """Those that have been decided."""

    def observe(self, num_replies: int, seconds: float) -> None:
        """A step took so long that gave so many replies a token, and did nothing else."""
        if self._run is not None:
            self._run.add(num_replies, seconds)

    def end(self) -> None:
        """Blocks move for another reason: what was measured means nothing any more."""
        self._is_over = True
        if self._run is not None and not self._run.timed.done():
            self._run.timed.set_exception(_over())

    async def tune(self) -> None:
        """Try one seam after the other, as long as each is faster than the one before."""
        if (seam := self._seam()) is None:
            return
        try:
            for num_before, num_blocks in pairwise(seams(len(seam.blocks))):
                trial = await self._trial(seam, num_blocks, num_before)
                self.trials += (trial,)
                _log.info("%s", trial)
                if not trial.is_adopted:
                    return
                await self._go(seam, num_blocks)
        except JitllmError as error:
            _log.info("the seam of %s is tuned no further: %s", seam.device, error)

    def _seam(self) -> _Seam | None:
        route, placement = self._route, self._route.placement
        device = next((d for d in placement.devices if route.sites[d].has_memory), None)
        host = None if device is None else route.host_of(device)
        if device is None or host is None:
            return None
        pinned = placement.pinned
        blocks = tuple(sorted(placement.blocks_on(device) - pinned))
        is_all = len(blocks) == len(placement.blocks_on(device))
        has_head = is_all and placement.head == device and placement.num_blocks not in pinned
        return _Seam(device, host, blocks, placement.streamed, has_head) if blocks else None

    async def _trial(self, seam: _Seam, num_blocks: int, num_before: int) -> SeamTrial:
        """Compare two seams, in turns; at its end blocks are where they were."""
        ratios: list[float] = []
        for _ in range(2 * NUM_QUADS):  # replies that come and go spoil some
            before = await self._timed(seam, num_before)
            now = await self._timed(seam, num_blocks)
            now_again = await self._timed(seam, num_blocks)
            before_again = await self._timed(seam, num_before)
            for one, other in ((before, now), (before_again, now_again)):
                if one.num_replies == other.num_replies:
                    ratios.append(one.seconds / other.seconds)
            if len(ratios) >= 2 * NUM_QUADS:
                return judge(seam.device, num_blocks, num_before, ratios)
        raise PlacementError("replies come and go too fast for it", "tune it with fewer of them")

    async def _timed(self, seam: _Seam, num_blocks: int) -> _Timed:
        await self._go(seam, num_blocks)
        self._run = _Run()
        try:
            return await self._run.timed
        finally:
            self._run = None

    async def _go(self, seam: _Seam, num_blocks: int) -> None:
        """Have the first so many blocks on the device, and the others on the host."""
        if self._is_over:
            raise _over()
        now = self._route.placement
        stay, leave = seam.blocks[:num_blocks], seam.blocks[num_blocks:]
        out = tuple(block for block in leave if now.blocks[block] == seam.device)
        back = tuple(block for block in stay if now.blocks[block] == seam.host)
        # A head without a block on its device would cost two crossings.
        head_out = seam.has_head and not stay and now.head == seam.device
        head_back = seam.has_head and bool(stay) and now.head == seam.host
        for move in (Move(out, head_out, seam.host), Move(back, head_back, seam.device)):
            if move.blocks or move.head:
                async with self._mover.turn():
                    streamed = seam.streamed if move.to == seam.device else frozenset()
                    await self._mover.carry_out(move, streamed=streamed)


def _over() -> PlacementError:
    return PlacementError("blocks move for another reason")
