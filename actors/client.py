"""The Engine port over a scheduler: what callers hold.

One pull per client and step: `Collect` is answered when something is there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from actors.actor import Ref
from actors.mailbox import Stopped
from actors.messages import (
    Cancel,
    Collect,
    Collected,
    DeviceStats,
    DeviceStatsRequest,
    PagerStats,
    PagerStatsRequest,
    SchedulerStats,
    SchedulerStatsRequest,
    SetBudget,
    Shrink,
    Submit,
    Submitted,
)
from jitllm.engine import Delta, EngineStats, Pages, Request


class Client:
    """An Engine that speaks to actors; `stop` ends the runtime behind them."""

    def __init__(
        self, scheduler: Ref, device: Ref, pager: Ref, stop: Callable[[], Awaitable[None]]
    ) -> None:
        self._scheduler = scheduler
        self._device = device
        self._pager = pager
        self._stop = stop

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Stream the reply to `request`; see `Engine.generate`."""
        submitted: Submitted = await self._scheduler.ask(Submit(request))
        finished = False
        try:
            while not finished:
                collected: Collected = await self._scheduler.ask(Collect(submitted.request_id))
                for delta in collected.deltas:
                    finished = finished or delta.finish is not None
                    yield delta
        finally:
            if not finished:
                with suppress(Stopped):  # which has ended every request
                    await self._scheduler.tell(Cancel(submitted.request_id))

    async def set_budget(self, budget_bytes: int) -> Pages:
        """Change the host budget between two tokens; returns what was reached."""
        reached: PagerStats = await self._pager.ask(SetBudget(budget_bytes))
        await self._device.ask(Shrink(reached.spare_bytes))
        return _pages(reached)

    async def stats(self) -> EngineStats:
        """A snapshot."""
        pager: PagerStats = await self._pager.ask(PagerStatsRequest())
        device: DeviceStats = await self._device.ask(DeviceStatsRequest())
        scheduler: SchedulerStats = await self._scheduler.ask(SchedulerStatsRequest())
        return EngineStats(
            pages=_pages(pager),
            running=scheduler.running,
            waiting=scheduler.waiting,
            steps=scheduler.steps,
            kv_bytes=device.kv_bytes,
            scratch_bytes=device.scratch_bytes,
            threads=device.threads,
            tier=device.tier,
            context_tokens=device.context_tokens,
            kv_idle_bytes=device.kv_idle_bytes,
        )

    async def close(self) -> None:
        """Stop every actor."""
        await self._stop()


def _pages(pager: PagerStats) -> Pages:
    return Pages(
        blocks=pager.blocks,
        resident=pager.resident,
        frames=pager.frames,
        page_ins=pager.page_ins,
        evictions=pager.evictions,
        bytes_read=pager.bytes_read,
        budget_bytes=pager.budget_bytes,
        fixed_bytes=pager.fixed_bytes,
        over_budget_bytes=pager.over_budget_bytes,
        read_s=pager.read_s,
        wait_s=pager.wait_s,
    )
