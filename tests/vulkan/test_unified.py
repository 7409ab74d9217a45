"""A GPU whose memory is the host's: what it holds counts once, within the host's budget."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors import vulkan_recipe
from jitllm.devices.vulkan.arena import Arena
from jitllm.devices.vulkan.instance import PhysicalDevice
from jitllm.engine import EngineStats, Request
from tests.conftest import TinyModel
from tests.models.native import opened, reply
from tests.ops.vulkan import needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]

CPU, GPU = "cpu:0", "vulkan:0"
REQUEST = Request((1, 259, 75, 260), max_tokens=20)
CHOICES: dict[str, Any] = {
    "devices": f"{CPU},{GPU}=40M",
    "placement": f"*={CPU}",
    "page_size_tokens": 16,
}


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("gemma3")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated is what is used, nearly."""
    monkeypatch.setattr(vulkan_recipe, "Arena", partial(Arena, chunk_bytes=1 << 20))


def unified(monkeypatch: pytest.MonkeyPatch, *, is_unified: bool) -> None:
    monkeypatch.setattr(PhysicalDevice, "is_unified", is_unified)


def allocated(stats: EngineStats) -> int:
    return stats.devices[1].allocated_bytes


async def test_what_it_holds_counts_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it holds it. The memory of a card is its own."""
    fixed: dict[bool, list[int]] = {}
    for is_unified in (True, False):
        unified(monkeypatch, is_unified=is_unified)
        async with opened(model, **CHOICES) as loaded:
            engine, seen = loaded.engine, []
            for to in (None, GPU, CPU):
                if to is not None:
                    await engine.move(range(5), to)
                seen.append(await engine.stats())
        fixed[is_unified] = [stats.pages.fixed_bytes for stats in seen]
    held = [allocated(stats) for stats in seen]
    assert held[0] == held[2] < held[1]
    assert len(set(fixed[False])) == 1
    assert [a - b for a, b in zip(fixed[True], fixed[False], strict=True)] == held


async def test_paged_blocks_give_way(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply is the same, and the host keeps to its budget."""
    unified(monkeypatch, is_unified=True)
    async with opened(model, **CHOICES) as loaded:
        before = await loaded.engine.stats()
        await loaded.engine.move([0], GPU)
        expected = await reply(loaded.engine, REQUEST)
        grown = allocated(await loaded.engine.stats()) - allocated(before)
    maxmem_bytes = before.pages.fixed_bytes + before.devices[0].placed_bytes + grown // 2
    async with opened(model, **CHOICES, maxmem_bytes=maxmem_bytes) as loaded:
        num_frames = (await loaded.engine.stats()).devices[0].frames
        await loaded.engine.move([0], GPU)
        found = await reply(loaded.engine, REQUEST)
        stats = await loaded.engine.stats()
    assert found.bits == expected.bits
    assert stats.devices[0].frames < num_frames
    assert stats.pages.over_budget_bytes == 0


async def test_unless_somebody_says_it_takes_no_more_than_the_host_may(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_unified in (True, False):
        unified(monkeypatch, is_unified=is_unified)
        async with opened(model, devices=GPU, maxmem_bytes=96 << 20) as loaded:
            (use,) = (await loaded.engine.stats()).devices
        assert (use.budget_bytes == 96 << 20) is is_unified
