"""From the present placement to what a map says.

Knows maps, pins and moves. Knows no device and no bytes: what fits shows when it is moved.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.relocate import Mover
from actors.route import Route
from jitllm.engine import Moved
from jitllm.errors import JitllmError, PlacementError
from jitllm.schedule.placement import STREAM, Decline, Move, Placement
from jitllm.schedule.placement_map import PlacementMap


class Arranger:
    """The maps of one model. declined: what the first of them asked for in vain."""

    def __init__(self, route: Route, mover: Mover, declined: Iterable[Decline] = ()) -> None:
        self._route = route
        self._mover = mover
        self._declined: list[Decline] = list(declined)
        self._refused: list[tuple[Move, str]] = []

    @property
    def declines(self) -> tuple[Decline, ...]:
        """What was asked for and is not so, and why."""
        now = self._route.placement
        refused = [Decline(str(m), why) for m, why in self._refused if not _is_done(m, now)]
        return (*self._declined, *refused)

    async def arrange(self, wanted: PlacementMap, *, strict: bool) -> tuple[Moved, ...]:
        """Go there with as few moves as it takes, then set pins and marks.

        Raises `PlacementError` for a device that is not attached; if `strict`, also for everything
        else that cannot be, and what had moved has gone back then.
        """
        target, _ = self._resolved(wanted, strict=strict)
        async with self._mover.turn(self._route.placement.moves_to(target)):
            base = self._route.placement
            target, declined = self._resolved(wanted, strict=strict)
            moved: list[Moved] = []
            refused: list[tuple[Move, str]] = []
            for move in base.moves_to(target):
                try:
                    moved.append(await self._carry_out(move, target))
                except JitllmError as error:
                    if strict:
                        await self._go_back(base, error)
                        raise
                    refused.append((move, error.problem))
            declined += await self._mark(target)
            self._declined, self._refused = list(declined), refused
            return tuple(moved)

    async def _carry_out(self, move: Move, target: Placement) -> Moved:
        return await self._mover.carry_out(move, pins_hold=False, streamed=target.streamed)

    def _resolved(
        self, wanted: PlacementMap, *, strict: bool
    ) -> tuple[Placement, tuple[Decline, ...]]:
        base = self._route.placement
        return wanted.resolve(base.num_blocks, tuple(self._route.sites), base, strict=strict)

    async def _go_back(self, base: Placement, error: JitllmError) -> None:
        """Undo moves, because of `error`; if even that fails, say so."""
        try:
            for move in self._route.placement.moves_to(base):
                await self._carry_out(move, base)
        except JitllmError as another:
            raise PlacementError(
                f"{error.problem}; what had moved could not go back: {another.problem}",
                f"the blocks are at {self._route.placement}",
            ) from error

    async def _mark(self, target: Placement) -> tuple[Decline, ...]:
        """Pins and streams of `target`, for everything that is where it says; what there is no
        room for."""
        now = self._route.placement
        met = {i for i in range(now.num_blocks + 1) if now.owner(i) == target.owner(i)}
        pinned = (target.pinned & met) | (now.pinned - met)
        streamed = (target.streamed & met) | (now.streamed - met)
        marked, declines = now.marked(pinned, streamed), []
        if streamed != now.streamed:
            for name in self._route.sites:
                if await self._route.stream(name, marked) is not None:
                    there = now.blocks_on(name)
                    streamed = streamed - there | now.streamed & there
                    declines.append(Decline(f"{name} without {STREAM}", "it has no room for that"))
            marked = now.marked(pinned, streamed)
        if (pinned, streamed) != (now.pinned, now.streamed):
            self._route.placement = marked
        return tuple(declines)


def _is_done(move: Move, placement: Placement) -> bool:
    """Whether what was refused has happened since."""
    is_there = all(placement.blocks[i] == move.to for i in move.blocks)
    return is_there and (not move.head or placement.head == move.to)
