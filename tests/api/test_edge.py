"""Around every request: keys, ids, sizes, the log; clients that leave, stall or read slowly."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from jitllm.api.answer import event
from jitllm.api.app import create_app
from jitllm.api.edge import depth_of
from jitllm.api.service import Limits
from tests.api.conftest import Call, Caller, events, until
from tests.api.fake import FakeEngine, FakeModels

TEXT = {"model": "fake", "prompt": "Hi", "temperature": 0}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}


def client_of(models: FakeModels, **limits: Any) -> httpx.AsyncClient:
    app = create_app(models, Limits(**limits))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_the_key_is_wanted_everywhere_but_for_health(models: FakeModels) -> None:
    async with client_of(models, api_key="s3cret") as client:
        for path in ("/v1/models", "/jitllm/v1/stats", "/metrics", "/docs", "/nowhere"):
            for header in ({}, {"authorization": "Bearer no"}, {"authorization": "s3cret"}):
                reply = await client.get(path, headers=header)
                assert reply.status_code == 401
                assert reply.json()["error"]["type"] == "authentication_error"
        assert (await client.get("/healthz")).status_code == 200
        key = {"authorization": "Bearer s3cret"}
        assert (await client.get("/v1/models", headers=key)).status_code == 200


async def test_a_body_over_the_limit_is_refused(models: FakeModels, engine: FakeEngine) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    headers = {"content-type": "application/json"}
    async with client_of(models, max_body_bytes=1000) as client:
        for content in (b" " * 1001, chunks()):
            reply = await client.post("/v1/completions", content=content, headers=headers)
            assert reply.status_code == 413
            assert "1000 bytes" in reply.json()["error"]["message"]
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200


async def test_a_body_that_does_not_come_is_not_waited_for(models: FakeModels) -> None:
    never = asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"{"
        await never.wait()

    headers = {"content-type": "application/json"}
    async with client_of(models, receive_timeout_s=0.01) as client:
        reply = await client.post("/v1/completions", content=chunks(), headers=headers)
    assert reply.status_code == 408


async def test_every_reply_carries_a_request_id(client: httpx.AsyncClient) -> None:
    given = await client.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    refused = await client.post("/v1/completions", json={})
    assert refused.headers["x-request-id"].startswith("req-")
    strange = await client.get("/healthz", headers={"x-request-id": "a\tb" * 100})
    assert strange.headers["x-request-id"].startswith("req-")


async def test_the_log_has_a_line_for_each_request(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "jitllm.api.access"):
        await client.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine"})
        await client.get("/%0anothing")
    first, second = (record.getMessage() for record in caplog.records if "access" in record.name)
    assert first.startswith("POST /v1/completions 200 ")
    assert "model=fake id=mine" in first
    assert second.startswith("GET /\\nnothing 404 ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("free", [0, 2])
@pytest.mark.parametrize("num", [1, 3])
async def test_a_client_that_leaves_cancels_its_request_alone(
    call: Caller, engine: FakeEngine, app: FastAPI, stream: bool, free: int, num: int
) -> None:
    engine.gate, engine.free = asyncio.Event(), free
    left = call("/v1/chat/completions", CHAT | {"stream": stream, "n": num})
    stays = call("/v1/chat/completions", CHAT)
    tasks = left.start(), stays.start()
    await until(lambda: engine.running == num + 1 and engine.steps == free * (num + 1))
    left.gone.set()
    await tasks[0]
    assert engine.running == 1
    assert engine.num_cancelled == num
    engine.gate.set()
    await tasks[1]
    assert json.loads(stays.text)["choices"][0]["message"]["content"] == "Hello, world"
    assert len(app.state.service.sessions) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_explicit_cancel_ends_a_reply_with_what_there_is(
    call: Caller, client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.gate, engine.free = asyncio.Event(), 2
    request = call("/v1/completions", TEXT | {"stream": stream, "n": 2})
    task = request.start()
    await until(lambda: engine.steps == 4)
    [session] = (await client.get("/jitllm/v1/sessions")).json()["sessions"]
    assert (session["state"], session["request_id"]) == ("running", "mine")
    assert [s["generated_tokens"] for s in session["sequences"]] == [2, 2]
    assert (await client.post("/jitllm/v1/sessions/mine/cancel")).json()["id"] == session["id"]
    await task
    assert engine.num_cancelled == 2
    if stream:
        chunks = events(request.text)
        choices = [chunk["choices"][0] for chunk in chunks]
        about = chunks[-1]["jitllm"]
    else:
        reply = json.loads(request.text)
        choices, about = reply["choices"], reply["jitllm"]
    assert "".join(c["text"] for c in choices if c["index"] == 0) == "He"
    assert choices[-1]["finish_reason"] == "stop"
    assert about["cancelled"] is True
    assert (await client.get("/jitllm/v1/sessions")).json() == {"sessions": []}
    assert (await client.post("/jitllm/v1/sessions/mine/cancel")).status_code == 404


async def test_a_slow_reader_holds_up_its_own_reply_and_no_other(
    call: Caller, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.says, engine.context_tokens = b"x" * 200, 256
    slow = call("/v1/completions", TEXT | {"stream": True, "max_tokens": 200})
    slow.may_read = asyncio.Event()
    task = slow.start()
    await slow.until(1)
    reply = await client.post("/v1/completions", json=TEXT | {"max_tokens": 5})
    assert reply.json()["choices"][0]["text"] == "xxxxx"
    assert engine.running == 1  # it has not run ahead to its end
    slow.may_read.set()
    await task
    texts = [chunk["choices"][0]["text"] for chunk in events(slow.text)]
    assert "".join(texts) == "x" * 200


async def test_a_client_that_reads_nothing_is_given_up(
    models: FakeModels, engine: FakeEngine
) -> None:
    engine.says = b"x" * 200
    app = create_app(models, Limits(send_timeout_s=0.01))
    stuck = Call(app, "/v1/completions", TEXT | {"stream": True, "max_tokens": 200})
    stuck.may_read = asyncio.Event()
    await stuck.start()
    assert engine.running == 0
    assert engine.num_cancelled == 1


async def test_a_client_that_does_not_even_read_signs_of_life_is_given_up(
    models: FakeModels, engine: FakeEngine
) -> None:
    engine.gate = asyncio.Event()
    app = create_app(models, Limits(patience_s=0.01, send_timeout_s=0.01))
    stuck = Call(app, "/v1/completions", TEXT | {"stream": True})
    stuck.may_read = asyncio.Event()
    await stuck.start()
    assert [message["type"] for message in stuck.messages] == ["http.response.start"]
    assert engine.running == 0


@pytest.mark.parametrize("num", [1, 3])
async def test_a_cancel_keeps_what_a_slow_reader_has_still_to_read(
    call: Caller, client: httpx.AsyncClient, engine: FakeEngine, num: int
) -> None:
    slow = call("/v1/completions", TEXT | {"stream": True, "n": num})
    slow.may_read = asyncio.Event()
    task = slow.start()
    await slow.until(1)
    await until(lambda: engine.steps == num)  # a piece of each waits to be read
    assert (await client.post("/jitllm/v1/sessions/mine/cancel")).status_code == 200
    slow.may_read.set()
    await task
    choices = [chunk["choices"][0] for chunk in events(slow.text)]
    for index in range(num):
        assert "".join(c["text"] for c in choices if c["index"] == index) == "H"
    assert engine.num_cancelled == num


async def test_what_fails_after_a_sign_of_life_is_said_in_the_stream(
    models: FakeModels, engine: FakeEngine
) -> None:
    engine.gate, engine.fails_at = asyncio.Event(), 0
    engine.error = RuntimeError("no")
    app = create_app(models, Limits(patience_s=0.01))
    waiting = Call(app, "/v1/completions", TEXT | {"stream": True})
    task = waiting.start()
    await waiting.until(2)
    engine.gate.set()
    await task
    assert waiting.messages[0]["status"] == 200
    [said] = events(waiting.text)
    assert said["error"]["type"] == "server_error"
    assert waiting.messages[-1]["more_body"] is False


async def test_a_long_wait_has_signs_of_life(models: FakeModels, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    app = create_app(models, Limits(patience_s=0.01))
    waiting = Call(app, "/v1/completions", TEXT | {"stream": True})
    task = waiting.start()
    await waiting.until(3)
    assert ": " in waiting.text
    engine.gate.set()
    await task
    texts = [chunk["choices"][0]["text"] for chunk in events(waiting.text)]
    assert "".join(texts) == "Hello, world"


async def test_draining_ends_what_runs_and_takes_no_more(
    call: Caller, client: httpx.AsyncClient, engine: FakeEngine, app: FastAPI
) -> None:
    engine.gate = asyncio.Event()
    request = call("/v1/completions", TEXT)
    task = request.start()
    await until(lambda: engine.running)
    service = app.state.service
    assert not await service.drain(0.01)
    refused = await client.post("/v1/completions", json=TEXT)
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert (await client.get("/healthz")).json()["status"] == "draining"
    engine.gate.set()
    assert await service.drain(10)
    await task
    assert json.loads(request.text)["choices"][0]["text"] == "Hello, world"


async def test_a_server_that_stops_hard_cancels_its_requests(
    call: Caller, engine: FakeEngine
) -> None:
    engine.gate = asyncio.Event()
    task = call("/v1/completions", TEXT | {"stream": True}).start()
    await until(lambda: engine.running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.running == 0


def test_depth_counts_brackets() -> None:
    assert depth_of([]) == 0
    assert depth_of([b"{", b"[", b"]", b"[", b"{", b"}", b"]", b"}"]) == 3


def test_limits_are_values() -> None:
    assert replace(Limits(), max_depth=3).max_depth == 3


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_events_are_json_whatever_floats_there_are(number: float) -> None:
    data = event({"number": number, "text": "é"})
    assert data == 'data: {"number":null,"text":"é"}\n\n'.encode()
