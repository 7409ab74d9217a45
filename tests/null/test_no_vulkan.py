"""Without Vulkan or the Slang compiler everything else works, and what is missing has a name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jitllm.devices.vulkan.api import Api
from jitllm.errors import JitllmError

ROOT = Path(__file__).parents[2]


def test_modules_load_without_the_packages() -> None:
    program = (
        "import sys; sys.modules |= dict.fromkeys(('vulkan', 'slangpy'));"
        "import jitllm.devices.vulkan.program, jitllm.jit.slang, jitllm.kernels.matmul.gpu"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vulkan", None)
    with pytest.raises(JitllmError, match=r"`vulkan` is not installed; pip install 'jitllm\[vulk"):
        Api()


def test_a_missing_loader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package fails like this when it finds no library."""
    (tmp_path / "vulkan.py").write_text("raise OSError('Cannot find Vulkan SDK version')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vulkan", raising=False)
    with pytest.raises(JitllmError, match=r"no Vulkan loader .*apt install libvulkan1"):
        Api()
