"""Rows are found by name, and nothing else in the program knows a name."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from jitllm.errors import BadContainer, UnsupportedModel
from jitllm.kernels.op import Weight
from jitllm.models.registry import SPECS, describe, graph_of, spec_of
from tests.models import oracle
from tests.models.reference import Source

ROOT = Path(__file__).parents[2]

SHARED_NAMES = {
    **{
        ("jitllm/text/splits.py", name): "a pre-tokenizer, by `tokenizer.ggml.pre`"
        for name in ("bailingmoe", "bailingmoe2", "mellum", "minimax-m2", "qwen2")
    },
    ("jitllm/text/vocabulary.py", "llama"): "a kind of vocabulary, by `tokenizer.ggml.model`",
}
"""Words of other tables of GGUF that happen to be architectures as well."""


@dataclass(frozen=True)
class Entry(Weight):
    """A tensor table's entry."""

    name = "rope_freqs.weight"


@dataclass
class Header:
    """What a container says of itself."""

    arch: str
    config: Any
    tensors: Any


class Opened:
    """Stands for an open container; remembers what was read."""

    path = "m.jlm"

    def __init__(self, source: Source, **changes: object) -> None:
        entries = [Entry(*(getattr(w, f.name) for f in fields(w))) for w in source.weights]
        self.header = Header(source.arch, {**source.config, **changes}, entries)
        self.source = source
        self.asked: list[str] = []

    def read(self, tensor: Entry) -> bytes:
        """The bytes of a vector."""
        self.asked.append(tensor.role)
        return self.source.values[tensor.role, tensor.block].astype("<f4").tobytes()


def test_an_architecture_without_a_row_is_refused_with_a_list() -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        spec_of("mamba")
    assert "architecture 'mamba'" in str(refusal.value)
    assert all(name in str(refusal.value) for name in SPECS)


def test_a_container_that_does_not_fit_together_is_named() -> None:
    with pytest.raises(BadContainer, match=r"^m\.jlm: tensor blk\.3\.attn_norm\.weight is missing"):
        graph_of(Opened(oracle.model("llama"), block_count=4))


def test_factors_are_read_only_where_there_are_some() -> None:
    for name, expected in (("llama", ["rope_freqs"]), ("qwen3", [])):
        container = Opened(oracle.model(name))
        assert graph_of(container) == container.source.graph()
        assert container.asked == expected


def test_too_many_factors_are_not_even_read() -> None:
    container = Opened(oracle.model("llama"))
    container.header.tensors = [
        replace(t, cols=2**30) if t.role == "rope_freqs" else t for t in container.header.tensors
    ]
    with pytest.raises(BadContainer, match="rope_freqs.weight has more values than a head"):
        graph_of(container)
    assert container.asked == []


def test_the_page_of_models_is_current() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == describe()


def test_no_architecture_is_named_outside_its_row() -> None:
    """The name of the program that the goldens come from is not the name of an architecture."""
    name = re.compile(rf"(?<![\w-])({'|'.join(SPECS)})(?![\w-]|\.cpp)", re.IGNORECASE)
    assert name.search('if arch == "qwen3":')
    assert not name.search("as llama.cpp does")
    found = set()
    for path in sorted([*ROOT.glob("jitllm/**/*.py"), *ROOT.glob("actors/**/*.py")]):
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith("jitllm/models/arch/") or relative == "jitllm/models/registry.py":
            continue
        found |= {(relative, match[1].lower()) for match in name.finditer(path.read_text())}
    assert found - SHARED_NAMES.keys() == set()
