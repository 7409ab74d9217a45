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
BLOCK = re.compile(
    r"^```(sh serve ray|sh serve devices|sh serve prefixes|sh serve|sh|python)\n(.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
STARTS = {
    "sh serve": "jitllmd serve -load model.jlm -id small\n",
    "sh serve ray": "jitllmd serve -load model.jlm -id small -ray local\n",
    "sh serve prefixes": "jitllmd serve -load model.jlm -id small -kv-cache cache\n",
    "sh serve devices": "jitllmd serve -load model.jlm -id small -devices cpu:0,cpu:1\n",
}
SERVED = ("-id", "small", "-threads", "1")
SERVERS = {"ray": "ray_server", "relocation": "two_devices", "prefixes": "remembering"}
"""The fixture of a recipe that needs another one."""
CLUSTER = "10.0.0.5:6379"
"""Where the recipes have one."""
BLOCKS = [
    pytest.param(
        SERVERS.get(recipe.stem, "server"),
        kind,
        text,
        id=f"{recipe.stem}-{number}",
    )
    for recipe in RECIPES
    for number, (kind, text) in enumerate(BLOCK.findall(recipe.read_text()))
    if kind not in STARTS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: TinyModel) -> Path:
    """Where `model.jlm` is."""
    folder = tmp_path_factory.mktemp("recipes")
    chat_model(tiny_gguf("llama"), folder / "model.jlm")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running(folder, "-load", folder / "model.jlm", *SERVED) as server:
        yield server


@pytest.fixture(scope="module")
def two_devices(folder: Path) -> Iterator[Server]:
    """The same with two of them, a thread each."""
    served = ("-id", "small", "-threads", "2", "-devices", "cpu:0,cpu:1")
    with running(folder, "-load", folder / "model.jlm", *served) as server:
        yield server


@pytest.fixture(scope="module")
def remembering(folder: Path) -> Iterator[Server]:
    """The same with a prefix cache."""
    cache = ("-kv-cache", folder / "cache")
    with running(folder, "-load", folder / "model.jlm", *SERVED, *cache) as server:
        yield server


@pytest.fixture(scope="module")
def ray_server(folder: Path) -> Iterator[Server]:
    """The same on a cluster."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    with running(folder, "-load", folder / "model.jlm", *SERVED, "-ray", "local") as server:
        yield server
        assert server.stop() == 0


def test_the_recipes_start_the_server_that_is_tested() -> None:
    blocks = [block for recipe in RECIPES for block in BLOCK.findall(recipe.read_text())]
    assert {(kind, text) for kind, text in blocks if kind in STARTS} == set(STARTS.items())
    assert len(BLOCKS) > 12


def test_the_index_has_them_all() -> None:
    index = next(recipe for recipe in RECIPES if recipe.stem == "README")
    linked = set(re.findall(r"\]\((\S+\.md)\)", index.read_text()))
    assert linked == {recipe.name for recipe in RECIPES} - {index.name}


@pytest.mark.parametrize(("where", "kind", "text"), BLOCKS)
def test_a_block_runs(
    folder: Path, request: pytest.FixtureRequest, where: str, kind: str, text: str
) -> None:
    server: Server = request.getfixturevalue(where)
    text = text.replace("http://127.0.0.1:8080", server.url)
    if server.said["ray"]:
        text = text.replace(CLUSTER, server.said["ray"]["address"])
    text = re.sub(r"^(jitllmd .*?)( &)?$", rf"\1 -addr {server.url}\2", text, flags=re.MULTILINE)
    # As the recipe of a cluster says; elsewhere it means nothing.
    token = {"RAY_AUTH_MODE": "token"} if server.said["ray"] else {}
    program = [sys.executable, "-"] if kind == "python" else ["bash", "-eu"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        program,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, **token, "PATH": path, "NO_PROXY": "*"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
