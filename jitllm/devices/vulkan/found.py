"""The Vulkan devices of this machine, as engines choose among them, or why there is none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jitllm.devices.choose import AvailableDevice
from jitllm.devices.grammar import DeviceEntry
from jitllm.devices.vulkan.api import INSTALL
from jitllm.devices.vulkan.instance import Instance, PhysicalDevice
from jitllm.errors import JitllmError

RESERVE_PART = 8
MIN_RESERVE_BYTES = 256 << 20
"""What is left of a device's free memory: one part in so many, and so much at the least."""

_CARDS = ("dri/renderD*", "nvidia[0-9]*", "dxg", "kfd")


@dataclass(frozen=True, slots=True)
class FoundVulkan:
    """The devices in the loader's order. problem, remedy: why there is none, if so."""

    devices: tuple[AvailableDevice, ...] = ()
    problem: str = ""
    remedy: str = ""


def find_vulkan() -> FoundVulkan:
    """Ask the loader, which takes about a fifth of a second where there is one."""
    try:
        instance = Instance()
    except JitllmError as error:
        return FoundVulkan((), error.problem, error.remedy or INSTALL)
    try:
        found = tuple(map(_available, instance.devices()))
    finally:
        instance.close()
    if not found:
        return FoundVulkan((), "no Vulkan driver has a device", INSTALL)
    return FoundVulkan(found)


def may_take_vulkan(entries: Sequence[DeviceEntry]) -> bool:
    """Whether a device list can mean one here. `auto` takes cards only, and there may be none."""
    kinds = {entry.backend for entry in entries if not entry.node}
    return bool(kinds & {"vulkan", "gpu", "all"}) or ("auto" in kinds and has_card())


def has_card(root: Path = Path("/")) -> bool:
    """Whether the kernel shows a graphics card; True where it is not known."""
    if not sys.platform.startswith("linux"):
        return True
    return any(next((root / "dev").glob(pattern), None) is not None for pattern in _CARDS)


def default_budget(free_bytes: int) -> int:
    """What a model takes of a device's free memory when nobody says."""
    return max(free_bytes - max(free_bytes // RESERVE_PART, MIN_RESERVE_BYTES), 0)


def _available(device: PhysicalDevice) -> AvailableDevice:
    own = [heap.num_bytes for heap in device.heaps if heap.is_local]
    return AvailableDevice(
        "vulkan",
        device.index,
        device.name,
        uuid=device.uuid or None,
        is_software=device.kind == "software",
        is_unified=device.is_unified,
        lacks=", ".join(device.lacks),
        free_bytes=device.free_bytes,
        total_bytes=max(own, default=0),
    )
