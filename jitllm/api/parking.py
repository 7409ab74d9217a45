"""Requests that wait without pages: parking one, letting it go on, and what they hold meanwhile.

Knows the Engine port and sessions. A part of the control plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request

from jitllm.api.errors import ApiError
from jitllm.api.models import Served
from jitllm.api.openapi import REPLIES
from jitllm.api.schema import ParkRequest
from jitllm.api.service import Service, service_of
from jitllm.api.sessions import Session
from jitllm.engine import SequenceState, SessionState

router = APIRouter(prefix="/jitllm/v1", tags=["control"], responses=REPLIES)

Plain = dict[str, Any]


@router.post("/sessions/{name}/park")
async def park_session(name: str, request: Request, body: ParkRequest | None = None) -> Plain:
    """Let a request wait until it is resumed; its keys and values leave the devices.

    Answers once they are on disk, or in the memory of the host. Its stream pauses.
    """
    service = service_of(request)
    if service.is_draining:
        raise ApiError(503, "the server is shutting down", None, "draining", {"Retry-After": "5"})
    session, served = _found(service, name)
    to = (body or ParkRequest()).to or "disk"
    return session.describe() | _held(await served.engine.park(session.id, to))


@router.post("/sessions/{name}/resume")
async def resume_session(name: str, request: Request) -> Plain:
    """Let a request go on when it is its turn; nothing is computed again."""
    session, served = _found(service_of(request), name)
    return session.describe() | _held(await served.engine.resume(session.id))


async def described(service: Service, sessions: Sequence[Session]) -> list[Plain]:
    """Sessions with what their engines hold of them, as far as those answer in time."""
    models = dict.fromkeys(session.model for session in sessions)
    found = await asyncio.gather(*(_states(service, model) for model in models))
    states: dict[str, list[SessionState]] = {}
    for state in (state for of_model in found for state in of_model):
        states.setdefault(state.name, []).append(state)
    return [session.describe() | _held(states.get(session.id, ())) for session in sessions]


async def _states(service: Service, model: str) -> tuple[SessionState, ...]:
    served = service.models.get(model)
    with suppress(Exception):  # dead, closing or stuck: /healthz says which
        if served is not None:
            async with asyncio.timeout(service.limits.stats_timeout_s):
                return await served.engine.sessions()
    return ()


def _found(service: Service, name: str) -> tuple[Session, Served]:
    session = service.named(name)
    return session, service.served(session.model)


def _held(states: Iterable[SessionState]) -> Plain:
    """What a request holds; its state, where it is one that the edge does not see."""
    states = tuple(states)
    is_parked = any(state.state is SequenceState.PARKED for state in states)
    return ({"state": "parked"} if is_parked else {}) | {
        "kv_bytes": sum(state.kv_bytes for state in states),
        "parked_bytes": sum(state.parked_bytes for state in states),
        "parked_in": next((state.parked_in for state in states if state.parked_in), ""),
    }
