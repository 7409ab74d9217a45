"""Chat completions: templates, roles, chunks, and the same whole and streamed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jitllm.api.app import create_app
from jitllm.api.schema import ChatReply
from tests.api.conftest import events
from tests.api.fake import BOS, FakeEngine, FakeModels, logprob_of, served

USER = {"role": "user", "content": "Hi"}


async def ask(client: httpx.AsyncClient, *messages: Any, **body: Any) -> Any:
    reply = await client.post(
        "/v1/chat/completions",
        json={"model": "fake", "messages": list(messages) or [USER], "temperature": 0} | body,
    )
    assert reply.status_code == 200, reply.text
    if body.get("stream"):
        return events(reply.text)
    ChatReply.model_validate_json(reply.content, strict=True)
    return reply.json()


def prompt_of(engine: FakeEngine) -> str:
    first, *rest = engine.requests[-1].prompt
    assert first == BOS
    return bytes(rest).decode()


def joined(chunks: list[Any]) -> list[dict[str, Any]]:
    """The choices of a stream, as a whole reply has them."""
    choices: dict[int, dict[str, Any]] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        delta = part["delta"]
        if part["index"] not in choices:
            assert delta == {"role": "assistant", "content": ""}
            message = {**delta, "refusal": None}
            choices[part["index"]] = {
                "index": part["index"],
                "message": message,
                "finish_reason": None,
                "logprobs": None,
            }
        whole = choices[part["index"]]
        assert whole["finish_reason"] is None
        whole["message"]["content"] += delta.get("content", "")
        whole["finish_reason"] = part["finish_reason"]
        if "token_ids" in part:
            whole.setdefault("token_ids", []).extend(part["token_ids"])
        if part["logprobs"]:
            whole["logprobs"] = whole["logprobs"] or {"content": [], "refusal": None}
            whole["logprobs"]["content"] += part["logprobs"]["content"]
    return [choices[index] for index in sorted(choices)]


async def test_a_conversation_goes_through_the_template(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "are you?"}]
    reply = await ask(
        client,
        {"role": "developer", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None},
        {"role": "user", "content": parts},
    )
    assert prompt_of(engine) == "system: Be brief.|user: Hi|assistant: |user: How are you?|" + (
        "assistant: "
    )
    assert reply["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello, world",
        "refusal": None,
    }
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"


@pytest.mark.parametrize("width", [1, 3, 50])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"max_tokens": 0},
        {"max_completion_tokens": 4},
        {"stop": ["o, w"]},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "stop": "wor"},
        {"n": 3, "temperature": 1, "seed": 5},
        {"return_token_ids": True, "max_tokens": 5},
    ],
)
async def test_a_stream_says_the_same_as_a_whole_reply(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], width: int
) -> None:
    whole = await ask(client, **body)
    engine.width = width
    chunks = await ask(client, **body, stream=True, stream_options={"include_usage": True})
    assert joined(chunks) == whole["choices"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_logprobs_name_each_token_and_its_rivals(client: httpx.AsyncClient) -> None:
    reply = await ask(client, logprobs=True, top_logprobs=2, max_tokens=1)
    [entry] = reply["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "H"
    assert entry["bytes"] == [72]
    assert entry["logprob"] == pytest.approx(logprob_of(72))
    assert [top["token"] for top in entry["top_logprobs"]] == ["H", "I"]


async def test_without_a_limit_the_reply_may_fill_the_context(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.says = b"x" * 1000
    reply = await ask(client)
    usage = reply["usage"]
    assert usage["total_tokens"] == engine.context_tokens
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_a_base_model_does_not_chat(engine: FakeEngine) -> None:
    app = create_app(FakeModels(served(engine, chat=None)))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.post(
            "/v1/chat/completions", json={"model": "fake", "messages": [USER]}
        )
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "no_chat_template"
    assert "/v1/completions" in reply.json()["error"]["message"]


async def test_what_the_template_refuses_is_a_bad_request(client: httpx.AsyncClient) -> None:
    messages = [USER, {"role": "system", "content": "too late"}]
    reply = await client.post("/v1/chat/completions", json={"model": "fake", "messages": messages})
    assert reply.status_code == 400
    assert "system comes first" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "messages"


async def test_an_alias_is_a_name_too(engine: FakeEngine) -> None:
    app = create_app(FakeModels(served(engine, aliases=("also",))))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.post(
            "/v1/chat/completions", json={"model": "also", "messages": [USER]}
        )
        assert reply.json()["model"] == "also"
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["fake", "also"]
        assert (await client.get("/v1/models/also")).json()["max_model_len"] == 256
        assert (await client.get("/v1/models/nobody")).status_code == 404
