"""`jitllm.connect`: the same answers from a file and from a server, and the same refusals."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest

import jitllm
from jitllm.cli.daemon.main import main
from jitllm.config import EngineConfig
from jitllm.engine import Finish, Priority, Sampling
from jitllm.errors import BadContainer, JitllmError, UsageError
from jitllm.handle import Completion, Handle
from jitllm.handle.base import Asked, TextDelta
from jitllm.remote import ServerError
from tests.api.server import Server, chat_model, running
from tests.conftest import TinyModel

MODEL = "tiny"
PROMPTS: list[Any] = [
    "the in an",
    [1, 260, 261, 262],
    [{"role": "user", "content": "the in an"}],
]


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: TinyModel) -> Path:
    return chat_model(tiny_gguf("llama"), tmp_path_factory.mktemp("handle") / "tiny.jlm")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, container: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with running(folder, "-load", container, "-id", MODEL, "-threads", "1") as server:
        yield server


def connected(kind: str, server: Server, container: Path) -> jitllm.handle.Connecting:
    if kind == "http":
        return jitllm.connect(server.url)
    return jitllm.connect(container, config=EngineConfig(threads=1))


@pytest.fixture(params=["embedded", "http"])
async def model(
    request: pytest.FixtureRequest, server: Server, container: Path
) -> AsyncIterator[Handle]:
    async with connected(request.param, server, container) as handle:
        yield handle


@pytest.fixture
async def both(server: Server, container: Path) -> AsyncIterator[tuple[Handle, Handle]]:
    async with connected("embedded", server, container) as here, jitllm.connect(server.url) as far:
        yield here, far


async def deltas_of(model: Handle, prompt: Any, **settings: Any) -> list[TextDelta]:
    return [delta async for delta in model.generate(prompt, **settings)]


async def test_a_model_answers_the_same_wherever_it_is(both: tuple[Handle, Handle]) -> None:
    here, far = both
    assert here.name == far.name == MODEL
    for prompt in PROMPTS:
        for settings in (
            {"max_tokens": 12},
            {"max_tokens": 12, "temperature": 0.9, "seed": 3, "top_k": 40, "repeat_penalty": 1.3},
            {"max_tokens": 12, "logit_bias": {260: 5.0}, "ignore_eos": True},
        ):
            one, other = [await m.complete(prompt, **settings) for m in both]  # type: ignore[arg-type]
            assert (one.text, one.tokens, one.finish) == (other.text, other.tokens, other.finish)
            assert one.usage.prompt_tokens == other.usage.prompt_tokens
            assert one.usage.generated_tokens == other.usage.generated_tokens == len(one.tokens)


async def test_without_a_limit_a_reply_goes_on(both: tuple[Handle, Handle]) -> None:
    lengths = {len((await model.complete("the in", ignore_eos=True)).tokens) for model in both}
    assert lengths == {(await both[0].stats()).context_tokens - 3}


async def test_deltas_add_up_to_the_completion(model: Handle) -> None:
    whole = await model.complete("the in an", max_tokens=9, id="whole")
    deltas = await deltas_of(model, "the in an", max_tokens=9)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.tokens) == whole.tokens
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish is whole.finish is Finish.LENGTH
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.generated_tokens == 9
    assert whole.id == "whole"
    assert len({delta.id for delta in deltas}) == 1


async def test_a_text_starts_a_conversation(model: Handle) -> None:
    short = await model.chat("the in an", max_tokens=5)
    turns = [{"role": "user", "content": "the in an"}]
    assert short.tokens == (await model.chat(turns, max_tokens=5)).tokens
    assert short.usage.prompt_tokens > (await model.complete("the in an")).usage.prompt_tokens


async def test_replies_with_another_salt_share_nothing(model: Handle) -> None:
    ids = list(range(20, 160))
    cached = [
        (await model.complete(ids, max_tokens=1, cache_salt=salt)).usage.cached_tokens
        for salt in ("one", "one", "two", "one", "two")
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] == cached[4] == 128


async def test_a_stop_string_ends_the_text(model: Handle) -> None:
    whole = await model.complete("the in an", max_tokens=12)
    stop = whole.text[3:6]
    cut = await model.complete("the in an", max_tokens=12, stop=stop)
    assert cut.finish is Finish.STOP
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.tokens == whole.tokens[: len(cut.tokens)]


async def test_a_reply_is_cancelled_by_its_name(model: Handle) -> None:
    whole = (await model.complete("the in an", ignore_eos=True)).tokens
    got: list[int] = []
    async with aclosing(model.generate("the in an", ignore_eos=True, id="mine")) as deltas:
        async for delta in deltas:
            if not got and delta.tokens:
                await model.cancel("mine")
            got += delta.tokens
    assert delta.finish in (Finish.CANCELLED, Finish.LENGTH)  # it may have been faster
    assert tuple(got) == whole[: len(got)]
    with pytest.raises(JitllmError, match="no request 'mine'"):
        await model.cancel("mine")


@pytest.mark.parametrize("to", ["disk", "memory"])
async def test_a_reply_is_parked_and_resumed_by_its_name(model: Handle, to: Any) -> None:
    whole = (await model.complete("the in an", ignore_eos=True)).tokens
    before = (await model.stats()).park_totals
    got: list[int] = []
    is_parked = False
    async with aclosing(model.generate("the in an", ignore_eos=True, id="mine")) as deltas:
        async for delta in deltas:
            if not got and delta.tokens:
                with suppress(JitllmError):  # it may have been faster
                    await model.park("mine", to)
                    is_parked = (await model.stats()).parked == 1
                    await model.resume("mine")
            got += delta.tokens
    assert tuple(got) == whole
    after = (await model.stats()).park_totals
    assert (after.parks - before.parks, after.resumes - before.resumes) == (is_parked, is_parked)
    for verb in (model.park, model.resume):
        with pytest.raises(JitllmError, match="no request 'mine'"):
            await verb("mine")


async def test_who_reads_no_more_keeps_no_reply_running(model: Handle) -> None:
    async with aclosing(model.generate("the in an", ignore_eos=True)) as deltas:
        await anext(deltas)
    for _ in range(2000):
        if not (await model.stats()).running:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it still runs")


async def test_many_replies_at_once_are_those_of_each_alone(model: Handle) -> None:
    prompts = [[1, 260 + i, 261] for i in range(8)]
    alone = [(await model.complete(prompt, max_tokens=10)).tokens for prompt in prompts]
    together = await asyncio.gather(*(model.complete(p, max_tokens=10) for p in prompts))
    assert [reply.tokens for reply in together] == alone


async def test_a_lower_budget_pages_and_changes_nothing(
    both: tuple[Handle, Handle],
) -> None:
    for model in both:
        before = await model.complete("the in an", max_tokens=12)
        free = (await model.stats()).pages
        try:
            tight = await model.place(maxmem=free.fixed_bytes + 1)
            assert tight.frames == 1
            assert (await model.complete("the in an", max_tokens=12)).tokens == before.tokens
            stats = await model.stats()
            assert stats.pages.page_ins >= free.page_ins + 12 * (free.blocks - 1)
            assert stats.pages.budget_bytes == free.fixed_bytes + 1
            assert stats.steps > 0
        finally:
            await model.place(maxmem="1G")


@pytest.mark.parametrize(
    ("prompt", "settings", "said"),
    [
        ("x", {"temprature": 1}, "no setting 'temprature'"),
        ("x", {"priority": "urgent"}, "'urgent' is no priority"),
        ("x", {"id": "a b"}, "is no id"),
        ("x", {"max_tokens": -1}, "max_tokens"),
        ("x", {"logit_bias": {10**6: 1.0}}, "logit_bias: token"),
        ([1, 10**6], {}, "token"),
        ([], {}, "the prompt is empty"),
        ([1, {"role": "user"}], {}, "a prompt is a text, token ids, or"),
        (["a"], {}, "a prompt is a text, token ids, or"),
        ([1] * 5000, {}, "5000 tokens"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_name(
    model: Handle, prompt: Any, settings: Any, said: str
) -> None:
    with pytest.raises(JitllmError, match=said):
        await model.complete(prompt, **settings)
    assert (await model.complete("the", max_tokens=1)).tokens  # and nothing is broken


async def test_two_replies_under_way_have_two_names(container: Path) -> None:
    async with (
        jitllm.connect(container, config=EngineConfig(threads=1)) as model,
        aclosing(model.generate("the", ignore_eos=True, id="a")) as deltas,
    ):
        await anext(deltas)
        with pytest.raises(UsageError, match="'a' is under way"):
            await model.complete("the", id="a")


async def test_a_base_model_does_not_chat(tiny_model: TinyModel) -> None:
    async with jitllm.connect(tiny_model("llama"), config=EngineConfig(threads=1)) as model:
        assert (await model.complete("the", max_tokens=1)).tokens
        with pytest.raises(JitllmError, match="no chat template"):
            await model.chat("hello")
        await model.close()
        await model.close()


@pytest.mark.parametrize("kind", ["embedded", "http"])
def test_without_an_event_loop_it_says_the_same(kind: str, server: Server, container: Path) -> None:
    async def asked() -> Completion:
        async with connected(kind, server, container) as model:
            return await model.complete("the in an", max_tokens=9)

    expected = asyncio.run(asked())
    target = server.url if kind == "http" else container
    with jitllm.connect_sync(target) as model:
        assert model.name == MODEL
        assert model.complete("the in an", max_tokens=9).tokens == expected.tokens
        deltas = list(model.generate("the in an", max_tokens=9))
        assert "".join(delta.text for delta in deltas) == expected.text
        for _ in model.generate("the in an", id="left"):
            break
        assert model.chat("the", max_tokens=2).usage.generated_tokens == 2
        assert model.place(maxmem="1G").budget_bytes == 1 << 30
        assert model.stats().pages.blocks > 1
        with pytest.raises(JitllmError):
            model.cancel("nobody")
    model.close()


async def test_an_address_says_what_kind_it_is(container: Path, server: Server) -> None:
    for bad in (
        lambda: jitllm.connect(container, api_key="x"),
        lambda: jitllm.connect(container, model="m"),
        lambda: jitllm.connect("ray:auto", maxmem="1G"),
        lambda: jitllm.connect("ray:auto", model="a name", config=EngineConfig()),
        lambda: jitllm.connect(server.url, maxmem="1G"),
        lambda: jitllm.connect(server.url, config=EngineConfig()),
    ):
        with pytest.raises(UsageError):
            bad()
    for nobody in ("http://", "http://:80", "http://x:y"):
        with pytest.raises(UsageError, match="no address"):
            await jitllm.connect(nobody)
    with pytest.raises(ServerError, match="'other' does not exist") as refused:
        await jitllm.connect(server.url, model="other")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    with pytest.raises(BadContainer, match="check the path"):
        await jitllm.connect("no-such-file.jlm")


def test_settings_become_what_the_engine_knows() -> None:
    asked = Asked.of({"temperature": 0.5, "top_k": 3, "logit_bias": {7: -1.0}, "stop": ["a", "b"]})
    assert asked.sampling == Sampling(temperature=0.5, top_k=3, logit_bias=((7, -1.0),))
    assert (asked.stops, asked.max_tokens, asked.priority) == (("a", "b"), None, Priority.NORMAL)
    assert Asked.of({}).sampling == Sampling()


# ------------------------------------------------------------------------------- jitllmd run


def test_a_prompt_on_the_command_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    for more in ([], ["-json"], ["-chat", "-system", "be", "-model", MODEL, "-stop", "\n"]):
        assert main(["run", "-addr", server.url, "-n", "6", "-seed", "3", *more, "the", "in"]) == 0
        out, err = capsys.readouterr()
        said.append(out)
        assert "decode" in err
        assert "queued" in err
    report = json.loads(said[1])
    assert report["text"] == said[0].removesuffix("\n")
    assert len(report["ids"]) == report["usage"]["generated_tokens"] == 6
    assert report["finish"] == "length"


def test_a_command_line_without_a_prompt_or_a_model(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, said, code in (
        (["-system", "x", "hello"], "-system needs -chat", 2),
        (["-model", "other", "hello"], "does not exist", 1),
        (["-temp", "-1", "hello"], "-temp -1.0 makes no sense", 2),
    ):
        assert main(["run", "-addr", server.url, *args]) == code
        assert said in capsys.readouterr().err


async def test_ctrl_c_hangs_up_and_leaves_what_came() -> None:
    chunk = {"choices": [{"index": 0, "text": "so far", "token_ids": [5], "finish_reason": None}]}
    event = f"data: {json.dumps(chunk)}\n\n".encode()
    has_gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        is_listing = head.startswith(b"GET")
        body = b'{"id": "m"}' if is_listing else event
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)
        await writer.drain()
        while not is_listing and await reader.read(1000):
            pass
        writer.close()
        if not is_listing:
            has_gone.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "jitllm.cli.daemon.main", "run", "-model", "m"),
            *("-addr", f":{port}", "hello"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert await process.stdout.readexactly(6) == b"so far"
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
            await has_gone.wait()
    assert (process.returncode, out) == (130, b"\n")
    assert b"cancelled after 1 token\n" in err
