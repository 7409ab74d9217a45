"""The Engine port over a scheduler: what callers hold.

A reply is followed: one message goes, and a delta comes back for each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import reduce
from typing import TypeVar

from actors.actor import Message, Ref
from actors.mailbox import Lost, Stopped
from actors.messages.device import DeviceStats, DeviceStatsRequest, Shrink
from actors.messages.pager import PagerStats, PagerStatsRequest
from actors.messages.scheduler import (
    Arrange,
    Arranged,
    Drain,
    Move,
    Park,
    Rebudget,
    Resume,
    SchedulerStatsRequest,
    Sessions,
    SessionsRequest,
    Submit,
)
from actors.route import Site
from jitllm.engine import (
    Delta,
    DeviceUse,
    EngineStats,
    KvSpill,
    Moved,
    Pages,
    ParkedIn,
    Request,
    SchedulerStats,
    SessionState,
)
from jitllm.memory.use import PHASES, ExpertUse, Phase, PhaseUse
from jitllm.schedule.placement import Placement
from jitllm.schedule.placement_map import parse_map

R = TypeVar("R")


class Client:
    """An Engine that speaks to actors; `stop` ends the runtime behind them."""

    def __init__(
        self, scheduler: Ref, sites: Mapping[str, Site], stop: Callable[[], Awaitable[None]]
    ) -> None:
        self._scheduler = scheduler
        self._sites = dict(sites)
        self._stop = stop

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Stream the reply to `request`; see `Engine.generate`."""
        return self._scheduler.follow(Submit(request))

    async def set_budget(self, budget_bytes: int) -> Pages:
        """Change the host budget between two tokens; returns what was reached."""
        await self._scheduler.ask(Rebudget(budget_bytes))
        reached = await self._uses()
        for name, (pager, device) in reached.items():
            if device.memory is None:
                await _asked(self._sites[name].device, Shrink(pager.spare_bytes))
        return _pages(reached.values())

    async def move(
        self, blocks: Iterable[int], to: str, *, head: bool = False, is_live: bool = True
    ) -> Moved:
        """Move blocks while replies go on; see `Engine.move`."""
        moved: Moved = await self._scheduler.ask(Move(tuple(blocks), to, head, is_live))
        return moved

    async def place(self, placement: str, *, strict: bool = False) -> tuple[Moved, ...]:
        """Go to what a map says; see `Engine.place`."""
        arranged: Arranged = await self._scheduler.ask(Arrange(parse_map(placement), strict))
        return arranged.moves

    async def park(self, name: str, to: ParkedIn = "disk") -> tuple[SessionState, ...]:
        """Let a request wait without pages; see `Engine.park`."""
        parked: Sessions = await self._scheduler.ask(Park(name, to))
        return parked.states

    async def resume(self, name: str) -> tuple[SessionState, ...]:
        """Let a request go on; see `Engine.resume`."""
        resumed: Sessions = await self._scheduler.ask(Resume(name))
        return resumed.states

    async def sessions(self) -> tuple[SessionState, ...]:
        """Every sequence under way; see `Engine.sessions`."""
        sessions: Sessions = await self._scheduler.ask(SessionsRequest())
        return sessions.states

    async def drain(self, *, is_draining: bool = True) -> None:
        """Refuse requests, or take them again; see `Engine.drain`."""
        await self._scheduler.ask(Drain(is_draining))

    async def stats(self) -> EngineStats:
        """A snapshot."""
        scheduler: SchedulerStats = await self._scheduler.ask(SchedulerStatsRequest())
        uses = await self._uses()
        devices = [device for _, device in uses.values()]
        counted = {field.name: getattr(scheduler, field.name) for field in fields(scheduler)}
        counted["lost"] = tuple(n for n in self._sites if n in scheduler.lost or n not in uses)
        return EngineStats(
            **counted,
            pages=_pages(uses.values()),
            kv_bytes=sum(device.kv_bytes for device in devices),
            scratch_bytes=sum(device.scratch_bytes for device in devices),
            threads=sum(device.threads for device in devices),
            tier=devices[0].tier,
            context_tokens=devices[0].context_tokens,
            kv_idle_bytes=sum(device.kv_idle_bytes for device in devices),
            kv_spill=reduce(KvSpill.plus, (device.kv_spill for device in devices), KvSpill()),
            devices=tuple(
                _use(name, self._sites[name].node, scheduler.placement, *use)
                for name, use in uses.items()
            ),
        )

    async def _uses(self) -> dict[str, tuple[PagerStats, DeviceStats]]:
        """What is held at every device that lives. Raises `Stopped` when none does."""
        uses, error = {}, None
        for name, site in self._sites.items():
            try:
                pager = await _asked(site.pager, PagerStatsRequest())
                uses[name] = pager, await _asked(site.device, DeviceStatsRequest())
            except Stopped as stopped:
                error = stopped
        if error is not None and not uses:
            raise error
        return uses

    async def close(self) -> None:
        """Stop every actor."""
        await self._stop()


async def _asked(actor: Ref, message: Message[R]) -> R:
    """The answer of an actor, or of the one that takes its place if it dies meanwhile."""
    with suppress(Lost):
        return await actor.ask(message)
    return await actor.ask(message)


def _use(
    name: str, node: str, placement: Placement, pager: PagerStats, device: DeviceStats
) -> DeviceUse:
    use = DeviceUse(
        name=name,
        node=node,
        threads=device.threads,
        tier=device.tier,
        blocks=len(placement.blocks_on(name)),
        has_head=placement.head == name,
        placed=pager.placed,
        placed_bytes=pager.placed_bytes,
        resident=pager.resident,
        frames=min(pager.frames, pager.placed),
        page_tokens=device.page_tokens,
        kv_pages=device.kv_pages,
        kv_bytes=device.kv_bytes,
        kv_idle_bytes=device.kv_idle_bytes,
        scratch_bytes=device.scratch_bytes,
        budget_bytes=pager.budget_bytes,
        fixed_bytes=pager.fixed_bytes,
    )
    if (held := device.memory) is None:
        return use
    return replace(
        use,
        placed=held.blocks,
        placed_bytes=held.weight_bytes,
        resident=held.blocks,
        frames=held.blocks,
        budget_bytes=held.budget_bytes,
        fixed_bytes=device.scratch_bytes,
        allocated_bytes=held.allocated_bytes,
    )


def _experts(uses: Iterable[tuple[PagerStats, DeviceStats]]) -> ExpertUse | None:
    """Together; None where experts come with their blocks. Pagers are not asked for those that a
    device has in its own memory."""
    found = [
        replace(pager.experts, hits=pager.experts.hits + hits)
        for pager, device in uses
        if pager.experts is not None
        for hits in (device.memory.expert_hits if device.memory else 0,)
    ]
    return reduce(ExpertUse.plus, found) if found else None


def _phases(uses: Iterable[tuple[PagerStats, DeviceStats]]) -> dict[Phase, PhaseUse]:
    """Together; every device of a route computes with the same tokens."""
    found: dict[Phase, PhaseUse] = {phase: PhaseUse() for phase in PHASES}
    tokens: Counter[Phase] = Counter()
    for pager, device in uses:
        for phase, use in pager.phases.items():
            found[phase] = found[phase].plus(use)
        tokens["prompt"] = max(tokens["prompt"], device.prompt_tokens)
        tokens["decode"] = max(tokens["decode"], device.decode_tokens)
    return {phase: replace(use, tokens=tokens[phase]) for phase, use in found.items()}


def _pages(uses: Collection[tuple[PagerStats, DeviceStats]]) -> Pages:
    """What the pagers of a model hold and did, together; devices with memory of their own have
    blocks too."""
    all_of = [pager for pager, _ in uses]
    elsewhere = sum(device.memory.blocks for _, device in uses if device.memory)
    return Pages(
        blocks=all_of[0].blocks,
        resident=sum(pager.resident for pager in all_of) + elsewhere,
        frames=sum(min(pager.frames, pager.placed) for pager in all_of) + elsewhere,
        page_ins=sum(pager.page_ins for pager in all_of),
        evictions=sum(pager.evictions for pager in all_of),
        bytes_read=sum(pager.bytes_read for pager in all_of),
        budget_bytes=sum(pager.budget_bytes for pager in all_of),
        fixed_bytes=sum(pager.fixed_bytes for pager in all_of),
        over_budget_bytes=sum(pager.over_budget_bytes for pager in all_of),
        read_s=sum(pager.read_s for pager in all_of),
        wait_s=sum(pager.wait_s for pager in all_of),
        experts=_experts(uses),
        phases=_phases(uses),
    )
