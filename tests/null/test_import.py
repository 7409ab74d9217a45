import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(program: str) -> list[str]:
    """The words that `program` prints where this tree is seen and nothing that is installed."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {program}"
    command = [sys.executable, "-I", "-S", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_importing_the_package_loads_nothing_else() -> None:
    assert run("import jitllm; print(*(m for m in sys.modules if 'jitllm' in m))") == ["jitllm"]


def test_the_ground_floor_needs_nothing_that_is_installed() -> None:
    assert run("import jitllm.config, jitllm.errors, jitllm.log, jitllm.units") == []
