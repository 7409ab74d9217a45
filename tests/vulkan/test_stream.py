"""Blocks whose weights pass through a device's memory: all of a model in the room of a few."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors import copied_weights
from jitllm.compose import Loaded
from jitllm.devices.vulkan.runner import VulkanRunner
from jitllm.engine import Request, Sampling
from jitllm.errors import PlacementError
from jitllm.memory.slots import Slots
from tests.conftest import TinyModel
from tests.models.native import opened, replies, reply
from tests.ops.vulkan import needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]

PROMPT = (1, 259, 75, 260, 269, 270, 271, 300, 12, 13)
REQUESTS = (
    Request(PROMPT, max_tokens=20),
    Request(PROMPT[:4], max_tokens=16, sampling=Sampling(temperature=0.8, seed=3)),
    Request(PROMPT * 4, max_tokens=6, chunk_tokens=13),
)
BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 7


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("gemma3")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is given back is overwritten."""
    monkeypatch.setenv("JITLLM_POISON", "1")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all blocks that are copied to a device."""
    sizes: list[int] = []
    load = VulkanRunner.load

    async def counting(self: VulkanRunner, span: Any, *rest: Any) -> None:
        if span.num_bytes == BLOCK_BYTES:
            sizes.append(span.num_bytes)
        await load(self, span, *rest)

    monkeypatch.setattr(VulkanRunner, "load", counting)
    return sizes


@asynccontextmanager
async def streaming(
    model: Path, room_bytes: int, placement: str = "*=vulkan:0~", **choices: Any
) -> AsyncIterator[Loaded]:
    """With room for `room_bytes` beside what the device takes whatever it computes."""
    choices = {"page_size_tokens": 16, "max_batch": 4, "prompt_chunk_tokens": 64, **choices}
    async with opened(model, devices="cpu:0,vulkan:0", placement="*=cpu:0", **choices) as loaded:
        fixed_bytes = (await loaded.engine.stats()).devices[1].scratch_bytes
    devices = f"vulkan:0={fixed_bytes + room_bytes}"
    async with opened(model, devices=devices, placement=placement, **choices) as loaded:
        yield loaded


@pytest.mark.parametrize("num_blocks", [2, 3, 4, 5])
async def test_all_blocks_run_in_the_room_of_a_few(
    model: Path, num_blocks: int, loads: list[int]
) -> None:
    """With every bit as if all of them were there."""
    choices = {"page_size_tokens": 16, "max_batch": 4, "prompt_chunk_tokens": 64}
    async with opened(model, devices="vulkan:0", **choices) as loaded:
        expected = await replies(loaded.engine, REQUESTS)
    del loads[:]
    dense_bytes, kv_bytes = 512 << 10, 1 << 20
    room_bytes = num_blocks * BLOCK_BYTES + dense_bytes + kv_bytes
    async with streaming(model, room_bytes) as loaded:
        found = await replies(loaded.engine, REQUESTS)
        alone = [await reply(loaded.engine, request) for request in REQUESTS]
        stats = await loaded.engine.stats()
    assert str(stats.placement) == "0-6=vulkan:0~,head=vulkan:0"
    assert stats.devices[0].placed_bytes <= num_blocks * BLOCK_BYTES + dense_bytes
    assert [r.bits for r in found] == [r.bits for r in expected]
    assert [r.bits for r in alone] == [r.bits for r in expected]
    assert len(loads) > 4 * stats.steps  # they passed through again and again


async def test_where_all_have_room_each_is_brought_once(model: Path, loads: list[int]) -> None:
    async with streaming(model, 64 << 20) as loaded:
        await replies(loaded.engine, REQUESTS)
    assert len(loads) == NUM_BLOCKS


@pytest.mark.parametrize(("places", "passing"), [("*=vulkan:0~", NUM_BLOCKS), ("*=vulkan:0", 0)])
async def test_what_is_read_counts_as_opening_or_for_the_step_that_needs_it(
    model: Path, places: str, passing: int
) -> None:
    async with streaming(model, 64 << 20, places) as loaded:
        at_first = (await loaded.engine.stats()).pages.phases
        await reply(loaded.engine, REQUESTS[0])
        phases = (await loaded.engine.stats()).pages.phases
    assert phases["load"].bytes_read == at_first["load"].bytes_read > 0
    assert at_first["load"].requests == 1 + NUM_BLOCKS - passing  # with the dense region
    assert at_first["load"].faults == at_first["prompt"].requests == 0
    assert at_first["decode"].requests == phases["decode"].requests == 0
    assert phases["prompt"].requests == passing


async def test_some_stay_and_others_pass(model: Path, loads: list[int]) -> None:
    async with opened(model, devices="vulkan:0", page_size_tokens=16) as loaded:
        expected = await reply(loaded.engine, REQUESTS[0])
    del loads[:]
    places = "0=vulkan:0,1-3=vulkan:0~,4=vulkan:0,5-6=vulkan:0~,head=vulkan:0"
    async with streaming(model, 5 * BLOCK_BYTES, places) as loaded:
        found = await reply(loaded.engine, REQUESTS[0])
        stats = await loaded.engine.stats()
    assert str(stats.placement) == places
    assert found.bits == expected.bits
    assert len(loads) > 2 + 3 * stats.steps


async def test_without_room_for_one_it_says_so(model: Path) -> None:
    with pytest.raises(PlacementError, match=r"no room for blocks .* vulkan:0=SIZE"):
        async with streaming(model, 1 << 19):
            pass


async def test_keys_and_values_come_before_slots(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not needed for them holds blocks, and is given up when they grow."""
    narrowed: list[bool] = []
    narrow = Slots.narrow

    def counting(self: Slots, num_bytes: int) -> bool:
        narrowed.append(narrow(self, num_bytes))
        return narrowed[-1]

    monkeypatch.setattr(Slots, "narrow", counting)
    monkeypatch.setattr(copied_weights, "MIN_SPARE_BYTES", 0)
    requests = [replace(request, max_tokens=100) for request in REQUESTS[:2] * 2]
    choices: dict[str, Any] = {"page_size_tokens": 16, "max_batch": 4, "kv_type": "f32"}
    async with opened(model, devices="vulkan:0", **choices) as loaded:
        expected = await replies(loaded.engine, requests)
    async with streaming(model, 8 * BLOCK_BYTES - (384 << 10), **choices) as loaded:
        found = await replies(loaded.engine, requests)
    assert [r.bits for r in found] == [r.bits for r in expected]
    assert any(narrowed)


async def test_blocks_come_to_pass_through_and_to_stay(model: Path) -> None:
    choices = {"page_size_tokens": 16, "devices": "cpu:0,vulkan:0", "placement": "*=vulkan:0"}
    async with opened(model, **choices) as loaded:
        expected = await reply(loaded.engine, REQUESTS[0])
        for text in ("*=vulkan:0~", "*=cpu:0", "*=vulkan:0~", "2-3=vulkan:0", "*=vulkan:0"):
            await loaded.engine.place(text, strict=True)
            stats = await loaded.engine.stats()
            if "cpu" not in text:
                assert (await reply(loaded.engine, REQUESTS[0])).bits == expected.bits
            assert ("~" in str(stats.placement)) == ("~" in text or text.startswith("2-3"))
