"""What a Vulkan device was asked for is given back: by moves, by unloading, hundreds of times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors import vulkan_recipe
from jitllm.devices.vulkan.api import Api
from jitllm.devices.vulkan.instance import Instance, has_validation
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


@pytest.fixture(autouse=True)
def complaints(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the validation layer has to say, where it is installed: nothing."""
    said: list[str] = []
    validated = partial(Instance, validate=has_validation(), report=said.append)
    monkeypatch.setattr(vulkan_recipe, "Instance", validated)
    yield said
    assert not said


async def test_the_ledger_returns_to_zero(tiny_model: TinyModel, alive: Counter[str]) -> None:
    """200 loads, moves and unloads: weights and pages leave nothing but what is always held."""
    for _ in range(4):
        await loads_moves_and_unloads(tiny_model("llama", "q8_0"), 64 << 20, "")
        assert set(alive.values()) == {0}, alive


async def test_it_does_where_blocks_pass_through(
    tiny_model: TinyModel, alive: Counter[str]
) -> None:
    """The same in slots, of which there are fewer than blocks."""
    path = tiny_model("llama", "q8_0")
    async with opened(path, devices="cpu:0,vulkan:0", placement="*=cpu:0", threads=1) as loaded:
        scratch_bytes = (await loaded.engine.stats()).devices[1].scratch_bytes
    assert set(alive.values()) == {0}, alive
    for _ in range(4):
        await loads_moves_and_unloads(path, scratch_bytes + (3 << 20), "~")
        assert set(alive.values()) == {0}, alive


async def loads_moves_and_unloads(path: Path, budget_bytes: int, mark: str) -> None:
    request = Request((1, 259, 75), max_tokens=3)
    devices = f"cpu:0,vulkan:0={budget_bytes}"
    async with opened(path, devices=devices, placement="*=cpu:0", threads=1) as loaded:
        engine = loaded.engine
        empty = (await engine.stats()).devices[1]
        assert (empty.placed, empty.placed_bytes, empty.kv_bytes) == (0, 0, 0)
        for turn in range(24):
            blocks = [0, 1, 2] if turn % 3 else [turn % 2, 2]
            there = [f"{block}=vulkan:0{mark}" for block in blocks]
            there += ["head=vulkan:0"] if turn % 2 else []
            await engine.place(",".join(there), strict=True)
            if turn % 8 == 0:
                await reply(engine, request)
            await engine.place("*=cpu:0", strict=True)
        after = (await engine.stats()).devices[1]
    assert (after.placed, after.placed_bytes, after.kv_bytes) == (0, 0, 0)
    assert after.kv_idle_bytes == 0
    assert after.allocated_bytes == empty.allocated_bytes
