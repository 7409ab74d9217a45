"""The control plane, REST under /jitllm/v1: models, requests under way, devices.

Knows the `Models` of a server and its sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from jitllm import __version__
from jitllm.api.errors import ApiError, bad_request
from jitllm.api.health import snapshot
from jitllm.api.models import Load, Served
from jitllm.api.openapi import REPLIES
from jitllm.api.parking import described
from jitllm.api.placement import size_of
from jitllm.api.schema import DrainRequest, LoadRequest
from jitllm.api.service import Service, service_of
from jitllm.engine import EngineStats
from jitllm.units import counted

router = APIRouter(prefix="/jitllm/v1", tags=["control"], responses=REPLIES)

Plain = dict[str, Any]

_FORCE_TIMEOUT_S = 10.0
_IDLE_TIMEOUT_S = 2.0


@router.get("/models")
async def list_models(request: Request) -> Plain:
    """Every model that is loaded, and those of the cluster that the server is in."""
    service = service_of(request)
    return {
        "models": [_model(service, served) for served in service.models.list()],
        "cluster": list(await service.models.cluster()),
    }


@router.post("/models", status_code=201)
async def load_model(body: LoadRequest, request: Request) -> Plain:
    """Open a container and serve it; answers when it is ready."""
    service = service_of(request)
    if "\0" in body.path:
        raise bad_request("path: it contains a zero byte", "path")
    load = Load(
        path=Path(body.path),
        id=body.id,
        maxmem_bytes=None if body.maxmem is None else size_of(body.maxmem),
        ctx_tokens=body.ctx,
        kv_type=body.kv_type,
    )
    try:
        served = await service.models.load(load)
    except OSError as error:
        raise bad_request(f"path: {error.strerror or error}", "path") from error
    return _model(service, served)


@router.get("/models/{model_id:path}")
async def get_model(model_id: str, request: Request) -> Plain:
    """One model: what it is and what it does."""
    service = service_of(request)
    served = service.served(model_id)
    stats = await served.engine.stats()
    return {**_model(service, served), "config": served.header.config, "stats": asdict(stats)}


@router.delete("/models/{model_id:path}")
async def unload_model(model_id: str, request: Request, force: bool = False) -> Plain:
    """Close a model and give its memory back.

    One with requests under way is refused with 409; `force` ends them first, except those of
    programs that came by another way, which fail.
    """
    service = service_of(request)
    service.refuse_leaving(model_id)
    served = service.served(model_id)
    with service.leaving(served):
        if force:
            await _end_all(service, served)
        if in_use := service.sessions.list(served.id):
            raise ApiError(
                409,
                f"{served.id} is in use by {counted(len(in_use), 'request')}; wait or use force",
                "model",
            )
        if not force and await _is_used_otherwise(served):
            raise ApiError(
                409, f"{served.id} is in use by other programs; drain it or use force", "model"
            )
        await service.models.unload(served.id)
    return {"id": served.id, "unloaded": True}


@router.post("/models/{model_id:path}/drain")
async def drain_model(model_id: str, body: DrainRequest, request: Request) -> Plain:
    """Have a model refuse requests, whoever they come from, or take them again.

    Those under way go on. It may be one that another server of the cluster has.
    """
    service = service_of(request)
    elsewhere = {m["id"] for m in await service.models.cluster() if not m["is_here"]}
    if model_id in elsewhere:  # an alias of one that is here comes second
        await service.models.drain(model_id, body.draining)
    else:
        served = service.served(model_id)
        await served.engine.drain(is_draining=body.draining)
        model_id = served.id
    return {"id": model_id, "draining": body.draining}


@router.get("/sessions")
async def list_sessions(request: Request, model: str | None = None) -> Plain:
    """Requests under way, the oldest first."""
    service = service_of(request)
    model_id = None if model is None else service.served(model).id
    return {"sessions": await described(service, service.sessions.list(model_id))}


@router.get("/sessions/{name}")
async def get_session(name: str, request: Request) -> Plain:
    """One request, by the id of its reply or its x-request-id."""
    service = service_of(request)
    [found] = await described(service, [service.named(name)])
    return found


@router.post("/sessions/{name}/cancel")
async def cancel_session(name: str, request: Request) -> Plain:
    """End a request; its client gets what there is."""
    session = service_of(request).named(name)
    session.cancel()
    return {"id": session.id, "cancelled": True}


@router.get("/stats")
async def get_stats(request: Request) -> Plain:
    """A snapshot of everything."""
    service = service_of(request)
    found = await snapshot(service)
    return {
        "server": {
            "version": __version__,
            "uptime_s": time.perf_counter() - service.began_s,
            "sessions": len(service.sessions),
            "is_draining": service.is_draining,
        },
        "models": [_stats(service, served, stats) for served, stats in found.items()],
    }


@router.get("/devices")
async def list_devices(request: Request) -> Plain:
    """What could compute here, and on the other nodes of the cluster that the server is in."""
    return {"devices": list(await service_of(request).models.devices())}


async def _end_all(service: Service, served: Served) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FORCE_TIMEOUT_S):
            while sessions := service.sessions.list(served.id):
                for session in sessions:
                    session.cancel()
                await service.sessions.next_end()


async def _is_used_otherwise(served: Served) -> bool:
    """Whether requests are under way that did not come through this server."""
    is_used = False
    with contextlib.suppress(Exception):  # dead or stuck: nobody gets anything of it
        async with asyncio.timeout(_IDLE_TIMEOUT_S):
            while True:
                stats = await served.engine.stats()
                is_used = stats.running + stats.waiting + stats.parked > 0
                if not is_used:
                    break
                await asyncio.sleep(_IDLE_TIMEOUT_S / 20)  # the last of ours may have a step to go
    return is_used


def _model(service: Service, served: Served) -> Plain:
    header = served.header
    return {
        "id": served.id,
        "aliases": list(served.aliases),
        "path": str(served.path),
        "arch": header.arch,
        "blocks": len(header.blocks),
        "weight_bytes": header.weight_bytes,
        "context_tokens": served.context_tokens,
        "vocab_tokens": served.vocab_tokens,
        "chat_templates": sorted(header.chat_templates),
        "loaded_at_s": served.loaded_at_s,
        "sessions": len(service.sessions.list(served.id)),
        "where": dict(served.where),
        "notes": list(served.notes),
    }


def _stats(service: Service, served: Served, stats: EngineStats) -> Plain:
    return {
        "id": served.id,
        "sessions": len(service.sessions.list(served.id)),
        "fits": stats.pages.fits,
        **asdict(stats),
    }
