"""docs/recipes: every block runs, beside the model and the server that the recipes speak of."""

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

RECIPES = sorted((Path(__file__).parents[2] / "docs" / "recipes").glob("*.md"))
BLOCK = re.compile(r"^```(sh serve|sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
START = "jitllmd serve -load model.jlm -id small\n"
BLOCKS = [
    pytest.param(kind, text, id=f"{recipe.stem}-{number}")
    for recipe in RECIPES
    for number, (kind, text) in enumerate(BLOCK.findall(recipe.read_text()))
    if kind != "sh serve"
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: TinyModel) -> Path:
    """Where `model.jlm` is."""
    folder = tmp_path_factory.mktemp("recipes")
    chat_model(tiny_gguf("llama"), folder / "model.jlm")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    model = folder / "model.jlm"
    with running(folder, "-load", model, "-id", "small", "-threads", "1") as server:
        yield server


def test_the_recipes_start_the_server_that_is_tested() -> None:
    blocks = [block for recipe in RECIPES for block in BLOCK.findall(recipe.read_text())]
    starts = {text for kind, text in blocks if kind == "sh serve"}
    assert starts == {START}
    assert len(BLOCKS) > 12


def test_the_index_has_them_all() -> None:
    index = next(recipe for recipe in RECIPES if recipe.stem == "README")
    linked = set(re.findall(r"\]\((\S+\.md)\)", index.read_text()))
    assert linked == {recipe.name for recipe in RECIPES} - {index.name}


@pytest.mark.parametrize(("kind", "text"), BLOCKS)
def test_a_block_runs(folder: Path, server: Server, kind: str, text: str) -> None:
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
        cwd=folder,
        env={**os.environ, "PATH": path, "NO_PROXY": "*"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
