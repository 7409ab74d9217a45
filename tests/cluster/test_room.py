"""Blocks of a Vulkan device go to the process of the host when there is no room, and come back."""

from __future__ import annotations

import asyncio

import pytest

from actors.cluster import Cluster
from tests.cluster.test_engine import on_ray
from tests.conftest import TinyModel
from tests.models.native import opened, reply
from tests.ops.vulkan import needs_vulkan
from tests.vulkan.test_relocation import (
    CHOICES,
    CPU,
    GPU,
    LONG,
    SHORT,
    check_quantised,
    on_the_host,
)


@pytest.mark.vulkan
@needs_vulkan
async def test_blocks_change_processes_for_room(cluster: Cluster, tiny_model: TinyModel) -> None:
    model = tiny_model("llama", "q8_0")
    expected = await on_the_host(model, [LONG, SHORT])
    async with opened(model, devices=GPU, **CHOICES) as loaded:
        (use,) = (await loaded.engine.stats()).devices
    budget_bytes = use.scratch_bytes + use.placed_bytes + (320 << 10)
    choices = {"devices": f"{CPU},{GPU}={budget_bytes}", "placement": f"*={GPU}", **CHOICES}
    async with on_ray(model, **choices) as loaded:
        found = [await reply(loaded.engine, request) for request in (LONG, SHORT)]
        while True:
            stats = await loaded.engine.stats()
            if stats.brought_back == stats.sent_home:
                break
            await asyncio.sleep(0.01)
    assert (stats.sent_home, stats.losses) == (2, 0)
    assert str(stats.placement) == f"0-2={GPU},head={GPU}"
    check_quantised(found, expected)
