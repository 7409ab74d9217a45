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


def test_a_client_of_a_server_needs_nothing_that_is_installed() -> None:
    assert run("import jitllm; jitllm.connect; import jitllm.handle.http, jitllm.remote") == []


def test_the_command_line_loads_what_a_verb_needs_when_it_is_chosen() -> None:
    program = "import sys, jitllm.cli.main; print(*(m.split('.')[0] for m in sys.modules))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    unwanted = {"asyncio", "actors", "llvmlite", "numpy", "pydantic", "rich", "tokenizers"}
    assert set(done.stdout.split()) & unwanted == set()


def test_what_is_handed_out_is_there() -> None:
    import jitllm

    assert all(hasattr(jitllm, name) for name in jitllm.__all__)
    assert not hasattr(jitllm, "nothing")


def test_a_handle_needs_no_package_of_the_server() -> None:
    blocked = ("fastapi", "starlette", "uvicorn", "pydantic", "httpx", "ray")
    program = (
        f"import sys; sys.modules |= dict.fromkeys({blocked!r}); import jitllm.handle.embedded"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
