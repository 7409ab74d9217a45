"""Blocks on a Vulkan device to which their experts come one by one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors import copied_weights
from actors.copied_weights import CopiedWeights
from jitllm.compose import Loaded
from jitllm.devices.vulkan.api import VulkanError
from jitllm.engine import Request, Sampling
from jitllm.memory.device_experts import DeviceExperts
from tests.conftest import TinyModel
from tests.models import oracle
from tests.models.kv_memory import columns_of
from tests.models.native import opened, prompt_logits, replies, reply
from tests.models.test_experts import (
    Sizes,
    check_nothing_is_kept,
    check_one_expert_is_missed,
    num_used,
    short_requests,
)
from tests.models.test_faults import actor
from tests.models.test_moves import moving, num_blocks, random_moves
from tests.ops.vulkan import needs_vulkan
from tests.vulkan.test_engine import MAX_DIFFERENCE
from tests.vulkan.test_moves import check

pytestmark = [pytest.mark.vulkan, needs_vulkan]

SMALL = {"max_batch": 4, "prompt_chunk_tokens": 64, "ctx_tokens": 128, "page_size_tokens": 16}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is given back is overwritten, so that computing with it would show."""
    monkeypatch.setenv("JITLLM_POISON", "1")


def frames(loaded: Loaded) -> DeviceExperts:
    """Those of the device."""
    engine: Any = loaded.engine
    found: DeviceExperts = actor(engine._sites["vulkan:0"].device)._supply.experts
    return found


@asynccontextmanager
async def carded(
    path: Path, num_frames: int | None = None, placement: str = "*=vulkan:0%card", **choices: Any
) -> AsyncIterator[Loaded]:
    """With no more frames than these, if that is given."""
    choices = {"devices": "cpu:0,vulkan:0", "placement": placement} | choices
    async with opened(path, **choices) as loaded:
        if num_frames is not None:
            frames(loaded)._resize(num_frames)
            frames(loaded)._counts = Counter()  # no more than that from now on
        yield loaded
        check_nothing_is_kept(loaded)
        experts = frames(loaded)
        experts.residency.check()
        assert not any(experts.residency._pinned.values())
        assert len(experts._frames) == experts.residency.num_resident


@pytest.mark.parametrize("name", [*oracle.MIXTURES, *oracle.QUANTIZED_MIXTURES])
async def test_experts_that_come_to_the_device_give_the_golden_logits(
    name: str, tiny_model: TinyModel
) -> None:
    stem, _, weight_type = name.rpartition("-")
    is_quantized = name in oracle.QUANTIZED_MIXTURES
    path = tiny_model(stem, weight_type) if is_quantized else tiny_model(name)
    tokens, truth = oracle.golden(name)
    async with carded(path, 3, kv_type="f32") as loaded:
        whole, chunks = [await prompt_logits(loaded.engine, tokens, n) for n in (None, 7)]
        stats, experts = await loaded.engine.stats(), frames(loaded)
        assert experts.num_frames == 3
    if is_quantized:
        oracle.check_quantized_mixture(whole - truth)
    else:
        assert np.abs(whole - truth).max() <= MAX_DIFFERENCE
    assert np.array_equal(whole, chunks)
    assert "=vulkan:0%card," in str(stats.placement)
    assert experts.residency.num_reads > Sizes.of(path).count


REQUESTS = [
    Request(tuple(range(5 + i, 20 + i)), max_tokens=8, sampling=Sampling(1.0, seed=i))
    for i in range(3)
]


@pytest.mark.parametrize("placement", ["*=vulkan:0%card", "*=vulkan:0~%card", "1=vulkan:0%card"])
async def test_replies_have_the_bits_of_a_device_that_has_all_experts(
    placement: str, tiny_model: TinyModel
) -> None:
    """Alone and together, whatever has to go, and with blocks that pass through as well."""
    path = tiny_model("qwen3moe", "q8_0")
    rest = "*=cpu:0" if placement.startswith("1") else ""
    whole = placement.replace("%card", "").replace("~", "")
    async with opened(path, devices="cpu:0,vulkan:0", placement=f"{whole},{rest}") as loaded:
        expected = [await reply(loaded.engine, request) for request in REQUESTS]
    async with carded(path, 5, f"{placement},{rest}") as loaded:
        together = await replies(loaded.engine, REQUESTS)
        alone = [await reply(loaded.engine, request) for request in REQUESTS]
        residency = frames(loaded).residency
        assert residency.num_reads > residency.num_resident, "nothing had to go"
        assert residency.num_hits > 0
    assert [one.bits for one in alone] == [one.bits for one in expected]
    assert [one.bits for one in together] == [one.bits for one in expected]


async def test_with_keys_and_values_beyond_their_budget_too(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """And on a device that nobody is beside."""
    path = tiny_model("deepseek", "q8_0")
    tokens = tuple(7 + (at * at * 31 + at * 17) % 300 for at in range(100))
    requests = [Request(tokens, max_tokens=6), Request(tokens[20:70], max_tokens=6)]
    choices = {"devices": "vulkan:0", "page_size_tokens": 16}
    async with opened(path, placement="*=vulkan:0", **choices) as loaded:
        expected = await replies(loaded.engine, requests)
        set_bytes = columns_of(loaded).stride_bytes
    choices |= {"kv_budget_bytes": 3 * set_bytes, "kv_cache": str(tmp_path)}
    async with carded(path, 4, **choices) as loaded:
        found = await replies(loaded.engine, requests)
        assert (await loaded.engine.stats()).kv_spill.bytes_read > 0
        assert loaded.notes == ("*=vulkan:0%card: block 0 has no experts that come one by one",)
    assert [one.bits for one in found] == [one.bits for one in expected]


async def test_a_device_that_is_lost_leaves_its_blocks_to_the_host(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of bringing an expert."""
    path = tiny_model("qwen3moe", "f32")
    request = Request(tuple(range(5, 25)), max_tokens=12)
    async with opened(path, devices="cpu:0", kv_type="f32") as loaded:
        expected = await reply(loaded.engine, request)
    left, bring = 30, CopiedWeights.bring_expert

    async def lost(self: CopiedWeights, *of: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise VulkanError("vkQueueSubmit2", "VK_ERROR_DEVICE_LOST")
        await bring(self, *of)

    monkeypatch.setattr(CopiedWeights, "bring_expert", lost)
    choices = {"devices": "cpu:0,vulkan:0", "placement": "*=vulkan:0%card", "kv_type": "f32"}
    async with opened(path, **choices) as loaded:
        frames(loaded)._resize(3)
        frames(loaded)._counts = Counter()
        found = await reply(loaded.engine, request)
        assert left < 0
        assert set((await loaded.engine.stats()).placement.devices) == {"cpu:0"}
    check(path, [found], [expected])


async def test_with_room_each_expert_comes_once(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe", "q8_0")
    async with carded(path) as loaded:
        await replies(loaded.engine, REQUESTS)
        await replies(loaded.engine, REQUESTS)
        residency, experts = frames(loaded).residency, (await loaded.engine.stats()).pages.experts
        assert residency.num_reads == residency.num_resident
        assert experts is not None
        assert experts.reads == residency.num_reads
        assert experts.hits == residency.num_hits
        assert experts.held_bytes <= experts.room_bytes <= experts.all_bytes
        phases = (await loaded.engine.stats()).pages.phases
        assert phases["prompt"].bytes_read + phases["decode"].bytes_read == experts.bytes_read


async def test_keys_and_values_come_before_experts(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device with room for some of them, which long histories take away from experts."""
    monkeypatch.setattr(copied_weights, "MIN_SPARE_BYTES", 64 << 10)
    path = tiny_model("mellum")
    requests = [Request(tuple(range(5 + i, 100 + i)), max_tokens=20) for i in range(4)]
    async with opened(path, devices="cpu:0,vulkan:0", placement="*=cpu:0", **SMALL) as loaded:
        devices, header = (await loaded.engine.stats()).devices, loaded.header
    fixed = next(use.scratch_bytes for use in devices if use.name != "cpu:0")
    fixed += header.dense.length + sum(extent.length for extent in header.blocks)
    async with opened(path, devices="vulkan:0", **SMALL) as loaded:
        expected = await replies(loaded.engine, requests)
    sizes = Sizes.of(path)
    room = 20 * max(sizes.expert_bytes.values())
    budget = fixed + room
    async with carded(path, devices=f"cpu:0,vulkan:0={budget}", **SMALL) as loaded:
        before = frames(loaded).num_frames
        assert num_used(loaded) < before < sizes.count * len(sizes.expert_bytes)
        task = asyncio.create_task(replies(loaded.engine, requests))
        fewest = before
        while not task.done():
            await asyncio.sleep(0)
            fewest = min(fewest, frames(loaded).num_frames)
        found = await task
        use = next(u for u in (await loaded.engine.stats()).devices if u.name == "vulkan:0")
        assert use.allocated_bytes <= budget
        assert frames(loaded).num_frames > fewest
    assert num_used(loaded) <= fewest < before
    assert [one.bits for one in found] == [one.bits for one in expected]


async def test_some_come_to_the_device_and_some_stay_on_the_host(tiny_model: TinyModel) -> None:
    path = tiny_model("bailingmoe2", "f32")
    async with opened(path, devices="cpu:0", kv_type="f32") as loaded:
        expected = [await reply(loaded.engine, request) for request in REQUESTS]
    placement = "0=vulkan:0,1=vulkan:0%host,2=vulkan:0%card,*=cpu:0"
    async with carded(path, 3, placement, kv_type="f32", strict=True) as loaded:
        found = await replies(loaded.engine, REQUESTS)
        assert str((await loaded.engine.stats()).placement).startswith(placement[:-8])
    check(path, found, expected)


async def test_blocks_move_between_the_host_and_the_device(tiny_model: TinyModel) -> None:
    """Those that are on the host have their experts there, one by one."""
    path, dice = tiny_model("bailingmoe2", "f32"), random.Random(5)
    requests = [Request(tuple(range(5, 25)), max_tokens=30), Request((9, 8, 7), max_tokens=30)]
    async with opened(path, devices="cpu:0", kv_type="f32") as loaded:
        expected = [await reply(loaded.engine, request) for request in requests]
    choices = {"kv_type": "f32", "move_share": 0.99, "strict": True, "threads": 1}
    async with carded(path, **choices) as loaded:
        engine = loaded.engine
        moves = random_moves(dice, await num_blocks(engine), ("vulkan:0", "cpu:0"))
        found, done = await moving(engine, requests, islice(moves, 5))
        placement = (await engine.stats()).placement
        there = placement.blocks_on("vulkan:0") & placement.carded
        assert set(frames(loaded).blocks) == there
        assert ("%card" in str(placement)) == bool(there)
    assert len(done) == 5
    for same, want in zip(found, expected, strict=True):
        check(path, same, [want] * len(same))


async def test_replies_that_do_not_need_an_expert_go_on_without_it(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("qwen3moe", "q8_0")
    requests = short_requests()
    async with opened(path, devices="vulkan:0") as loaded:
        sound = [await reply(loaded.engine, request) for request in requests]
    async with carded(path, 2, strict=True) as loaded:
        fault = await check_one_expert_is_missed(loaded, monkeypatch, requests, sound)
        fault.is_on = False
        again = await replies(loaded.engine, requests)
    assert [one.bits for one in again] == [one.bits for one in sound]
