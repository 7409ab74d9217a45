"""The devices of one model, who of them owns what, and the way of a step through them.

Knows refs and the placement, which is the truth about who owns a block. Knows no request and no
plan.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from actors.actor import Ref
from actors.decode import results
from actors.mailbox import Lost, Stopped
from actors.messages.device import (
    Carried,
    Close,
    Cut,
    Open,
    Opened,
    Own,
    Refused,
    Step,
    StepDone,
    Steps,
    Stream,
)
from actors.messages.pager import Forget, PagerStats, PagerStatsRequest, Place, SetBudget
from jitllm.errors import JitllmError
from jitllm.schedule.place import Need, divide_budget
from jitllm.schedule.placement import Placement
from jitllm.schedule.step import Span, following

MAX_LOSSES = 3
"""Deaths of a device in a row after which it is given up."""


@dataclass(frozen=True, slots=True)
class Site:
    """A device and what belongs to it. node: where it is; handles are of use within a node.

    has_memory: its blocks lie in memory of its own, and only pass through its pager's.
    """

    device: Ref
    pager: Ref
    node: str = ""
    has_memory: bool = False


class Route:
    """Where the blocks of a model are computed. `guests`: devices that blocks are about to go to.

    Sequences are opened at every device that has a part of the model, and at guests, so that what
    is admitted while blocks move is expected at both ends. gpus_fall_back: others get the blocks of
    a device with memory of its own that does not come back.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        placement: Placement,
        budget_bytes: int,
        *,
        gpus_fall_back: bool = True,
    ) -> None:
        self._gpus_fall_back = gpus_fall_back
        self.sites = dict(sites)
        self._budget_bytes = budget_bytes
        self._placement = placement
        self._legs = placement.legs()
        self._dividing = asyncio.Lock()
        self.guests: tuple[str, ...] = ()
        self.lost: tuple[str, ...] = ()
        """Devices that did not come back after a loss."""
        self.short: tuple[str, ...] = ()
        """Devices that had no memory, in the last step, for another page of every sequence."""

    @property
    def placement(self) -> Placement:
        """Who owns what."""
        return self._placement

    @placement.setter
    def placement(self, placement: Placement) -> None:
        self._placement = placement
        self._legs = placement.legs()

    @property
    def is_single(self) -> bool:
        """Whether a step is computed by one device."""
        return len(self._legs) == 1

    @property
    def _has_experts_away(self) -> bool:
        """Whether some pager serves experts of blocks that it does not serve itself."""
        return bool(self._placement.hosted or self._placement.carded)

    def name_of(self, actor: str) -> str:
        """The device that an actor is, or whose pager it is; KeyError for another actor."""
        for name, site in self.sites.items():
            if actor in (site.device.name, site.pager.name):
                return name
        raise KeyError(actor)

    def host_of(self, name: str) -> str | None:
        """The host of a device: one that pages, of its node if there is any."""
        hosts = [host for host, site in self.sites.items() if not site.has_memory]
        near = (host for host in hosts if self.sites[host].node == self.sites[name].node)
        return next(near, hosts[0] if hosts else None)

    def owned_by(self, name: str) -> tuple[int, ...]:
        """Blocks of a device; the number after the last one stands for the head."""
        placement = self._placement
        head = (placement.num_blocks,) if placement.head == name else ()
        return (*sorted(placement.blocks_on(name)), *head)

    async def settle(self) -> None:
        """Tell every device what is its own: at the start, and after a loss."""
        for name, site in self.sites.items():
            await self.stream(name, self._placement)
            await site.device.ask(Own(self.owned_by(name), self._placement.epoch))
        await self.divide()

    async def stream(self, name: str, placement: Placement) -> Refused | None:
        """Tell a device with memory of its own which blocks pass through it."""
        site = self.sites[name]
        if not site.has_memory:
            return None
        blocks = tuple(sorted(placement.streamed & placement.blocks_on(name)))
        refused: Refused | None = await site.device.ask(Stream(blocks))
        return refused

    async def recover(self) -> None:
        """Begin again after a loss: no sequence has a seat, and every block an owner that lives.

        Devices that will not come back leave their blocks to their neighbours. Raises `Stopped`
        when there is none left, or none that may have them.
        """
        self.guests = ()
        num_losses: Counter[str] = Counter()
        while True:
            self.placement = replace(self._placement, epoch=self._placement.epoch + 1)
            try:
                await self.settle()
            except Stopped as error:
                num_losses[error.name] += 1
                # Its successor is asked next, unless there is none, or it dies again and again.
                if not isinstance(error, Lost) or num_losses[error.name] > MAX_LOSSES:
                    await self._bury(self.name_of(error.name), error)
            else:
                return

    async def _bury(self, dead: str, error: Stopped) -> None:
        """Give the blocks of a device that is no more to who is next to them on the route.

        A device that pages has room for any number of them, so one with a memory of its own gets
        some only where there is no other.
        """
        site = self.sites[dead]
        if site.has_memory and not self._gpus_fall_back:
            raise error
        if self._placement.hosted and dead == self._placement.host:
            raise error  # nobody else computes these experts
        self._give_up(dead, error)
        paging = [name for name, other in self.sites.items() if not other.has_memory]
        self.placement = self._placement.without(dead, paging or list(self.sites))
        with suppress(Stopped):  # what the dead held goes, and what it would compute with
            await site.pager.ask(Forget(site.device))
            await site.pager.ask(Place(()))  # others may read its dense region
        for other in self.sites.values():
            if other.node == site.node:  # whose memory may have been its own
                with suppress(Stopped):
                    await other.pager.ask(Forget(site.device))

    async def open(self, opening: Open) -> Opened | Refused:
        """Give a sequence a seat at every device; how many positions all of them have of it."""
        limit = opening.max_cached
        while True:
            counts = []
            for name in self._placement.devices:
                try:
                    opened = await self._device(name).ask(replace(opening, max_cached=limit))
                except Stopped:
                    raise
                except JitllmError:
                    await self.close(opening.sequence)
                    raise
                if isinstance(opened, Refused):
                    await self.close(opening.sequence)
                    return opened
                counts.append(opened.num_cached)
            limit = min(counts)
            if limit == max(counts):
                break
        await self.open_at_guests(opening)
        return Opened(opening.sequence, limit)

    async def open_at_guests(self, opening: Open) -> None:
        """Give a sequence a seat at guests; one that it has there begins again."""
        for name in self.guests:
            with suppress(Stopped):  # whose move fails then
                await self._device(name).ask(replace(opening, must_fit=True))

    async def close(self, *sequences: int) -> None:
        """Free the seats of sequences."""
        for name in self._placement.devices:
            await self._device(name).ask(Close(sequences))
        for name in self.guests:
            with suppress(Stopped):
                await self._device(name).ask(Close(sequences))

    def owners(self) -> dict[str, tuple[int, ...]]:
        """The devices of the route, and the blocks of each in ascending order; the head is none."""
        placement = self._placement
        return {name: tuple(sorted(placement.blocks_on(name))) for name in placement.devices}

    async def leave(self, name: str) -> None:
        """Free everything at a device, unless it has a part of the model."""
        for _ in range(MAX_LOSSES):
            if name not in self.sites or name in self._placement.devices:
                return
            try:
                await self._device(name).ask(Own((), self._placement.epoch))
            except Lost:  # its successor does not know what its pager serves
                continue
            except Stopped as error:  # and all it had is gone
                self._give_up(name, error)
            return

    def _give_up(self, name: str, error: Stopped) -> None:
        """Know a device no more; raises `error` if it is the last one."""
        if len(self.sites) == 1:
            raise error
        del self.sites[name]
        self.lost += (name,)

    async def steps(
        self, step_id: int, spans: tuple[Span, ...]
    ) -> AsyncGenerator[tuple[tuple[Span, ...], StepDone], None]:
        """A forward pass, and the same again with the tokens that it sampled, until there is a
        reason to plan anew; each with the spans that it computed."""
        if not self.is_single:
            yield spans, await self.step(step_id, spans, ())
            return
        leg = self._legs[0]
        first = Step(step_id, spans, leg.start, leg.stop, leg.has_head)
        async with aclosing(self._device(leg.device).follow(Steps(first))) as outcomes:
            async for outcome in outcomes:
                self.short = (leg.device,) * outcome.is_short
                done = StepDone(step_id, results(spans, outcome), ())
                yield spans, done
                step_id, spans = step_id + 1, following(spans, done.results)

    async def head(
        self, step_id: int, spans: tuple[Span, ...], logits: tuple[int, ...], hidden: bytes
    ) -> StepDone:
        """The end of a forward pass, from what its last block ended with."""
        placement = self._placement
        stop = placement.num_blocks
        step = Step(step_id, spans, stop, stop, True, hidden, logits=logits)
        done: StepDone = await self._device(placement.head).ask(step)
        return done

    async def step(
        self,
        step_id: int,
        spans: tuple[Span, ...],
        logits: tuple[int, ...],
        last_hidden: tuple[int, ...] = (),
    ) -> StepDone:
        """One forward pass, leg by leg."""
        hidden: Carried | None = None
        short: list[str] = []
        for index, leg in enumerate(self._legs):
            is_last = index + 1 == len(self._legs)
            node = self.sites[leg.device].node
            done = await self._device(leg.device).ask(
                Step(
                    step_id,
                    spans,
                    leg.start,
                    leg.stop,
                    leg.has_head,
                    hidden,
                    not is_last and self.sites[self._legs[index + 1].device].node != node,
                    logits,
                    last_hidden,
                )
            )
            hidden = done.hidden
            short += [leg.device] * done.is_short
        self.short = tuple(short)
        return done

    async def cut(self) -> None:
        """Let `steps` end."""
        if self.is_single:
            with suppress(Stopped):  # then it begins none either
                await self._device(self._legs[0].device).tell(Cut())

    async def set_budget(self, num_bytes: int) -> None:
        """Change what a model may take on each host."""
        self._budget_bytes = num_bytes
        await self.divide()

    async def divide(self, coming: Mapping[str, int] | None = None) -> None:
        """Divide what a model may take on a host among the pagers of its devices there.

        coming: bytes that devices need besides what is placed there already.
        """
        async with self._dividing:  # or two divisions would make one that adds up to neither
            await self._divide(coming or {})

    async def _divide(self, extra: Mapping[str, int]) -> None:
        num_bytes = self._budget_bytes
        nodes = {site.node for site in self.sites.values()}
        for node in nodes:
            pagers = {name: s.pager for name, s in self.sites.items() if s.node == node}
            if len(pagers) == 1:
                await next(iter(pagers.values())).ask(SetBudget(num_bytes))
                continue
            known = [(name, await self._stats(name, pager)) for name, pager in pagers.items()]
            stats = {name: s for name, s in known if s is not None}
            needs = [
                Need(
                    name,
                    s.fixed_bytes,
                    s.placed_bytes + extra.get(name, 0),
                    s.experts.all_bytes if self._has_experts_away and s.experts else 0,
                )
                for name, s in stats.items()
            ]
            shares = dict(zip(stats, divide_budget(num_bytes, needs), strict=True))
            # Who gets less goes first, so that no more than all of it is taken at any time.
            for name in sorted(stats, key=lambda name: shares[name] - stats[name].budget_bytes):
                await pagers[name].ask(SetBudget(shares[name]))

    async def _stats(self, name: str, pager: Ref) -> PagerStats | None:
        """What a pager holds; None if it will not come back, and nothing needs it."""
        try:
            stats: PagerStats = await pager.ask(PagerStatsRequest())
        except Stopped as error:
            if isinstance(error, Lost) or name in self._placement.devices:
                raise
            if name in self.sites:
                self._give_up(name, error)
            return None
        return stats

    def _device(self, name: str) -> Ref:
        return self.sites[name].device
