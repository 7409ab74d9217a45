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


@router.get("/healthz", responses={503: {"description": "Something is wrong, see `models`."}})
async def healthz(request: Request) -> JSONResponse:
    """200 if every model works and makes progress, else 503 and the reasons."""
    service = service_of(request)
    pulse: Pulse = request.app.state.pulse
    states = {served.id: await pulse.state(served) for served in service.models.list()}
    is_well = all(state == "ok" for state in states.values()) and not service.is_draining
    status = "ok" if is_well else "draining" if service.is_draining else "failing"
    notes = dict.fromkeys(note for served in service.models.list() for note in served.notes)
    body: dict[str, Any] = {"status": status, "models": states, "notes": list(notes)}
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
        """ok, or what is wrong."""
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
            return "ok"
        stuck_s = now_s - seen.since_s
        return "ok" if stuck_s < self._stuck_after_s else f"no step for {stuck_s:.0f} s"
