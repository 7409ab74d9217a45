"""GET /healthz and GET /metrics: whether a server works, and how much.

Knows snapshots of engines. An engine is well if it answers, and if its steps advance while it has
work: an actor that answers may still be stuck.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from jitllm.api.metrics import exposition
from jitllm.api.models import Served
from jitllm.api.service import Service, service_of
from jitllm.engine import EngineStats

router = APIRouter(tags=["operation"])

OK = "ok"
_DEGRADED = "degraded: "


def serves(state: str) -> bool:
    """Whether a model in this state, as `Pulse` says it, answers requests."""
    return state == OK or state.startswith(_DEGRADED)


@router.get("/healthz", responses={503: {"description": "Something is wrong, see `models`."}})
async def healthz(request: Request) -> JSONResponse:
    """200 if every model works and makes progress, else 503 and the reasons.

    A model that lost a device and goes on with the others is degraded, and works.
    """
    service = service_of(request)
    pulse: Pulse = request.app.state.pulse
    states = {served.id: await pulse.state(served) for served in service.models.list()}
    is_well = all(map(serves, states.values())) and not service.is_draining
    is_whole = all(state == OK for state in states.values())
    status = "draining" if service.is_draining else "failing" if not is_well else "degraded"
    status = OK if is_well and is_whole else status
    notes = list(service.models.notes())
    body: dict[str, Any] = {"status": status, "models": states, "notes": notes}
    return JSONResponse(body, 200 if is_well else 503)


@router.get("/health", include_in_schema=False)
async def health(request: Request) -> JSONResponse:
    """The same under another name."""
    return await healthz(request)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Counters and gauges for Prometheus."""
    service = service_of(request)
    found = await snapshot(service)
    page = exposition(service.counts, found, len(service.sessions))
    return Response(page, media_type=CONTENT_TYPE_LATEST)


async def snapshot(service: Service) -> dict[Served, EngineStats]:
    """What every engine says of itself; one that does not answer in time is left out."""

    async def ask(served: Served) -> tuple[Served, EngineStats | None]:
        try:
            async with asyncio.timeout(service.limits.stats_timeout_s):
                return served, await served.engine.stats()
        except Exception:  # dead, closing or stuck: /healthz says which
            return served, None

    answers = await asyncio.gather(*map(ask, service.models.list()))
    return {served: stats for served, stats in answers if stats is not None}


@dataclass(slots=True)
class _Seen:
    """What an engine looked like, and since when it has looked like that."""

    steps: int
    is_busy: bool
    since_s: float


class Pulse:
    """Remembers how far engines were. clock: seconds."""

    def __init__(
        self,
        timeout_s: float,
        stuck_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._stuck_after_s = stuck_after_s
        self._clock = clock
        self._seen: dict[Served, _Seen] = {}

    async def state(self, served: Served) -> str:
        """ok, or what is wrong; after "degraded: ", what is wrong and stops no request."""
        try:
            async with asyncio.timeout(self._timeout_s):
                stats = await served.engine.stats()
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except Exception as error:
            return f"dead: {error}"
        return self._progress(served, stats)

    def _progress(self, served: Served, stats: EngineStats) -> str:
        now_s, is_busy = self._clock(), stats.running + stats.waiting > 0
        seen = self._seen.get(served)
        if seen is None or not seen.is_busy or not is_busy or seen.steps != stats.steps:
            self._seen[served] = _Seen(stats.steps, is_busy, now_s)
            return _going(stats)
        stuck_s = now_s - seen.since_s
        return _going(stats) if stuck_s < self._stuck_after_s else f"no step for {stuck_s:.0f} s"


def _going(stats: EngineStats) -> str:
    """Of an engine that makes progress."""
    if not stats.lost:
        return OK
    was = "was" if len(stats.lost) == 1 else "were"
    return f"{_DEGRADED}{', '.join(stats.lost)} {was} lost; blocks are at {stats.placement}"
