"""Text completions: texts, tokens, ends, and the same whole and streamed."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from jitllm.api.schema import CompletionReply
from jitllm.engine import Finish, Outputs
from tests.api.conftest import events
from tests.api.fake import BOS, EOS, FakeEngine, FakeModels, logprob_of, served


async def ask(client: httpx.AsyncClient, prompt: Any = "Hi", **body: Any) -> Any:
    reply = await client.post(
        "/v1/completions", json={"model": "fake", "prompt": prompt, "temperature": 0} | body
    )
    assert reply.status_code == 200, reply.text
    if body.get("stream"):
        assert reply.headers["content-type"].startswith("text/event-stream")
        return events(reply.text)
    CompletionReply.model_validate_json(reply.content, strict=True)
    return reply.json()


def joined(chunks: list[Any]) -> list[dict[str, Any]]:
    """The choices of a stream, as a whole reply has them."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(
                part["index"],
                {"index": part["index"], "text": "", "finish_reason": None, "logprobs": None},
            )
            assert whole["finish_reason"] is None
            whole["text"] += part["text"]
            whole["finish_reason"] = part["finish_reason"]
            if "token_ids" in part:
                whole.setdefault("token_ids", []).extend(part["token_ids"])
            for name, values in (part["logprobs"] or {}).items():
                whole["logprobs"] = whole["logprobs"] or {}
                whole["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)]


async def test_a_reply_says_what_it_cost(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.cached_tokens = 2
    reply = await ask(client)
    [choice] = reply["choices"]
    assert choice == {"index": 0, "text": "Hello, world", "finish_reason": "stop", "logprobs": None}
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    about = reply["jitllm"]
    assert about["runtime"] == "fake"
    assert (about["queued_ms"], about["prefill_ms"], about["decode_ms"]) == (125, 250, 500)
    assert about["decode_tokens_per_second"] == 22
    assert about["restored_tokens"] == 2
    assert reply["id"].startswith("cmpl-")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_a_stop_string_ended_says_what_it_cost(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.cached_tokens = 2
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = await ask(client, stop="wor", **options)
    last = reply[-1] if stream else reply
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert last["usage"]["completion_tokens"] == 10
    about = last["jitllm"]
    assert (about["restored_tokens"], about["queued_ms"], about["prefill_ms"]) == (2, 125, 250)
    assert about["decode_ms"] > 0


@pytest.mark.parametrize("width", [1, 2, 3, 50])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"max_tokens": 5},
        {"max_tokens": 0},
        {"stop": "world"},
        {"stop": ["lo,", "xyz"]},
        {"stop": ["ldX", "o, w"], "logprobs": 2},
        {"stop": "worldly", "logprobs": 1},
        {"logprobs": 0},
        {"echo": True},
        {"echo": True, "logprobs": 3, "max_tokens": 3},
        {"echo": True, "logprobs": 3, "max_tokens": 0},
        {"n": 3, "temperature": 1, "seed": 5, "logprobs": 1},
        {"prompt": ["a", "bc", ""], "n": 2, "max_tokens": 4},
        {"prompt": [[65, 66], [67]], "echo": True, "logprobs": 1},
        {"prompt": [72, 105]},
        {"ignore_eos": True, "max_tokens": 20, "logprobs": 1},
        {"return_token_ids": True, "n": 2, "stop": "wor"},
    ],
)
async def test_a_stream_says_the_same_as_a_whole_reply(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], width: int
) -> None:
    whole = await ask(client, **body)
    engine.width = width
    chunks = await ask(client, **body, stream=True, stream_options={"include_usage": True})
    assert joined(chunks) == whole["choices"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert "seeds" in chunks[-1]["jitllm"]
    assert engine.running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_told_to_those_who_ask(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.says = "a\N{GRINNING FACE}b".encode()
    more = {"stream": stream, "max_tokens": 3}
    reply = await ask(client, return_token_ids=True, **more)
    [choice] = joined(reply) if stream else reply["choices"]
    assert choice["token_ids"] == list(engine.says[:3])
    reply = await ask(client, **more)
    assert "token_ids" not in (joined(reply) if stream else reply["choices"])[0]


async def test_without_include_usage_the_last_chunk_tells_where_it_ran(
    client: httpx.AsyncClient,
) -> None:
    chunks = await ask(client, stream=True, n=2)
    assert [chunk for chunk in chunks if "jitllm" in chunk] == [chunks[-1]]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_character_that_is_cut_is_the_same_streamed_and_whole(
    client: httpx.AsyncClient, engine: FakeEngine, cut: int, stream: bool
) -> None:
    engine.says = "a\N{GRINNING FACE}b".encode()
    reply = await ask(client, max_tokens=1 + cut, stream=stream, logprobs=0)
    [choice] = joined(reply) if stream else reply["choices"]
    assert choice["text"] == "a\ufffd"
    assert choice["finish_reason"] == "length"
    assert (
        choice["logprobs"]["tokens"]
        == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98"][: 1 + cut]
    )


@pytest.mark.parametrize("width", [1, 4, 50])
async def test_a_stop_string_ends_the_text_and_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, width: int
) -> None:
    engine.width = width
    reply = await ask(client, stop=["o, w", "ld"], logprobs=1)
    [choice] = reply["choices"]
    assert choice["text"] == "Hell"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == list("Hell")
    assert reply["usage"]["completion_tokens"] == 8
    assert engine.num_cancelled == 1
    assert engine.running == 0


async def test_what_may_be_a_stop_string_is_handed_out_when_it_is_none(
    client: httpx.AsyncClient,
) -> None:
    chunks = await ask(client, stop="ld!", stream=True)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "Hello, world"
    assert texts[-1] == "ld"


async def test_logprobs_are_lists_side_by_side(client: httpx.AsyncClient) -> None:
    reply = await ask(client, max_tokens=2, logprobs=2)
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "e"]
    assert logprobs["token_logprobs"] == pytest.approx([logprob_of(72), logprob_of(101)])
    assert list(logprobs["top_logprobs"][0]) == ["H", "I"]
    assert logprobs["text_offset"] == [0, 1]


async def test_an_echo_tells_how_likely_the_prompt_was(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    reply = await ask(client, "caf\u00e9", max_tokens=1, echo=True, logprobs=1)
    [choice] = reply["choices"]
    assert choice["text"] == "caf\u00e9H"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<bos>", *"caf", "bytes:\\xc3", "bytes:\\xa9", "H"]
    expected = [logprob_of(i) for i in (*"caf\u00e9H".encode(),)]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected)
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 3, 4]
    assert engine.requests[-1].outputs is Outputs.ALL
    assert reply["usage"]["completion_tokens"] == 1


async def test_no_token_is_a_reply_too(client: httpx.AsyncClient) -> None:
    reply = await ask(client, max_tokens=0)
    assert reply["choices"][0] == {
        "index": 0,
        "text": "",
        "finish_reason": "length",
        "logprobs": None,
    }
    assert reply["usage"]["completion_tokens"] == 0


async def test_sixteen_tokens_if_nothing_is_said(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.says = b"x" * 100
    assert (await ask(client))["usage"]["completion_tokens"] == 16


async def test_choice_i_is_the_single_request_with_seed_plus_i(client: httpx.AsyncClient) -> None:
    many = await ask(client, n=4, seed=7, temperature=1)
    assert many["jitllm"]["seeds"] == [7, 8, 9, 10]
    for i, choice in enumerate(many["choices"]):
        alone = await ask(client, seed=7 + i, temperature=1)
        assert alone["choices"][0]["text"] == choice["text"]
    assert many["usage"]["prompt_tokens"] == 3


async def test_choices_run_together(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, n=8)
    assert engine.most_running == 8


async def test_many_prompts_leave_room_for_others(models: FakeModels, engine: FakeEngine) -> None:
    from jitllm.api.app import create_app

    models.loaded["fake"] = served(engine, max_together=3)
    transport = httpx.ASGITransport(create_app(models))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await ask(client, [f"p{i}" for i in range(20)], max_tokens=2)
    assert [choice["index"] for choice in reply["choices"]] == list(range(20))
    assert engine.most_running == 3


async def test_without_a_seed_every_reply_draws_one(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await ask(client, temperature=1)
    await ask(client, temperature=1)
    first, second = (request.sampling.seed for request in engine.requests)
    assert first != second


async def test_every_sampling_field_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await ask(
        client,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=-0.3,
        seed=11,
        logit_bias={"72": -100, "5": 2.5},
        jitllm_priority="high",
        user="somebody",
    )
    [request] = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.min_p, sampling.repeat_penalty, sampling.seed) == (0.05, 1.1, 11)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.2, -0.3)
    assert sampling.logit_bias == ((72, -100), (5, 2.5))
    assert request.priority == "high"
    assert request.stop_ids == {EOS}


async def test_openais_defaults_hold(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/v1/completions", json={"model": "fake", "prompt": "x", "top_k": -1})
    [request] = engine.requests
    assert request.sampling.temperature == 1
    assert (request.sampling.top_p, request.sampling.top_k) == (1, 0)
    assert request.prompt == (BOS, ord("x"))


async def test_null_is_as_good_as_left_out(client: httpx.AsyncClient) -> None:
    nulls = dict.fromkeys(
        ("max_tokens", "stop", "seed", "n", "logprobs", "echo", "stream", "logit_bias", "suffix")
    )
    assert (await ask(client, **nulls))["choices"][0]["text"] == "Hello, world"


async def test_ignore_eos_goes_on(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = await ask(client, ignore_eos=True, max_tokens=20)
    assert reply["choices"][0]["text"] == "Hello, worldHello, "
    assert engine.requests[0].stop_ids == frozenset()


async def test_the_end_of_the_context_is_a_length(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    reply = await ask(client, [65] * (engine.context_tokens - 3), max_tokens=100)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 3


async def test_a_reply_that_the_engine_cancelled_has_stopped(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "reply", lambda request: ([72], Finish.CANCELLED))
    reply = await ask(client)
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["jitllm"]["cancelled"]


async def test_ids_differ(client: httpx.AsyncClient) -> None:
    ids = {(await ask(client))["id"] for _ in itertools.repeat(None, 5)}
    assert len(ids) == 5
