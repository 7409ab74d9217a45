"""Without Vulkan the CPU works, and whoever wants Vulkan is told what to install."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jitllm.devices.grammar import parse_devices
from jitllm.devices.vulkan import found
from jitllm.devices.vulkan.api import INSTALL
from jitllm.devices.vulkan.found import (
    MIN_RESERVE_BYTES,
    default_budget,
    find_vulkan,
    has_card,
    may_take_vulkan,
)
from jitllm.engine import Request
from jitllm.errors import JitllmError, PlacementError
from tests.conftest import TinyModel
from tests.models.native import opened, reply
from tests.ops.vulkan import needs_vulkan


@pytest.fixture
def no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise JitllmError("there is no Vulkan loader (libvulkan.so.1)", INSTALL)

    monkeypatch.setattr(found.Instance, "__init__", refuse)


@pytest.mark.usefixtures("no_loader")
def test_what_is_missing_has_a_name() -> None:
    none = find_vulkan()
    assert not none.devices
    assert none.problem == "there is no Vulkan loader (libvulkan.so.1)"
    assert "mesa-vulkan-drivers" in none.remedy


@pytest.mark.usefixtures("no_loader")
@pytest.mark.parametrize("devices", ["vulkan:0", "cpu:0,vulkan:1", "vulkan:some card"])
async def test_a_device_that_is_named_is_an_error(devices: str, tiny_model: TinyModel) -> None:
    with pytest.raises(PlacementError, match=r"-devices vulkan:.*: there is no Vulkan loader") as e:
        async with opened(tiny_model("llama"), devices=devices):
            pass
    assert "apt install" in e.value.remedy


@pytest.mark.usefixtures("no_loader")
@pytest.mark.parametrize("devices", ["auto", "all", "cpu:0"])
async def test_the_cpu_works(devices: str, tiny_model: TinyModel) -> None:
    async with opened(tiny_model("llama"), devices=devices) as loaded:
        assert len((await reply(loaded.engine, Request((1, 2), max_tokens=3))).ids) == 3


@pytest.mark.parametrize("verb", ["hardware", "run"])
@needs_vulkan
def test_without_a_driver_a_process_says_what_to_install(verb: str, tiny_model: TinyModel) -> None:
    """The real loader, which is told of no driver."""
    command = [sys.executable, "-m", "jitllm.cli.main", verb]
    if verb == "run":
        command += [str(tiny_model("llama")), "-devices", "vulkan:0", "-n", "1", "hello"]
    none = dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), "/nonexistent")
    done = subprocess.run(
        command, env=os.environ | none, capture_output=True, text=True, check=False, timeout=120
    )
    said = done.stdout if verb == "hardware" else done.stderr
    (line,) = (line for line in said.splitlines() if "mesa-vulkan-drivers" in line)
    if verb == "hardware":
        assert done.returncode == 0
        assert line.startswith("vulkan ")
    else:
        assert done.returncode == PlacementError.exit_code
        assert "-devices vulkan:0: Vulkan does not start: vkCreateInstance: VK_ERROR_" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("devices", "asks"),
    [("cpu", False), ("cpu:0,cuda:0", False), ("vulkan", True), ("cpu,gpu", True), ("all", True)],
)
def test_the_loader_is_asked_only_where_it_matters(devices: str, asks: bool) -> None:
    assert may_take_vulkan(parse_devices(devices)) is asks


def test_auto_asks_where_there_is_a_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("root")
    assert not has_card(root)
    (root / "dev/dri").mkdir(parents=True)
    (root / "dev/dri/renderD128").touch()
    assert has_card(root)
    for there in (True, False):
        monkeypatch.setattr(found, "has_card", lambda there=there: there)
        assert may_take_vulkan(parse_devices("auto")) is there


def test_an_eighth_is_left_and_a_quarter_of_a_gibibyte_at_the_least() -> None:
    assert default_budget(16 << 30) == 14 << 30
    assert default_budget(1 << 30) == (1 << 30) - MIN_RESERVE_BYTES
    assert default_budget(100 << 20) == 0
