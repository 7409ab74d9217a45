"""A Vulkan device that is gone takes nothing with it but itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jitllm.devices.vulkan.api import VulkanError
from jitllm.devices.vulkan.device import Queue
from jitllm.engine import Request, Sampling
from jitllm.errors import JitllmError, PlacementError
from tests.conftest import TinyModel
from tests.models.native import Reply, opened, replies
from tests.models.test_moves import following
from tests.ops.vulkan import needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]

REQUESTS = (
    Request((1, 259, 75, 260), max_tokens=60),
    Request((1, 259, 75), max_tokens=50, sampling=Sampling(temperature=0.8, seed=3)),
)


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


class Fault:
    """Once `code` is set, whoever waits for the device gets that error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code = ""
        wait = Queue.wait

        def failing(queue: Queue, *args: Any) -> None:
            if self.code:
                raise VulkanError("vkWaitSemaphores", self.code)
            wait(queue, *args)

        monkeypatch.setattr(Queue, "wait", failing)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    return Fault(monkeypatch)


async def answers(model: Path) -> list[Reply]:
    """On the host alone."""
    async with opened(model, devices="cpu:0", kv_type="f32") as loaded:
        return await replies(loaded.engine, REQUESTS)


@pytest.mark.parametrize("code", ["VK_ERROR_DEVICE_LOST", "VK_TIMEOUT"])
@pytest.mark.parametrize("placement", ["*=vulkan:0", "0=cpu:0,*=vulkan:0,head=cpu:0"])
async def test_replies_finish_on_the_host(
    model: Path, fault: Fault, placement: str, code: str
) -> None:
    expected = await answers(model)
    choices = {"devices": "cpu:0,vulkan:0", "placement": placement, "kv_type": "f32"}
    async with opened(model, **choices) as loaded:
        seen = [asyncio.Event() for _ in REQUESTS]
        tasks = [
            asyncio.create_task(following(loaded.engine, request, event))
            for request, event in zip(REQUESTS, seen, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in seen))
        fault.code = code
        found = [await task for task in tasks]
        stats = await loaded.engine.stats()
        again = await replies(loaded.engine, REQUESTS)
    assert [reply.ids for reply in found] == [reply.ids for reply in expected]
    assert [reply.ids for reply in again] == [reply.ids for reply in expected]
    assert stats.losses == 1
    assert stats.lost == ("vulkan:0",)
    assert str(stats.placement) == "0-2=cpu:0,head=cpu:0"


async def test_with_no_gpu_fallback_requests_fail_and_say_why(model: Path, fault: Fault) -> None:
    """Those under way, and those that come later."""
    choices = {"devices": "cpu:0,vulkan:0", "placement": "0=cpu:0,*=vulkan:0", "kv_type": "f32"}
    async with opened(model, gpu_fallback=False, **choices) as loaded:
        seen = asyncio.Event()
        task = asyncio.create_task(following(loaded.engine, REQUESTS[0], seen))
        await seen.wait()
        fault.code = "VK_ERROR_DEVICE_LOST"
        with pytest.raises(JitllmError, match=r"vulkan:0 was lost: .*VK_ERROR_DEVICE_LOST"):
            await task
        with pytest.raises(JitllmError, match=r"vulkan:0 was lost: .*VK_ERROR_DEVICE_LOST"):
            await replies(loaded.engine, REQUESTS)
        stats = await loaded.engine.stats()
    assert str(stats.placement) == "0=cpu:0,1-2=vulkan:0,head=vulkan:0"


async def test_a_move_to_it_fails_and_replies_go_on(model: Path, fault: Fault) -> None:
    async with opened(model, devices="cpu:0,vulkan:0", placement="*=cpu:0") as loaded:
        before = await replies(loaded.engine, REQUESTS)
        fault.code = "VK_ERROR_DEVICE_LOST"
        with pytest.raises((PlacementError, JitllmError), match="VK_ERROR_DEVICE_LOST|was lost"):
            await loaded.engine.move([1, 2], "vulkan:0")
        assert [r.bits for r in await replies(loaded.engine, REQUESTS)] == [r.bits for r in before]


async def test_alone_it_is_named(model: Path, fault: Fault) -> None:
    request = replace(REQUESTS[0], max_tokens=5)
    async with opened(model, devices="vulkan:0") as loaded:
        await replies(loaded.engine, [request])
        fault.code = "VK_ERROR_DEVICE_LOST"
        with pytest.raises(JitllmError, match=r"vulkan:0 was lost: .*VK_ERROR_DEVICE_LOST"):
            await replies(loaded.engine, [request])
