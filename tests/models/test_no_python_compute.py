"""No arithmetic of a token runs in Python, and a second start compiles nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest

from jitllm.engine import Request
from tests.conftest import TinyModel
from tests.models.native import opened
from tests.models.served import ROOT, in_child
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
        assert {name for name in modules if name.split(".")[0] in ("numpy", "numba")} == set()


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

SMALL = Shape(blocks=2)
LARGER = {
    "blocks": replace(SMALL, blocks=32),
    "width": replace(SMALL, width=512, ffn_width=2048),
    "vocabulary": replace(SMALL, vocab=8192),
}
NUM_TOKENS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


def container(folder: Path, shape: Shape) -> Path:
    """The container of a shape, written once."""
    path = folder / f"{hash(shape)}.jlm"
    return path if path.exists() else write_container(path, shape)


def calls_of_tokens(path: str, page_size_tokens: int) -> list[int]:
    """Calls in all threads for each decoded token, of Python's functions and of C's."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    async def measure() -> list[int]:
        seen = []
        settings = {"page_size_tokens": page_size_tokens, "threads": 1}
        async with opened(Path(path), **settings) as loaded:
            async for _ in loaded.engine.generate(Request((1,), max_tokens=NUM_TOKENS)):
                seen.append(num_calls)
        return [after - before for before, after in zip(seen, seen[1:], strict=False)]

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
    print(f"{median(small)} calls a token, and {median(larger)}")
    # Wake-ups of the event loop fall together now and then, 20 calls each; a call a block would be
    # 30 more.
    assert abs(median(larger) - median(small)) <= 25


# --- what is left behind -------------------------------------------------------------------------


def objects_left_by_steps(path: str, num_steps: int) -> tuple[int, int]:
    """(containers, blocks of memory) that Python has more of after `num_steps` decode steps."""

    async def measure() -> tuple[int, int]:
        async with opened(Path(path), threads=1) as loaded:
            stream = loaded.engine.generate(Request((1,), max_tokens=2 * num_steps + 50))
            for _ in range(50):
                await anext(stream)
            before = _objects()
            for _ in range(num_steps):
                await anext(stream)
            after = _objects()
            await stream.aclose()  # type: ignore[attr-defined]
        return after[0] - before[0], after[1] - before[1]

    return asyncio.run(measure())


def _objects() -> tuple[int, int]:
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks()


def test_decode_steps_leave_no_objects_behind(folder: Path) -> None:
    num_containers, num_blocks = in_child(
        objects_left_by_steps, path=container(folder, SMALL), num_steps=100
    )
    print(f"{num_containers} containers, {num_blocks} blocks of memory")
    assert num_containers < 50
    assert num_blocks < 100 + 50  # the id of a token is kept, as an object of its own
