"""Programs and servers of one cluster find each other's models, whoever comes, goes or dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, cast

import psutil
import pytest
from ray.util import list_named_actors

import jitllm
from actors.cluster import Cluster
from actors.mailbox import Stopped
from jitllm.compose import Member, membership
from jitllm.config import EngineConfig
from jitllm.errors import Draining, JitllmError, UsageError
from jitllm.handle import Handle
from tests.api.server import chat_model
from tests.cluster.test_engine import process_of
from tests.conftest import TinyModel

PROMPT = "the in an"
CONFIG = EngineConfig(threads=1)

PROGRAM = """
import asyncio, sys
import jitllm

async def main(where, model):
    async with jitllm.connect(where, model=model) as handle:
        reply = await handle.complete("the in an", max_tokens=12)
        print(handle.name, *reply.tokens, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: TinyModel) -> Path:
    return chat_model(tiny_gguf("llama"), tmp_path_factory.mktemp("model") / "tiny.jlm")


@contextmanager
def program(cluster: Cluster, model: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has a model of the cluster until its stdin ends."""
    command = [sys.executable, "-c", PROGRAM, f"ray://{cluster.address}", str(model)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_AUTH_MODE": "token"},
    ) as process:
        try:
            yield process
            process.communicate(timeout=60)
        finally:
            process.kill()


async def said(process: subprocess.Popen[str]) -> tuple[str, list[int]]:
    """What a program calls its model, and the tokens of its reply."""
    line = await asyncio.to_thread(cast(IO[str], process.stdout).readline)
    name, *tokens = line.split()
    return name, list(map(int, tokens))


async def expected(container: Path) -> list[int]:
    async with jitllm.connect(container, config=CONFIG) as model:
        return await tokens_of(model)


async def tokens_of(model: Handle) -> list[int]:
    return list((await model.complete(PROMPT, max_tokens=12)).tokens)


async def names(member: Member) -> list[str]:
    return [model.name for model in await member.models()]


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Handle]:
    async with jitllm.connect("ray:local", model=path, config=CONFIG) as model:
        yield model


async def until_nothing_is_named() -> None:
    while list_named_actors(all_namespaces=True):  # noqa: ASYNC110 - the test's own limit ends it
        await asyncio.sleep(0.05)


async def test_two_programs_share_one_model_and_its_answers(
    cluster: Cluster, container: Path
) -> None:
    tokens = await expected(container)
    async with opened(container) as model:
        before = set(psutil.Process().children(recursive=True))
        with program(cluster, "tiny") as one, program(cluster, "tiny") as other:
            assert await asyncio.gather(said(one), said(other)) == [("tiny", tokens)] * 2
            assert await tokens_of(model) == tokens
            named = {actor["name"] for actor in list_named_actors(all_namespaces=True)}
            actors = ("device:cpu:0", "pager:cpu:0", "scheduler")
            assert named == {"jitllm:manager", *(f"jitllm:tiny:{actor}" for actor in actors)}
        assert await tokens_of(model) == tokens  # they let go, and ended nothing
        left = set(psutil.Process().children(recursive=True)) - before
        assert not [process for process in left if "ActorProcess" in process.name()]
    await until_nothing_is_named()


async def test_a_model_is_attached_to_by_name_or_because_it_is_the_only_one(
    cluster: Cluster, container: Path
) -> None:
    with pytest.raises(UsageError, match="no model 'tiny'; there are: none"):
        await jitllm.connect("ray:local", model="tiny")
    async with opened(container) as model, opened(container) as copy:
        assert (model.name, copy.name) == ("tiny", "tiny-2")
        with pytest.raises(UsageError, match=r"say model=\.\.\.; there are: tiny, tiny-2"):
            await jitllm.connect("ray:local")
        with pytest.raises(UsageError, match=r"use place\(maxmem=...\), or name a container"):
            jitllm.connect("ray:local", model="tiny", maxmem="1G")
        async with jitllm.connect("ray:local", model="tiny-2") as attached:
            assert attached.name == "tiny-2"
            await attached.place(maxmem="1G")
            assert (await copy.stats()).pages.budget_bytes == 1 << 30
            assert (await model.stats()).pages.budget_bytes != 1 << 30
        await copy.close()
        async with jitllm.connect("ray:local") as attached:
            assert attached.name == "tiny"
            await model.close()
            with pytest.raises(Stopped, match="tiny:scheduler has stopped"):
                await tokens_of(attached)


async def test_another_file_under_the_path_of_a_model_is_noticed(
    cluster: Cluster, container: Path, tmp_path: Path, tiny_gguf: TinyModel
) -> None:
    path = chat_model(tiny_gguf("llama"), tmp_path / "tiny.jlm")
    async with opened(path):
        chat_model(tiny_gguf("gemma3"), path)
        with pytest.raises(JitllmError, match=r"tiny.jlm is another model here than the one"):
            await jitllm.connect("ray:local", model="tiny")


async def test_a_model_that_drains_refuses_every_program(cluster: Cluster, container: Path) -> None:
    async with (
        opened(container) as model,
        membership("local") as member,
        jitllm.connect("ray:local", model="tiny") as attached,
    ):
        under_way = model.generate(PROMPT, max_tokens=200, ignore_eos=True)
        first = await anext(under_way)
        await member.drain("tiny")
        [listed] = await member.models()
        assert listed.state == "draining"
        for handle in (model, attached):
            with pytest.raises(Draining, match="takes no more requests"):
                await tokens_of(handle)
        rest = [token async for delta in under_way for token in delta.tokens]
        assert len([*first.tokens, *rest]) == 200
        await member.drain("tiny", is_draining=False)
        assert await tokens_of(attached) == await tokens_of(model)


async def test_the_manager_goes_on_when_its_process_dies(cluster: Cluster, container: Path) -> None:
    async with opened(container) as model, membership("local") as member:
        manager = process_of("manager")
        manager.kill()
        while await names(member) != ["tiny"]:  # noqa: ASYNC110 - members join one by one
            await asyncio.sleep(0.05)
        assert process_of("manager") != manager
        assert await tokens_of(model)
        async with jitllm.connect("ray:local", model="tiny") as attached:
            assert await tokens_of(attached) == await tokens_of(model)
    await until_nothing_is_named()


@pytest.mark.parametrize("end", ["ends", "is killed"])
async def test_the_manager_goes_on_when_the_program_ends_that_started_it(
    cluster: Cluster, container: Path, end: str
) -> None:
    await until_nothing_is_named()
    with program(cluster, container) as first:
        name, tokens = await said(first)
        manager = process_of("manager")
        async with opened(container) as model, membership("local") as member:
            assert process_of("manager") == manager
            assert (name, model.name) == ("tiny", "tiny-2")
            assert await names(member) == ["tiny", "tiny-2"]
            if end == "ends":
                first.communicate(timeout=60)
                assert first.returncode == 0
            else:
                first.send_signal(signal.SIGKILL)
                first.wait(60)
            while manager.is_running():  # noqa: ASYNC110 - the test's own limit ends it
                await asyncio.sleep(0.05)
            assert await names(member) == ["tiny-2"]
            assert process_of("manager") != manager
            assert await tokens_of(model) == tokens
            async with opened(container) as again:
                assert again.name == "tiny"
                assert await tokens_of(again) == tokens
    await until_nothing_is_named()


async def test_nodes_say_what_they_have(cluster: Cluster) -> None:
    async with membership("local") as member:
        [node] = await member.nodes()
        assert node.node_id == member.node_id == cluster.node
        assert member.name.startswith(f"{node.name}:{os.getpid()}:")
        assert node.host is not None
        assert node.host.devices[0].name == "cpu:0"
        assert 0 < node.host.devices[0].free_bytes <= node.host.devices[0].total_bytes
        assert node.host.threads == len(node.host.devices) or len(node.host.numa) > 1
        assert node.host.tier
