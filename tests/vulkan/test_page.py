"""docs/devices.md: its commands run, and its device lists mean something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jitllm.devices.grammar import parse_devices
from tests.api.server import chat_model
from tests.conftest import TinyModel
from tests.ops.vulkan import needs_vulkan

PAGE = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ENTRIES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: TinyModel) -> Path:
    """Where `model.jlm` is, and `mixture.jlm`."""
    folder = tmp_path_factory.mktemp("devices")
    chat_model(tiny_gguf("llama"), folder / "model.jlm")
    chat_model(tiny_gguf("qwen3moe"), folder / "mixture.jlm")
    return folder


def test_there_are_some_of_both() -> None:
    assert len(COMMANDS) >= 4
    assert {"auto", "all", "vulkan:0=6G"} <= set(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_is_one(entry: str) -> None:
    assert len(parse_devices(entry)) == 1


@pytest.mark.vulkan
@needs_vulkan
@pytest.mark.parametrize("text", COMMANDS, ids=lambda text: " ".join(text.split()[:2]))
def test_a_command_runs(text: str, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-eu"],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "PATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
