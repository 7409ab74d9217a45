"""docs/recipes/serve.md: every block runs, against the server that the first one starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.server import Server, chat_model, running
from tests.conftest import TinyModel

RECIPE = Path(__file__).parents[2] / "docs" / "recipes" / "serve.md"
BLOCK = re.compile(r"^```(sh serve|sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = BLOCK.findall(RECIPE.read_text())
START = "jitllmd serve -load model.jlm -id small\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: TinyModel) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("recipe")
    model = chat_model(tiny_gguf("llama"), folder / "model.jlm")
    with running(folder, "-load", model, "-id", "small", "-threads", "1") as server:
        yield server


def test_the_recipe_starts_the_server_that_is_tested() -> None:
    assert [text for kind, text in BLOCKS if kind == "sh serve"] == [START]
    assert len(BLOCKS) > 4


@pytest.mark.parametrize(("kind", "text"), [block for block in BLOCKS if block[0] != "sh serve"])
def test_a_block_runs(server: Server, kind: str, text: str) -> None:
    text = text.replace("http://127.0.0.1:8080", server.url)
    text = re.sub(r"^(jitllmd .*)$", rf"\1 -addr {server.url}", text, flags=re.MULTILINE)
    program = [sys.executable, "-"] if kind == "python" else ["bash", "-eu"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        program,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": path, "NO_PROXY": "*"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
