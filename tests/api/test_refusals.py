"""Bad input: the right status, OpenAI's shape, and the name of the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from jitllm.api.app import create_app
from jitllm.api.direct import Direct
from jitllm.errors import JitllmError, OverBudget, PlacementError
from tests.api.conftest import events
from tests.api.fake import FakeEngine, FakeModels

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "fake", "prompt": "Hi"}


def error_of(reply: httpx.Response, status: int) -> Any:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


SHARED: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 1e30),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 1.1),
    ("top_p", -1),
    ("top_k", -2),
    ("top_k", 2**40),
    ("top_k", 1.5),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("frequency_penalty", 1e9),
    ("presence_penalty", "x"),
    ("seed", 2**70),
    ("seed", 1.5),
    ("max_tokens", -1),
    ("max_tokens", 2**40),
    ("max_tokens", "5"),
    ("n", 0),
    ("n", 129),
    ("stop", ""),
    ("stop", ["a", 5]),
    ("stop", ["x"] * 17),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"999": 1}),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"what": True}),
    ("jitllm_priority", "urgent"),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {}),
    ("unheard_of", 1),
    ("model", ""),
    ("model", 5),
]


@pytest.mark.parametrize(("field", "value"), SHARED)
@pytest.mark.parametrize(("path", "good"), [("chat/completions", CHAT), ("completions", TEXT)])
async def test_a_bad_field_is_named(
    client: httpx.AsyncClient, path: str, good: dict[str, Any], field: str, value: Any
) -> None:
    error = error_of(await client.post(f"/v1/{path}", json=good | {field: value}), 400)
    named = error["param"] or error["message"]
    assert named.startswith(field) or field in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "Hi"),
        ("messages", None),
        ("messages[0].role", [{"role": "wizard", "content": "x"}]),
        ("messages[0].role", [{"role": "tool", "content": "x"}]),
        ("messages[1].content", [CHAT["messages"][0], {"role": "user", "content": 5}]),
        ("messages[0].content", [{"role": "user", "content": [{"type": "image_url"}]}]),
        ("messages[0]", [{"role": "user"}]),
        ("messages[0].tool_calls", [{"role": "assistant", "tool_calls": []}]),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", []),
        ("logprobs", 1),
        ("top_logprobs", 5),
        ("logprobs", None),
        ("max_completion_tokens", -1),
        ("prompt", "x"),
    ],
)
async def test_a_bad_field_of_a_chat_is_named(
    client: httpx.AsyncClient, field: str, value: Any
) -> None:
    name = field.partition("[")[0]
    body = CHAT | {name: value} | ({"top_logprobs": 21} if value is None else {})
    error = error_of(await client.post("/v1/chat/completions", json=body), 400)
    assert (error["param"] or error["message"]).startswith(
        field if value is not None or name == "messages" else "top_logprobs"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", []),
        ("prompt", None),
        ("prompt", 5),
        ("prompt", [[]]),
        ("prompt", ["a", 5]),
        ("prompt", [-1]),
        ("prompt", [2**40]),
        ("prompt", [258]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", ["x"] * 1025),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("echo", 1),
        ("best_of", 3),
        ("suffix", "end"),
        ("messages", []),
    ],
)
async def test_a_bad_field_of_a_completion_is_named(
    client: httpx.AsyncClient, field: str, value: Any
) -> None:
    error = error_of(await client.post("/v1/completions", json=TEXT | {field: value}), 400)
    assert (error["param"] or error["message"]).startswith(field)


NO_REQUESTS = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b'{"model": "fake", "prompt": "x", "temperature": NaN}',
    b'{"model": "fake", "prompt": "x", "temperature": Infinity}',
    b'{"model": "fake", "prompt": "x", "temperature": 1e999}',
    b'{"model": "fake", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"model": "fake", "prompt": "\\ud800"}',
    b'{"model": "\\uDFFF", "prompt": "x"}',
    b'{"model": "fake", "prompt": "\\\\\\ud83d\\ud83d\\ude00"}',
    b'{"model": "fake", "prompt": ' + b"[" * 100_000,
    b'{"a":' * 40 + b"1" + b"}" * 40,
]


@pytest.mark.parametrize("body", NO_REQUESTS)
async def test_what_is_no_request_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(await client.post("/v1/completions", content=body, headers=headers), 400)


async def test_brackets_in_texts_are_no_nesting(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/completions", json=TEXT | {"prompt": '[[{"\\' * 40})
    assert reply.status_code == 200


async def test_pairs_of_surrogates_and_what_only_looks_like_them_are_texts(
    client: httpx.AsyncClient,
) -> None:
    prompt = b'"\\ud83d\\uDE00 \\\\ud83d \\n"'
    body = b'{"model": "fake", "echo": true, "max_tokens": 0, "prompt": ' + prompt + b"}"
    headers = {"content-type": "application/json"}
    reply = await client.post("/v1/completions", content=body, headers=headers)
    assert reply.json()["choices"][0]["text"] == "\N{GRINNING FACE} \\ud83d \n"


async def test_only_json_is_a_request(client: httpx.AsyncClient) -> None:
    error_of(await client.post("/v1/completions", content=b"{}"), 400)
    headers = {"content-type": "text/plain"}
    error_of(await client.post("/v1/completions", content=b"{}", headers=headers), 400)


KINDS = [
    "application/json",
    "Application/JSON; charset=utf-8",
    "application/x+json",
    "text/json",
    "",
]


async def test_a_framework_would_have_refused_the_same(
    app: FastAPI, models: FakeModels, client: httpx.AsyncClient
) -> None:
    """FastAPI's own way to the endpoints that generate, and ours: they say the same, but for names
    and times."""
    plain = create_app(models)
    plain.user_middleware = [m for m in plain.user_middleware if m.cls is not Direct]
    good = json.dumps(TEXT | {"temperature": 0}).encode()
    bodies = [
        json.dumps(TEXT | {"temperature": 0, field: value}).encode() for field, value in SHARED
    ]
    asked = [(body, KINDS[0]) for body in (*bodies, *NO_REQUESTS)]
    asked += [(body, kind) for kind in KINDS for body in (good, b"{}", b"[1]", b"{", b"")]
    num_served = 0
    transport = httpx.ASGITransport(plain)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as other:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for body, kind in asked:
                headers = {"content-type": kind} if kind else {}
                ours = await client.post(path, content=body, headers=headers)
                theirs = await other.post(path, content=body, headers=headers)
                assert ours.status_code == theirs.status_code, body
                if ours.status_code == 200:
                    num_served += 1
                    assert ours.json()["choices"] == theirs.json()["choices"]
                elif body:  # else it is the same in other words
                    assert ours.json() == theirs.json(), body
    assert num_served == 3


async def test_an_unknown_model_is_not_found(client: httpx.AsyncClient) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", TEXT)):
        for stream in (False, True):
            error = error_of(
                await client.post(f"/v1/{path}", json=body | {"model": "no", "stream": stream}), 404
            )
            assert error["code"] == "model_not_found"
            assert "'no' does not exist; loaded: fake" in error["message"]


async def test_an_unknown_path_and_a_wrong_method(client: httpx.AsyncClient) -> None:
    error_of(await client.get("/v2/models"), 404)
    reply = await client.get("/v1/completions")
    error_of(reply, 405)
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    reply = await client.post(
        "/v1/completions", json=TEXT | {"prompt": [65] * 300} | {"stream": stream}
    )
    error = error_of(reply, 400)
    assert "300 tokens" in error["message"]
    assert "256" in error["message"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    long = [{"role": "user", "content": "x" * 300}]
    error = error_of(
        await client.post("/v1/chat/completions", json=CHAT | {"messages": long, "stream": stream}),
        400,
    )
    assert error["param"] == "messages"
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_status_with_retry_after(
    client: httpx.AsyncClient, engine: FakeEngine, models: FakeModels, stream: bool
) -> None:
    engine.max_queue = 0
    reply = await client.post("/v1/completions", json=TEXT | {"n": 3, "stream": stream})
    error = error_of(reply, 429)
    assert error["type"] == "rate_limit_error"
    assert reply.headers["retry-after"] == "3"
    assert engine.running == 0
    page = (await client.get("/metrics")).text
    assert 'jitllm_requests_refused_total{model="fake"} 1.0' in page
    assert 'jitllm_requests_in_flight{model="fake"} 0.0' in page


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_that_find_the_queue_full_wait_for_those_that_got_in(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    body = TEXT | {"n": 5, "stream": stream, "temperature": 1, "seed": 3}
    expected = (await client.post("/v1/completions", json=body)).text
    engine.max_queue, engine.most_running = 2, 0
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200
    assert engine.most_running == 2
    assert texts(reply.text, stream) == texts(expected, stream)


def texts(reply: str, stream: bool) -> dict[int, str]:
    """The text of each choice."""
    bodies = events(reply) if stream else [json.loads(reply)]
    found: dict[int, str] = {}
    for choice in (choice for body in bodies for choice in body["choices"]):
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


@pytest.mark.parametrize(
    ("failure", "status", "said"),
    [
        (OverBudget("a sequence", 2 << 20, 1 << 20), 503, "raise -maxmem"),
        (PlacementError("block 3 is pinned", "unpin it"), 409, "block 3 is pinned; unpin it"),
        (JitllmError("the disk has gone", "mount it"), 500, "the disk has gone; mount it"),
        (RuntimeError("secret"), 500, "its log says which"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_a_status(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    failure: Exception,
    status: int,
    said: str,
    stream: bool,
) -> None:
    engine.fails_at, engine.error = 0, failure
    reply = await client.post("/v1/completions", json=TEXT | {"stream": stream})
    error = error_of(reply, status)
    assert said in error["message"]
    assert "secret" not in reply.text


async def test_a_failure_in_a_stream_is_an_event(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.fails_at, engine.error = 2, JitllmError("the disk has gone")
    reply = await client.post("/v1/completions", json=TEXT | {"stream": True, "temperature": 0})
    assert reply.status_code == 200
    *chunks, last = events(reply.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "He"
    assert last["error"]["message"] == "the disk has gone"
    assert last["error"]["type"] == "server_error"
