"""The import contracts of pyproject.toml can fail: each is shown an import that it must refuse."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSE = [
    "jitllm.cli.main",
    "jitllm.cli.run",
    "jitllm.compose",
    "jitllm.handle.http",
    "jitllm.remote",
    "jitllm.engine",
    "jitllm.schedule.plan",
    "jitllm.text.chat",
    "jitllm.models.build",
    "jitllm.formats.jlm",
    "jitllm.memory.pages",
    "jitllm.jit.cpu",
    "jitllm.devices.host",
    "jitllm.kernels.norm.cpu",
    "jitllm.kernels.norm.reference",
    "jitllm.config",
    "jitllm.errors",
    "jitllm.log",
    "jitllm.units",
    "actors.client",
    "actors.ray",
]


def lint(root: Path, module: str, text: str) -> str:
    """What import-linter says of a small house in which `module` reads `text`."""
    for name in HOUSE:
        path = root / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if name == module else "")
    for folder in [path for path in root.rglob("*") if path.is_dir()]:
        (folder / "__init__.py").touch()
    shutil.copy(ROOT / "pyproject.toml", root)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("jitllm.compose", "import actors.client"),
        ("actors.client", "import jitllm.engine"),
        ("actors.ray", "import ray"),
        ("jitllm.models.build", "import jitllm.formats.jlm"),
    ],
)
def test_imports_that_point_down_are_fine(tmp_path: Path, module: str, text: str) -> None:
    assert "0 broken" in lint(tmp_path, module, text)


@pytest.mark.parametrize(
    ("module", "text", "contract"),
    [
        ("jitllm.units", "import jitllm.engine", "Imports point down"),
        ("jitllm.schedule.plan", "import jitllm.text.chat", "Imports point down"),
        ("actors.client", "import jitllm.cli.main", "Imports point down"),
        ("jitllm.remote", "import jitllm.handle.http", "Imports point down"),
        ("jitllm.kernels.norm.cpu", "import jitllm.kernels.norm.reference", "References"),
        ("jitllm.cli.main", "import actors.client", "Only jitllm.compose imports actors"),
        ("actors.client", "import ray", "Only actors.ray and actors.cluster import Ray"),
        ("jitllm.engine", "import ray.util", "Only actors.ray and actors.cluster import Ray"),
        ("actors.client", "import fastapi", "Actors know no edge"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, module: str, text: str, contract: str) -> None:
    report = lint(tmp_path, module, text)
    assert any(line.startswith(contract) and "BROKEN" in line for line in report.splitlines())
