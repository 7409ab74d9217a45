"""A served model on Ray: the same answer as in one process, also after a death."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.cluster import Cluster
from actors.mailbox import Stopped
from jitllm.compose import Loaded, open_engine
from jitllm.config import EngineConfig
from jitllm.engine import Delta, Engine, Finish, Outputs, Request, Sampling
from jitllm.errors import ContextOverflow, PageError, UsageError
from jitllm.formats.jlm import Container
from tests.conftest import TinyModel
from tests.models import native
from tests.models.native import Reply, opened

PROMPT = tuple(range(1, 20))
ROWS = 4
REQUESTS = (
    Request(PROMPT, max_tokens=24),
    Request(PROMPT[:7], max_tokens=24, sampling=Sampling(temperature=0.8, seed=3), logprobs=True),
    Request(PROMPT, max_tokens=8, outputs=Outputs.ALL, chunk_tokens=5),
)


@asynccontextmanager
async def on_ray(path: Path, **choices: Any) -> AsyncIterator[Loaded]:
    loaded = await open_engine(path, EngineConfig(**choices), ray="local")
    try:
        yield loaded
    finally:
        await loaded.close()


def process_of(actor: str) -> psutil.Process:
    """The process of an actor of the one engine that runs."""
    import ray

    name = next(
        named["name"]
        for named in ray.util.list_named_actors(all_namespaces=True)
        if named["name"].endswith(f":{actor}")
    )
    handle = ray.get_actor(name, namespace="jitllm")
    return psutil.Process(ray.get(handle.where.remote()).pid)


async def exhaust_and_more(engine: Engine, stream: AsyncIterator[Delta]) -> None:
    """Read a reply to its end, and others after it: who has begun may need nobody else."""
    while True:
        await exhaust(stream)
        stream = engine.generate(Request(PROMPT[:3], max_tokens=400))


async def exhaust(stream: AsyncIterator[Delta]) -> None:
    """Raise the error that a reply ends with."""
    whole = Reply()
    async for delta in stream:
        whole.add(delta)


async def bits(engine: Engine) -> list[tuple[Any, ...]]:
    return [reply.bits for reply in await native.replies(engine, REQUESTS)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_the_answer_is_that_of_one_process(
    cluster: Cluster, tiny_model: TinyModel, name: str
) -> None:
    path = tiny_model(name)
    async with opened(path) as embedded:
        expected = await bits(embedded.engine)
    async with on_ray(path) as remote:
        assert await bits(remote.engine) == expected
        stats = await remote.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_bytes) == (0, 0, 0)
        assert remote.notes == ()


async def test_paging_one_block_at_a_time_changes_nothing(
    cluster: Cluster, tiny_model: TinyModel
) -> None:
    path = tiny_model("llama")
    async with opened(path) as embedded:
        expected = await bits(embedded.engine)
    async with on_ray(path, maxmem_bytes=1, read_ahead="off") as remote:
        assert await bits(remote.engine) == expected
        pages = (await remote.engine.stats()).pages
        assert pages.page_ins > pages.blocks
        assert (await remote.engine.set_budget(1 << 30)).over_budget_bytes == 0
        assert await bits(remote.engine) == expected


async def test_a_budget_that_is_lowered_is_reached_at_once(
    cluster: Cluster, tiny_model: TinyModel
) -> None:
    path = tiny_model("llama")
    async with opened(path) as embedded:
        expected = await bits(embedded.engine)
    async with on_ray(path) as remote:
        assert await bits(remote.engine) == expected
        under_way = asyncio.create_task(bits(remote.engine))
        await asyncio.sleep(0)
        assert (await remote.engine.set_budget(1)).resident <= 1
        assert await under_way == expected


async def test_refusals_are_those_of_one_process(
    cluster: Cluster, tiny_model: TinyModel, tmp_path: Path
) -> None:
    async with on_ray(tiny_model("llama"), ctx_tokens=8) as remote:
        with pytest.raises(ContextOverflow) as caught:
            await native.reply(remote.engine, Request(PROMPT))
        assert caught.value.ctx_tokens == 8
        with pytest.raises(UsageError, match="is not in the vocabulary"):
            await native.reply(remote.engine, Request((1 << 20,)))
    damaged = tmp_path / "damaged.jlm"
    data = bytearray(tiny_model("llama").read_bytes())
    with closing(Container.open(tiny_model("llama"))) as container:
        data[container.header.dense.offset] ^= 0xFF
    damaged.write_bytes(data)
    with pytest.raises(PageError, match=re.escape(str(damaged))):
        async with on_ray(damaged):
            pass


async def begin(
    engine: Engine, phase: str, num: int, tasks: list[asyncio.Task[None]]
) -> list[asyncio.Task[None]]:
    """So many requests alike that have come so far; tasks: where others that they need go."""
    has_begun = asyncio.Event()

    async def follow(request: Request) -> None:
        async for _ in engine.generate(request):
            has_begun.set()

    async def follow_on() -> None:
        while True:  # a reply may end before the victims have come
            await follow(Request(PROMPT[:5], max_tokens=400))

    if phase == "queued":  # behind as many as the device takes
        tasks += [asyncio.create_task(follow_on()) for _ in range(ROWS)]
        await has_begun.wait()
    is_prompt = phase == "prompt"
    prompt = PROMPT * (20 if is_prompt else 1)
    request = Request(prompt, max_tokens=100, chunk_tokens=1, name="victim")
    victims = [asyncio.create_task(follow(request)) for _ in range(num)]
    if phase == "decode":
        await has_begun.wait()
        return victims
    num_here = 0
    while num_here < num and not any(task.done() for task in victims):
        num_here = sum(state.name == "victim" for state in await engine.sessions())
    return victims


@pytest.mark.parametrize("phase", ["queued", "prompt", "decode"])
async def test_requests_that_are_cancelled_leave_nothing_and_change_no_other(
    cluster: Cluster, tiny_model: TinyModel, phase: str
) -> None:
    path = tiny_model("llama")
    other = Request(PROMPT[:7], max_tokens=200, logprobs=True)
    async with opened(path) as embedded:
        expected = (await native.reply(embedded.engine, other)).bits
    async with on_ray(path, max_batch=ROWS) as remote:
        for num in (1, 3):
            fillers: list[asyncio.Task[None]] = []
            beside = asyncio.create_task(native.reply(remote.engine, other))
            victims = await begin(remote.engine, phase, num, fillers)
            for task in (*victims, *fillers):
                task.cancel()
            assert (await beside).bits == expected
            await asyncio.wait([*victims, *fillers])
            stats = await remote.engine.stats()
            while stats.running + stats.waiting:
                stats = await remote.engine.stats()
            assert stats.kv_bytes == 0


async def test_a_device_that_dies_changes_no_reply(cluster: Cluster, tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    async with opened(path) as embedded:
        expected = await bits(embedded.engine)
    async with on_ray(path, maxmem_bytes=1, read_ahead="off") as remote:  # so that it takes a while
        device = process_of("device:cpu:0")
        replies = [Reply() for _ in REQUESTS]
        has_begun = asyncio.Event()

        async def follow(request: Request, reply: Reply) -> None:
            async for delta in remote.engine.generate(request):
                reply.add(delta)
                if len(reply.ids) > 2:
                    has_begun.set()

        async def kill() -> None:
            await has_begun.wait()
            device.kill()
            assert any(reply.finish is None for reply in replies)

        requests = [replace(request, logits=True) for request in REQUESTS]
        await asyncio.gather(kill(), *map(follow, requests, replies))
        assert [reply.bits for reply in replies] == expected
        assert process_of("device:cpu:0") != device
        assert await bits(remote.engine) == expected
        assert (await remote.engine.stats()).running == 0


@pytest.mark.parametrize("actor", ["scheduler", "pager:cpu:0"])
async def test_the_death_of_what_has_no_successor_is_a_clear_error(
    cluster: Cluster, tiny_model: TinyModel, actor: str
) -> None:
    path = tiny_model("llama")
    async with on_ray(path) as remote:
        process = process_of(actor)
        stream = remote.engine.generate(Request(PROMPT[:3], max_tokens=400))
        await anext(stream)
        process.kill()
        with pytest.raises(Stopped, match=actor.replace(":", " ", 1)):
            await exhaust_and_more(remote.engine, stream)
    async with on_ray(path) as remote:
        assert (await native.reply(remote.engine, REQUESTS[0])).finish is Finish.LENGTH


async def test_experts_that_come_one_by_one_on_ray(tiny_model: TinyModel) -> None:
    path = tiny_model("olmoe", "q8_0")
    async with opened(path, experts="blocks") as loaded:
        expected = [(await native.reply(loaded.engine, request)).bits for request in REQUESTS]
    async with on_ray(path, experts="apart", maxmem_bytes=1) as loaded:
        found = await native.replies(loaded.engine, REQUESTS)
        experts = (await loaded.engine.stats()).pages.experts
    assert [one.bits for one in found] == expected
    assert experts is not None
    assert experts.reads > experts.resident


async def test_experts_on_the_host_change_nothing(cluster: Cluster, tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe", "q8_0")
    async with opened(path) as embedded:
        expected = await bits(embedded.engine)
    async with on_ray(path, devices="cpu:0,cpu:1", placement="*=cpu:1%host") as remote:
        assert await bits(remote.engine) == expected
        stats = await remote.engine.stats()
        assert "=cpu:1%host," in str(stats.placement)
        assert stats.pages.experts is not None
        assert stats.pages.experts.reads > 0
