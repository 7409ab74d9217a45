"""What a Vulkan device was asked for is given back: by moves, by unloading, hundreds of times."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jitllm.devices.vulkan.api import Api
from jitllm.engine import Request
from tests.conftest import TinyModel
from tests.models.native import opened, reply
from tests.ops.vulkan import needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]

MADE_BY = {
    "vkCreateComputePipelines": "vkDestroyPipeline",
    "vkAllocateMemory": "vkFreeMemory",
}


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Objects of the driver that exist, by the function that destroys them."""
    counts: Counter[str] = Counter()
    call = Api.call

    def counting(self: Api, name: str, *args: Any) -> Any:
        result = call(self, name, *args)
        if name.startswith("vkCreate") or name in MADE_BY:
            counts[MADE_BY.get(name, name.replace("Create", "Destroy"))] += 1
        elif name.startswith("vkDestroy") or name == "vkFreeMemory":
            counts[name] -= 1
        return result

    monkeypatch.setattr(Api, "call", counting)
    return counts


async def test_the_ledger_returns_to_zero(tiny_model: TinyModel, alive: Counter[str]) -> None:
    """200 loads, moves and unloads: weights and pages leave nothing but what is always held."""
    path, request = tiny_model("llama", "q8_0"), Request((1, 259, 75), max_tokens=3)
    for _ in range(4):
        await loads_moves_and_unloads(path, request)
        assert set(alive.values()) == {0}, alive


async def loads_moves_and_unloads(path: Path, request: Request) -> None:
    choices = {"devices": "cpu:0,vulkan:0=64M", "placement": "*=cpu:0", "threads": 1}
    async with opened(path, **choices) as loaded:
        empty = (await loaded.engine.stats()).devices[1]
        assert (empty.placed, empty.placed_bytes, empty.kv_bytes) == (0, 0, 0)
        for turn in range(24):
            blocks = [0, 1, 2] if turn % 3 else [turn % 2, 2]
            head = bool(turn % 2)
            await loaded.engine.move(blocks, "vulkan:0", head=head)
            if turn % 8 == 0:
                await reply(loaded.engine, request)
            await loaded.engine.move(blocks, "cpu:0", head=head)
        after = (await loaded.engine.stats()).devices[1]
    assert (after.placed, after.placed_bytes, after.kv_bytes) == (0, 0, 0)
    assert after.kv_idle_bytes == 0
    assert after.allocated_bytes == empty.allocated_bytes
