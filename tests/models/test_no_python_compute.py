"""No arithmetic of a token runs in Python, and a second start compiles nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest

from jitllm.engine import Engine, Request
from tests.conftest import TinyModel
from tests.models.native import opened
from tests.models.served import ROOT, in_child, take_steps
from tests.models.shapes import Shape, write_container

# --- what a run imports and compiles -------------------------------------------------------------

_RUN = """
import json, sys
from jitllm.cli.main import main
code = main(sys.argv[1:])
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
sys.exit(code)
"""

_RUN_WITHOUT_COMPILERS = f"""
import sys
import llvmlite.binding
def refuse(*_, **__):
    raise AssertionError("this start compiles")
llvmlite.binding.parse_assembly = llvmlite.binding.parse_bitcode = refuse
sys.modules["numba"] = None  # importing it raises
{_RUN}
"""


UNWANTED = (
    "numpy",
    "numba",
    "pydantic",
    "rich",
    "jinja2",
    "email",
    "http",
    "multiprocessing",
    "ray",
)
"""What `jitllm run` has no use for."""


@dataclass(frozen=True)
class Run:
    code: int
    text: str
    errors: str

    @property
    def modules(self) -> set[str]:
        """Everything that was imported."""
        return set(json.loads(self.errors.splitlines()[-1]))


def run(program: str, path: Path, cache: Path) -> Run:
    """`jitllm run` in a process of its own, with compiled kernels in a folder of its own."""
    words = ["run", str(path), "-n", "4", "-temp", "0.7", "-top-k", "9", "the", "and"]
    child = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    return Run(child.returncode, child.stdout, child.stderr)


@pytest.mark.parametrize(("name", "weight_type"), [("gemma3", "f32"), ("llama-q", "q4_k")])
def test_a_run_imports_no_reference_and_no_numpy(
    name: str, weight_type: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model(name, weight_type)
    cold, warm = (run(_RUN, path, tmp_path) for _ in range(2))
    assert (cold.code, warm.code) == (0, 0), cold.errors + warm.errors
    assert "compiling kernels" in cold.errors
    assert "compiling kernels" not in warm.errors
    assert cold.text == warm.text
    for modules in (cold.modules, warm.modules):
        assert "jitllm.kernels.matmul.cpu" in modules
        assert {name for name in modules if name.endswith(".reference")} == set()
        assert {name for name in modules if name.split(".")[0] in UNWANTED} == set()


def test_a_second_start_compiles_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model("gemma3", "q8_0")
    refused = run(_RUN_WITHOUT_COMPILERS, path, tmp_path)
    assert refused.code == 1
    assert "this start compiles" in refused.errors

    first = run(_RUN, path, tmp_path)
    second = run(_RUN_WITHOUT_COMPILERS, path, tmp_path)
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    assert second.text == first.text


# --- what a token costs in Python ----------------------------------------------------------------

SMALL = Shape(blocks=82)
"""So slow that every token wakes the event loop by itself: those of smaller models fall together or
not, as the load of the machine has it, and each time makes tens of calls."""

LARGER = {
    "blocks": replace(SMALL, blocks=242),
    "width": replace(SMALL, width=384, ffn_width=768),
    "vocabulary": replace(SMALL, vocab=8192),
}
NUM_TOKENS = 120
WARM_TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


def container(folder: Path, shape: Shape) -> Path:
    """The container of a shape, written once."""
    path = folder / f"{hash(shape)}.jlm"
    return path if path.exists() else write_container(path, shape)


def calls_of_tokens(path: str, page_size_tokens: int) -> float:
    """Calls in all threads for a decoded token, of Python's functions and of C's: the mean, since
    tokens that come close together are handed on together."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    async def measure() -> float:
        seen = []
        settings = {"page_size_tokens": page_size_tokens, "threads": 1}
        async with opened(Path(path), **settings) as loaded:
            async for _ in loaded.engine.generate(Request((1,), max_tokens=NUM_TOKENS)):
                seen.append(num_calls)
        return (seen[-1] - seen[WARM_TOKENS]) / (len(seen) - 1 - WARM_TOKENS)

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        return asyncio.run(measure())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size_tokens", [64, 1], ids=["no page grows", "a page grows"])
@pytest.mark.parametrize("what", LARGER)
def test_calls_of_a_token_do_not_depend_on(what: str, page_size_tokens: int, folder: Path) -> None:
    small, larger = (
        in_child(calls_of_tokens, path=container(folder, shape), page_size_tokens=page_size_tokens)
        for shape in (SMALL, LARGER[what])
    )
    print(f"{small:.0f} calls a token, and {larger:.0f}")
    # A call a block would be 160 more.
    assert abs(larger - small) <= 80


# --- what is left behind -------------------------------------------------------------------------


NUM_WINDOWS, WINDOW_STEPS = 5, 100


def growth_of_windows(path: str, num_leaked: int) -> list[tuple[int, int]]:
    """(containers, blocks of memory) that Python has more of after each reply of decode steps.

    num_leaked: containers that are left behind in each step, on purpose.
    """
    leaked = []

    async def measure() -> list[tuple[int, int]]:
        seen = array("q", bytes(16 * (NUM_WINDOWS + 1)))  # what is written here is no object
        async with opened(Path(path), threads=1, share_prefixes=False) as loaded:
            for window in range(-2, NUM_WINDOWS + 1):  # the first ones fill what is kept for ever
                for _ in await take_steps(loaded.engine, WINDOW_STEPS):
                    leaked.extend([] for _ in range(num_leaked))
                await _idle(loaded.engine)
                if window >= 0:
                    seen[2 * window], seen[2 * window + 1] = _objects()
        growth = [after - before for before, after in zip(seen, seen[2:], strict=False)]
        return list(zip(growth[::2], growth[1::2], strict=True))

    return asyncio.run(measure())


async def _idle(engine: Engine) -> None:
    """Until no step is under way any more."""
    latest = -1
    while latest != (steps := (await engine.stats()).steps):
        latest = steps
        await asyncio.sleep(0.02)


def _objects() -> tuple[int, int]:
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks()


def test_decode_steps_leave_no_objects_behind(folder: Path) -> None:
    """Nothing grows with the steps, of 100 or of 500. What happens to be there when it is counted
    comes and goes."""
    windows = in_child(growth_of_windows, path=container(folder, SMALL), num_leaked=0)
    print("containers and blocks of memory:", windows)
    for growth in zip(*windows, strict=True):
        assert min(growth) <= 0
        assert median(growth) <= 2


def test_one_object_a_step_would_show(folder: Path) -> None:
    windows = in_child(growth_of_windows, path=container(folder, SMALL), num_leaked=1)
    print("containers and blocks of memory:", windows)
    for growth in zip(*windows, strict=True):
        assert median(growth) >= WINDOW_STEPS / 2
        assert min(growth) > 0
