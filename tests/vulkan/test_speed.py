"""Of several cards the fastest is taken, by a kernel that is timed on each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jitllm.allot import devices_of
from jitllm.compose import resolve_config
from jitllm.config import EngineConfig
from jitllm.devices.choose import AvailableDevice
from jitllm.devices.vulkan import found, speed
from jitllm.devices.vulkan.found import FoundVulkan
from jitllm.errors import JitllmError
from jitllm.jit.cache import ObjectCache
from tests.ops.vulkan import needs_vulkan

GIB = 1 << 30
CARDS = (
    AvailableDevice("vulkan", 0, "llvmpipe", is_software=True, free_bytes=GIB),
    AvailableDevice("vulkan", 1, "slow", free_bytes=GIB),
    AvailableDevice("vulkan", 2, "fast", free_bytes=8 * GIB),
    AvailableDevice("vulkan", 3, "broken", free_bytes=GIB),
    AvailableDevice("vulkan", 4, "old", free_bytes=GIB, lacks="shaderInt64"),
)
RATES = {1: 1e11, 2: 9e11}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The cards, and which of them were timed with how many bytes."""
    asked = []

    def read_rate(index: int, num_bytes: int, cache: Any) -> float:
        asked.append((index, num_bytes))
        if index not in RATES:
            raise JitllmError("VK_ERROR_UNKNOWN")
        return RATES[index]

    monkeypatch.setattr(speed, "read_rate", read_rate)
    monkeypatch.setattr("jitllm.allot.find_vulkan", lambda: FoundVulkan(CARDS))
    monkeypatch.setattr(found, "has_card", lambda: True)
    return asked


def taken(devices: str) -> list[str]:
    chosen, _ = devices_of(resolve_config(EngineConfig(devices=devices)), {}, "", ObjectCache(None))
    return [one.name for one in chosen]


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        ("auto", ["vulkan:2", "cpu:0"]),
        ("gpu", ["vulkan:2", "vulkan:1", "vulkan:3"]),
        ("vulkan,cpu:0", ["vulkan:2", "vulkan:1", "vulkan:3", "cpu:0"]),
    ],
)
def test_the_fastest_comes_first(
    devices: str, names: list[str], timed: list[tuple[int, int]]
) -> None:
    """What is computed in software, or of no use, is not even timed; what breaks comes last."""
    assert taken(devices) == names
    assert timed == [(1, GIB // 4), (2, GIB // 4), (3, GIB // 4)]


@pytest.mark.parametrize("devices", ["vulkan:1", "cpu:0,vulkan:0", "vulkan:fast"])
def test_what_is_named_is_not_timed(devices: str, timed: list[tuple[int, int]]) -> None:
    assert len(taken(devices)) == len(devices.split(","))
    assert timed == []


def test_one_card_is_not_timed(
    timed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitllm.allot.find_vulkan", lambda: FoundVulkan(CARDS[:2]))
    assert taken("auto") == ["vulkan:1", "cpu:0"]
    assert timed == []


@pytest.mark.vulkan
@needs_vulkan
def test_a_device_multiplies(tmp_path: Path) -> None:
    """A software one too; the kernel is one that models use."""
    cache = ObjectCache(tmp_path)
    rates = [speed.read_rate(0, num_bytes, cache) for num_bytes in (1 << 20, 8 << 20)]
    assert all(1e6 < rate < 1e12 for rate in rates)
    assert [entry.name.split("-")[0] for entry in cache.entries()] == ["matmul"]
