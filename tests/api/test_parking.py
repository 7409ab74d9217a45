"""Parking and resuming over HTTP: what is asked of the engine, and what is said about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI

from jitllm.api.service import Service
from jitllm.errors import DiskFull, JitllmError
from tests.api.conftest import Call, Caller, until
from tests.api.fake import FakeEngine

API = "/jitllm/v1"
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def under_way(call: Caller, engine: FakeEngine, **more: object) -> AsyncIterator[Call]:
    """A streamed reply in the middle of which the engine waits; called "mine" by its client."""
    engine.gate, engine.free = asyncio.Event(), 3
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **more}
    request = call(CHAT, body)
    task = request.start()
    await request.until(4)
    try:
        yield request
    finally:
        engine.gate.set()
        await task


async def test_a_session_is_parked_and_resumed_under_either_name(
    client: httpx.AsyncClient, engine: FakeEngine, call: Caller
) -> None:
    async with under_way(call, engine):
        before = (await client.get(f"{API}/sessions/mine")).json()
        assert (before["state"], before["kv_bytes"]) == ("running", 1 << 20)
        assert (before["parked_in"], before["parked_bytes"]) == ("", 0)
        assert engine.requests[0].name == before["id"]  # what the engine knows it by
        for name, body, where in (
            ("mine", None, "disk"),
            (before["id"], {"to": "memory"}, "memory"),
            ("mine", {"to": None}, "disk"),
        ):
            parked = (await client.post(f"{API}/sessions/{name}/park", json=body)).json()
            assert (parked["id"], parked["state"]) == (before["id"], "parked")
            assert (parked["parked_in"], parked["parked_bytes"]) == (where, 1 << 20)
            [listed] = (await client.get(f"{API}/sessions")).json()["sessions"]
            assert listed | {"age_s": 0} == parked | {"age_s": 0}
            resumed = (await client.post(f"{API}/sessions/{name}/resume")).json()
            assert (resumed["state"], resumed["parked_bytes"]) == ("running", 0)


async def test_all_choices_of_a_request_have_its_name(
    client: httpx.AsyncClient, engine: FakeEngine, call: Caller
) -> None:
    async with under_way(call, engine, n=3):
        parked = (await client.post(f"{API}/sessions/mine/park")).json()
        assert parked["parked_bytes"] == 3 << 20
        assert {request.name for request in engine.requests} == {parked["id"]}


async def test_what_cannot_be_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, call: Caller, app: FastAPI
) -> None:
    for verb in ("park", "resume"):
        answer = await client.post(f"{API}/sessions/no/{verb}")
        assert answer.status_code == 404
        assert "no request 'no' under way" in answer.json()["error"]["message"]
    async with under_way(call, engine):
        park = f"{API}/sessions/mine/park"
        for body in ({"to": "tape"}, {"where": "disk"}, {"to": 7}):
            answer = await client.post(park, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] in ("to", "where")
        engine.park_error = DiskFull("/somewhere", 2 << 20, 1 << 20)
        answer = await client.post(park)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "disk_full")
        engine.park_error = JitllmError("a disk is broken")
        assert (await client.post(park)).status_code == 500
        engine.park_error = None
        app.state.service.is_draining = True
        answer = await client.post(park)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")


async def test_a_drain_lets_parked_requests_go_on(
    client: httpx.AsyncClient, engine: FakeEngine, call: Caller, app: FastAPI
) -> None:
    service: Service = app.state.service
    async with under_way(call, engine):
        await client.post(f"{API}/sessions/mine/park")
        draining = asyncio.create_task(service.drain(60))
        await until(lambda: all(not state.parked_bytes for state in engine.states))
        assert service.is_draining
    assert await draining


async def test_a_parked_request_is_no_illness(
    client: httpx.AsyncClient, engine: FakeEngine, call: Caller
) -> None:
    async with under_way(call, engine):
        await client.post(f"{API}/sessions/mine/park")
        assert (await client.get("/healthz")).status_code == 200
        engine.is_dead = True  # and a listing does not depend on it
        assert (await client.get(f"{API}/sessions/mine")).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "jitllm_sessions_parked",
        "jitllm_parked_disk_bytes",
        "jitllm_parked_memory_bytes",
        "jitllm_preempt_parks_total",
        "jitllm_preempt_slices_total",
        "jitllm_preempt_resumes_total",
        "jitllm_preempt_bytes_out_total",
        "jitllm_preempt_bytes_in_total",
        "jitllm_preempt_failures_total",
        "jitllm_preempt_park_seconds_total",
        "jitllm_preempt_resume_seconds_total",
    ],
)
async def test_everything_about_parking_is_counted(client: httpx.AsyncClient, name: str) -> None:
    assert f'{name}{{model="fake"}} 0.0\n' in (await client.get("/metrics")).text
