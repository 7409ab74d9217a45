"""Keys and values beyond a GPU's budget stay with the host and pass through the device."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jitllm.compose import Loaded
from jitllm.devices.vulkan.arena import Arena
from jitllm.engine import EngineStats, Request
from jitllm.memory.device_pages import DevicePages
from tests.conftest import TinyModel
from tests.models.native import Reply, opened, replies, reply
from tests.models.shapes import Shape, write_container
from tests.models.test_moves import following, moving, num_blocks, random_moves
from tests.ops.vulkan import needs_vulkan
from tests.vulkan.test_losses import Fault
from tests.vulkan.test_moves import BAND

pytestmark = [pytest.mark.vulkan, needs_vulkan]

CPU, GPU = "cpu:0", "vulkan:0"
PROMPT = tuple(1 + i * i % 300 for i in range(150))
REQUESTS = (
    Request(PROMPT, max_tokens=40),
    Request(PROMPT[:70], max_tokens=60, chunk_tokens=33),
    Request(PROMPT[40:60], max_tokens=120),
)
BUDGETS = {"llama": 100 << 10, "gemma3": 120 << 10}
"""Of keys and values in pages of 16 positions: a few sets of them."""


@pytest.fixture(params=["llama", "gemma3"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is given back is overwritten."""
    monkeypatch.setenv("JITLLM_POISON", "1")


@asynccontextmanager
async def streaming(
    path: Path, store: Path, budget_bytes: int, **choices: Any
) -> AsyncIterator[Loaded]:
    choices = {"devices": GPU, "page_size_tokens": 16, "max_batch": 4, **choices}
    config = {"kv_budget_bytes": budget_bytes, "kv_cache": str(store)}
    async with opened(path, **config, **choices) as loaded:
        yield loaded


async def resident(path: Path, requests: Sequence[Request], **choices: Any) -> list[Reply]:
    """All at once, with every page on the device."""
    choices = {"devices": GPU, "page_size_tokens": 16, "max_batch": 4, **choices}
    async with opened(path, **choices) as loaded:
        return await replies(loaded.engine, requests)


def check_spilled(stats: EngineStats, budget_bytes: int) -> None:
    """More than the budget was there, and no more of it than the budget on the device."""
    assert stats.kv_spill.bytes_written > budget_bytes
    assert stats.kv_spill.bytes_read > stats.kv_spill.bytes_written
    assert stats.kv_idle_bytes <= budget_bytes


@pytest.mark.parametrize(("kv_type", "share"), [("f16", 1), ("q8_0", 0.55)])
async def test_replies_have_the_bits_of_a_large_pool(
    name: str, kv_type: str, share: float, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Alone and all at once, whatever is a prefix of what."""
    path, budget_bytes = tiny_model(name), int(BUDGETS[name] * share)
    expected = [r.bits for r in await resident(path, REQUESTS, kv_type=kv_type)]
    async with streaming(path, tmp_path, budget_bytes, kv_type=kv_type) as loaded:
        together = await replies(loaded.engine, REQUESTS)
        check_spilled(await loaded.engine.stats(), budget_bytes)
        alone = [await reply(loaded.engine, request) for request in REQUESTS]
    assert [r.bits for r in together] == expected
    assert [r.bits for r in alone] == expected


async def test_a_page_in_another_frame_shows(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These tests can fail."""
    path, request = tiny_model("llama"), REQUESTS[0]
    (expected,) = await resident(path, [request])
    frame = DevicePages.frame
    monkeypatch.setattr(DevicePages, "frame", lambda self, at, column: frame(self, at + 1, column))
    async with streaming(path, tmp_path, BUDGETS["llama"]) as loaded:
        assert (await reply(loaded.engine, request)).bits != expected.bits


@pytest.mark.slow
async def test_a_history_of_4096_tokens_streams(tmp_path: Path) -> None:
    """Through a pool of a tenth of it."""
    path = write_container(tmp_path / "model.jlm", Shape(blocks=2, width=128, context=4160))
    dice = random.Random(1)
    prompt = tuple(dice.randrange(3, 300) for _ in range(4096))
    request = Request(prompt, max_tokens=16)
    (expected,) = await resident(path, [request], page_size_tokens=64, kv_type="f32")
    budget_bytes = 4096 * 2 * 4 * 128 // 10
    choices = {"page_size_tokens": 64, "kv_type": "f32"}
    async with streaming(path, tmp_path, budget_bytes, **choices) as loaded:
        found = await reply(loaded.engine, request)
        check_spilled(await loaded.engine.stats(), budget_bytes)
    assert found.bits == expected.bits


async def test_blocks_move_while_their_history_is_away(
    name: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Either side has a budget, of pages of its own size."""
    path, whole = tiny_model(name), {"kv_type": "f32", "threads": 1}
    requests = [replace(request, max_tokens=60) for request in REQUESTS[:2]]
    async with opened(path, devices=CPU, **whole) as loaded:
        expected = [await reply(loaded.engine, request) for request in requests]
    choices = {
        "devices": f"{CPU},{GPU}",
        "placement": f"*={GPU}",
        "page_sizes": ((CPU, 4), (GPU, 16)),
        "move_share": 0.99,
        "strict": True,
        **whole,
    }
    async with streaming(path, tmp_path, 4 * BUDGETS[name], **choices) as loaded:
        count = await num_blocks(loaded.engine)
        moves = islice(random_moves(random.Random(2), count, (GPU, CPU)), 6)
        found, done = await moving(loaded.engine, requests, moves)
        stats = await loaded.engine.stats()
    assert len(done) == 6
    assert stats.kv_spill.bytes_written > 0
    for same, want in zip(found, expected, strict=True):
        for got in same:
            assert got.ids == want.ids
            assert np.abs(got.logits - want.logits).max() <= BAND


async def test_requests_wait_without_their_pages(tiny_model: TinyModel, tmp_path: Path) -> None:
    """What is away is put into a file from there, and comes back within the budget."""
    path, budget_bytes = tiny_model("llama"), BUDGETS["llama"]
    requests = [
        replace(request, name=str(index), max_tokens=160)
        for index, request in enumerate(REQUESTS[:2])
    ]
    expected = await resident(path, requests)
    async with streaming(path, tmp_path, budget_bytes) as loaded:
        seen = [asyncio.Event() for _ in requests]
        tasks = [
            asyncio.create_task(following(loaded.engine, request, event))
            for request, event in zip(requests, seen, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in seen))
        for name, to in (("0", "disk"), ("1", "memory")):
            await loaded.engine.park(name, to)
            assert (await loaded.engine.stats()).parked == 1
            await loaded.engine.resume(name)
        found = [await task for task in tasks]
        stats = await loaded.engine.stats()
    check_spilled(stats, budget_bytes)
    assert stats.park_totals.resumes == 2
    assert [r.bits for r in found] == [r.bits for r in expected]


async def test_a_loss_takes_what_is_away_with_it(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is computed again on the host."""
    path, fault = tiny_model("llama"), Fault(monkeypatch)
    whole = {"kv_type": "f32", "threads": 1}
    async with opened(path, devices=CPU, **whole) as loaded:
        expected = await replies(loaded.engine, REQUESTS[:2])
    choices = {"devices": f"{CPU},{GPU}", "placement": f"*={GPU}", **whole}
    async with streaming(path, tmp_path, 2 * BUDGETS["llama"], **choices) as loaded:
        seen = [asyncio.Event() for _ in REQUESTS[:2]]
        tasks = [
            asyncio.create_task(following(loaded.engine, request, event))
            for request, event in zip(REQUESTS[:2], seen, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in seen))
        assert (await loaded.engine.stats()).kv_spill.bytes_written > 0
        fault.code = "VK_ERROR_DEVICE_LOST"
        found = [await task for task in tasks]
        stats = await loaded.engine.stats()
    assert stats.lost == (GPU,)
    assert [reply.ids for reply in found] == [reply.ids for reply in expected]


async def test_the_host_is_charged_with_what_is_away(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has it back in the end."""
    arenas: list[Arena] = []
    begin = Arena.__init__

    def noting(self: Arena, *args: Any, **more: Any) -> None:
        begin(self, *args, **more)
        if more.get("is_host"):
            arenas.append(self)

    monkeypatch.setattr(Arena, "__init__", noting)
    path, budget_bytes = tiny_model("llama"), BUDGETS["llama"]
    async with streaming(path, tmp_path, budget_bytes) as loaded:
        before = (await loaded.engine.stats()).pages.fixed_bytes
        most = 0
        async for _ in loaded.engine.generate(REQUESTS[0]):
            stats = await loaded.engine.stats()
            most = max(most, stats.kv_spill.num_bytes)
            assert stats.kv_bytes <= budget_bytes
            assert stats.pages.fixed_bytes - before >= stats.kv_spill.num_bytes
        after = await loaded.engine.stats()
        (arena,) = arenas
        assert most > 0
        assert after.pages.fixed_bytes == before
        assert (after.kv_spill.num_bytes, after.kv_bytes, arena.allocated_bytes) == (0, 0, 0)
        assert 0 < after.kv_idle_bytes <= budget_bytes


async def test_a_host_without_room_says_so(tiny_model: TinyModel, tmp_path: Path) -> None:
    path, budget_bytes = tiny_model("llama"), BUDGETS["llama"]
    (expected,) = await resident(path, REQUESTS[:1])
    async with streaming(path, tmp_path, budget_bytes) as loaded:
        fixed = (await loaded.engine.stats()).pages.fixed_bytes
    whole = Reply()
    async with streaming(path, tmp_path, budget_bytes, maxmem_bytes=fixed + 1000) as loaded:
        async for delta in loaded.engine.generate(replace(REQUESTS[0], logits=True)):
            whole.add(delta)
            stats = await loaded.engine.stats()
            assert delta.finish or stats.pages.over_budget_bytes >= stats.kv_spill.num_bytes - 1000
    assert whole.bits == expected.bits
