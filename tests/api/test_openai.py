"""OpenAI's own client against a real server with a tiny model."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from jitllm.cli.daemon.main import main
from tests.api.server import Server, chat_model, running
from tests.conftest import TinyModel

MODEL = "tiny"
RUNTIMES = {"embedded": [], "ray": ["-ray", "local"]}
"""What `serve` is told for each."""
USER: Any = [{"role": "user", "content": "the in an"}]


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: TinyModel) -> Path:
    return chat_model(tiny_gguf("llama"), tmp_path_factory.mktemp("chat") / "tiny-chat.jlm")


@pytest.fixture(scope="module", params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        pytest.importorskip("ray", reason="needs the extra `ray`")
    return str(request.param)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, container: Path, runtime: str
) -> Iterator[Server]:
    args = ["-load", container, "-id", MODEL, "-threads", "1", *RUNTIMES[runtime]]
    with running(tmp_path_factory.mktemp("server"), *args) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: OpenAI, **more: Any) -> Any:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "the in", "temperature": 0}
    return client.completions.create(**fields | {"max_tokens": 12} | more)


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "tiny-chat"]
    assert client.models.retrieve("tiny-chat").owned_by == "jitllm"


def test_a_completion_is_the_same_each_time_and_streamed(client: OpenAI, runtime: str) -> None:
    whole = complete(client)
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    assert complete(client).choices[0].text == whole.choices[0].text
    stream = complete(client, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert (whole.jitllm["runtime"], whole.jitllm["devices"]) == (runtime, ["cpu"])
    assert whole.jitllm["decode_tokens_per_second"] > 0


def test_a_chat_is_the_same_whole_and_streamed(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12


def test_logprobs_of_both_forms_agree(client: OpenAI) -> None:
    ids = [1, 260, 261, 262]
    reply = complete(client, prompt=ids, logprobs=3, echo=True, max_tokens=4)
    logprobs = reply.choices[0].logprobs
    assert len(logprobs.tokens) == 8
    assert logprobs.token_logprobs[0] is None
    assert all(-50 < value <= 0 for value in logprobs.token_logprobs[1:])
    for value, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
        assert max(top.values()) >= value
        assert 3 <= len(top) <= 4
    generated = logprobs.token_logprobs[4:]  # greedy: the likeliest
    assert generated == [max(top.values()) for top in logprobs.top_logprobs[4:]]
    scored = complete(client, prompt=ids, logprobs=0, echo=True, max_tokens=0)
    assert scored.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:4]
    chat = client.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, top_logprobs=2, max_tokens=3, temperature=0
    )
    assert chat.choices[0].logprobs is not None
    for entry in chat.choices[0].logprobs.content or []:
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert bytes(entry.bytes or []).decode(errors="replace") == entry.token


def test_choice_i_of_a_seeded_request_is_the_single_one_with_seed_plus_i(client: OpenAI) -> None:
    many = complete(client, n=4, seed=5, temperature=1)
    texts = [choice.text for choice in many.choices]
    alone = [complete(client, seed=5 + i, temperature=1).choices[0].text for i in range(4)]
    assert texts == alone
    assert many.jitllm["seeds"] == [5, 6, 7, 8]
    assert many.usage.completion_tokens == sum(
        complete(client, seed=5 + i, temperature=1).usage.completion_tokens for i in range(4)
    )


def test_prompts_together_are_the_prompts_alone(client: OpenAI) -> None:
    prompts = ["the", "of an", "in"]
    together = complete(client, prompt=prompts)
    alone = [complete(client, prompt=prompt).choices[0].text for prompt in prompts]
    assert [choice.text for choice in together.choices] == alone


def test_a_stop_string_cuts_whole_and_streamed(client: OpenAI) -> None:
    text = complete(client).choices[0].text
    stop = text[len(text) // 2 :][:3]
    whole = complete(client, stop=[stop])
    assert whole.choices[0].text == text[: text.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    streamed = list(complete(client, stop=[stop], stream=True))
    assert "".join(c.choices[0].text for c in streamed) == whole.choices[0].text


def test_a_bias_forbids_and_forces_tokens(client: OpenAI) -> None:
    forced = complete(client, logit_bias={"65": 100}, max_tokens=4, logprobs=0)
    assert len(set(forced.choices[0].logprobs.tokens)) == 1


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (openai.NotFoundError, {"model": "nobody"}, "model"),
        (openai.BadRequestError, {"temperature": -1}, "temperature"),
        (openai.BadRequestError, {"prompt": [5000]}, "prompt"),
        (openai.BadRequestError, {"prompt": [5] * 5000}, "prompt"),
        (openai.BadRequestError, {"suffix": "x"}, "suffix"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own_kinds(
    client: OpenAI, kind: type[openai.APIStatusError], fields: Any, param: str, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        complete(client, stream=stream, **fields)
    assert caught.value.param == param


async def test_many_at_once_get_what_they_get_alone(server: Server, client: OpenAI) -> None:
    prompts = [f"the {'an ' * i}of" for i in range(12)]
    alone = [complete(client, prompt=prompt).choices[0].text for prompt in prompts]
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as many:
        replies = await asyncio.gather(
            *(
                many.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0)
                for prompt in prompts
            )
        )
    assert [reply.choices[0].text for reply in replies] == alone


async def test_an_aborted_stream_leaves_nothing_behind(server: Server) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.completions.create(
            model=MODEL,
            prompt="the",
            max_tokens=100_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            break
        await stream.close()
    await idle(server.url)


async def idle(url: str) -> None:
    """Wait until nothing is under way."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as control:
        for _ in range(500):
            stats = (await control.get("/jitllm/v1/stats")).json()
            if not stats["server"]["sessions"] and not stats["models"][0]["running"]:
                return
            await asyncio.sleep(0.01)
    raise AssertionError(stats)


def test_a_connection_survives_its_streams(server: Server) -> None:
    body = {"model": MODEL, "prompt": "the", "max_tokens": 3, "stream": True}
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        locals = set()
        for _ in range(3):
            with client.stream("POST", "/v1/completions", json=body) as reply:
                network = reply.extensions["network_stream"]
                locals.add(network.get_extra_info("client_addr"))
                assert reply.read().endswith(b"data: [DONE]\n\n")
        assert len(locals) == 1


def test_idle_connections_do_no_harm(server: Server, client: OpenAI) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(500)]
    try:
        assert complete(client).usage.completion_tokens == 12
    finally:
        for connection in idle:
            connection.close()


Jitllmd = Callable[..., Any]


@pytest.fixture
def jitllmd(server: Server, capsys: pytest.CaptureFixture[str]) -> Jitllmd:
    """Runs a client verb against the server; its JSON, or its text."""

    def run(*args: str, code: int = 0) -> Any:
        assert main([*args, "-addr", server.url]) == code
        out, err = capsys.readouterr()
        return err if code else json.loads(out) if "-json" in args else out

    return run


def test_verbs_show_models_memory_and_devices(jitllmd: Jitllmd, container: Path) -> None:
    [model] = jitllmd("models", "-json")["models"]
    assert (model["id"], model["path"]) == (MODEL, str(container))
    assert MODEL in jitllmd("models")
    assert "llama" in jitllmd("models", MODEL)
    assert jitllmd("devices", "-json")["devices"][0]["models"] == [MODEL]
    assert "cpu" in jitllmd("devices")
    assert jitllmd("stats", "-json")["models"][0]["threads"] == 1
    assert "FITS" in jitllmd("stats")
    assert jitllmd("sessions", "-json") == {"sessions": []}
    assert "nobody" in jitllmd("models", "nobody", code=1)


def test_a_budget_below_the_model_changes_no_reply(jitllmd: Jitllmd, client: OpenAI) -> None:
    text = complete(client).choices[0].text
    before = jitllmd("place", "-model", MODEL, "-json")["pages"]
    tight = jitllmd("place", "-model", MODEL, "-maxmem", str(before["fixed_bytes"] + 1), "-json")
    assert tight["pages"]["frames"] < before["blocks"]
    assert not tight["fits"]
    assert complete(client).choices[0].text == text
    assert jitllmd("stats", "-json")["models"][0]["pages"]["page_ins"] > before["page_ins"]
    assert "PAGES" in jitllmd("stats")
    budget = str(before["budget_bytes"])
    assert "FITS" in jitllmd("place", "-model", MODEL, "-maxmem", budget)
    assert complete(client).choices[0].text == text


@pytest.fixture
def slow_replies(jitllmd: Jitllmd) -> Iterator[None]:
    """A budget of which every token reads blocks: a long reply takes seconds."""
    pages = jitllmd("place", "-model", MODEL, "-json")["pages"]
    jitllmd("place", "-model", MODEL, "-maxmem", str(pages["fixed_bytes"] + 1))
    yield
    jitllmd("place", "-model", MODEL, "-maxmem", str(pages["budget_bytes"]))


def test_a_model_is_loaded_beside_another_and_unloaded(
    jitllmd: Jitllmd, client: OpenAI, tiny_model: TinyModel
) -> None:
    path = str(tiny_model("qwen3"))
    assert "second" in jitllmd("models", "-load", path, "-id", "second")
    assert "taken" in jitllmd("models", "-load", path, "-id", "second", code=1)
    assert complete(client, model="second").usage.completion_tokens > 0
    assert jitllmd("models", "-unload", "second") == "unloaded second\n"
    with pytest.raises(openai.NotFoundError):
        complete(client, model="second")
    assert complete(client).usage.completion_tokens == 12


@pytest.mark.usefixtures("slow_replies")
def test_a_request_is_cancelled_by_name(jitllmd: Jitllmd, client: OpenAI) -> None:
    stream = complete(
        client,
        max_tokens=100_000,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"x-request-id": "endless"},
    )
    chunks = iter(stream)
    next(chunks)
    assert "endless" not in jitllmd("sessions")
    assert jitllmd("sessions", "endless", "-json")["state"] == "running"
    assert "cancelled" in jitllmd("sessions", "-cancel", "endless")
    *_, last = chunks
    assert last.choices[0].finish_reason in ("stop", "length")
    assert "under way" in jitllmd("sessions", "endless", code=1)


@pytest.mark.usefixtures("slow_replies")
def test_a_request_is_parked_and_resumed_by_name(jitllmd: Jitllmd, client: OpenAI) -> None:
    stream = complete(
        client,
        max_tokens=100_000,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"x-request-id": "patient"},
    )
    chunks = iter(stream)
    next(chunks)
    for where in ("disk", "memory"):
        assert "parked" in jitllmd("sessions", "-park", "patient", "-to", where)
        parked = jitllmd("sessions", "-park", "patient", "-json")  # it stays where it is
        assert (parked["state"], parked["parked_in"]) == ("parked", where)
        assert parked["parked_bytes"] == parked["kv_bytes"] > 0
        assert jitllmd("sessions", "patient", "-json")["state"] == "parked"
        assert jitllmd("stats", "-json")["models"][0]["kv_bytes"] == 0
        assert jitllmd("sessions", "-resume", "patient", "-json")["state"] == "running"
        while jitllmd("sessions", "patient", "-json")["parked_bytes"]:
            pass
    jitllmd("sessions", "-cancel", "patient")
    *_, last = chunks
    assert last.choices[0].finish_reason in ("stop", "length")


def test_a_signal_lets_replies_end(tmp_path: Path, container: Path) -> None:
    with running(tmp_path, "-load", container, "-id", MODEL, "-threads", "1") as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            fields: dict[str, Any] = {"ignore_eos": True}
            stream = complete(client, max_tokens=100, stream=True, extra_body=fields)
            chunks = iter(stream)
            next(chunks)
            server.process.send_signal(signal.SIGTERM)
            *_, last = chunks
            assert last.choices[0].finish_reason == "length"
        assert server.process.wait(60) == 0
        log = server.log.read_text()
        assert "POST /v1/completions 200" in log
        assert "Traceback" not in log


def test_an_address_that_is_taken_is_known_before_the_model_is_read(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    addr = server.url.removeprefix("http://")
    assert main(["serve", "-addr", addr, "-load", "/nowhere.jlm"]) == 1
    assert "cannot listen" in capsys.readouterr().err
