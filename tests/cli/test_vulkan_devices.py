"""What `jitllm hardware` says of Vulkan devices, and of their absence."""

from __future__ import annotations

import pytest

from jitllm.devices.choose import AvailableDevice
from jitllm.devices.vulkan import found
from jitllm.devices.vulkan.api import INSTALL
from jitllm.devices.vulkan.found import FoundVulkan
from tests.cli.fake import Jitllm


def test_hardware_says_what_to_install(jitllm: Jitllm, monkeypatch: pytest.MonkeyPatch) -> None:
    none = FoundVulkan((), "there is no Vulkan loader", INSTALL)
    monkeypatch.setattr(found, "find_vulkan", lambda: none)
    (line,) = (s for s in jitllm("hardware").out.splitlines() if s.startswith("vulkan"))
    assert "none: there is no Vulkan loader; install a Vulkan loader" in line
    assert "mesa-vulkan-drivers" in jitllm("hardware", "-json").json["vulkan"]


def test_hardware_lists_devices_and_why_they_are_left_out(
    jitllm: Jitllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = (
        AvailableDevice("vulkan", 0, "a card", free_bytes=3 << 30, total_bytes=4 << 30),
        AvailableDevice("vulkan", 1, "old", lacks="shaderInt64", free_bytes=1, total_bytes=1),
        AvailableDevice("vulkan", 2, "llvmpipe", is_software=True, free_bytes=1, total_bytes=1),
    )
    monkeypatch.setattr(found, "find_vulkan", lambda: FoundVulkan(cards))
    devices = {d["name"]: d for d in jitllm("hardware", "-json").json["devices"]}
    assert devices["vulkan:0"]["declined"] is None
    assert devices["vulkan:0"]["free_bytes"] == 3 << 30
    assert devices["vulkan:1"]["declined"] == "it lacks shaderInt64"
    assert devices["vulkan:2"]["declined"] == "computed in software: only when named"
