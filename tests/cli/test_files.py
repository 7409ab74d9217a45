"""The verbs that read files and start no engine: convert, info, tokenize."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from jitllm.formats.jlm import Container
from tests.cli.fake import Jitllm, Stdin
from tests.conftest import TinyModel


@pytest.fixture
def source(tiny_gguf: TinyModel, tmp_path: Path) -> Path:
    """A GGUF file in a folder of its own."""
    return Path(shutil.copy(tiny_gguf("llama"), tmp_path / "small.gguf"))


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


def test_convert_writes_beside_the_source(jitllm: Jitllm, source: Path) -> None:
    done = jitllm("convert", source)
    assert (done.code, done.out) == (0, "")
    assert done.err.splitlines()[0] == f"{source} -> {source.with_suffix('.jlm')}"
    assert "earlier attempt" not in done.err
    assert jitllm("info", source.with_suffix(".jlm"), "-check").code == 0


def test_convert_as_json(jitllm: Jitllm, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jlm"
    report = jitllm("convert", source, out, "--json", "--stop-id", "7", "-stop-id=8").json
    assert report["output"] == str(out)
    assert report["file_bytes"] == out.stat().st_size
    assert report["resumed_bytes"] == 0
    assert {7, 8} <= set(report["stop_ids"])
    with Container.open(out) as container:
        assert container.header.stop_ids == tuple(report["stop_ids"])


def test_plan_writes_nothing(jitllm: Jitllm, source: Path) -> None:
    report = jitllm("convert", source, "-plan", "-json").json
    assert report["arch"] == "llama"
    assert report["block_bytes"] > report["largest_block_bytes"] > 0
    assert "architecture" in jitllm("convert", source, "-plan").out
    assert list(source.parent.iterdir()) == [source]


def test_a_chat_template_is_taken_over(jitllm: Jitllm, source: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    assert jitllm("convert", source, "-chat-template", template).code == 0
    with Container.open(source.with_suffix(".jlm")) as container:
        assert container.header.chat_templates == {"default": "{{ messages[0].content }}"}


def test_a_broken_chat_template_is_refused(jitllm: Jitllm, source: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% if %}")
    done = jitllm("convert", source, "-chat-template", template)
    assert done.code == 1
    assert "line 1" in done.err
    assert not source.with_suffix(".jlm").exists()


def test_the_source_is_not_overwritten(jitllm: Jitllm, source: Path) -> None:
    before = source.read_bytes()
    assert jitllm("convert", source, source).code == 2
    assert source.read_bytes() == before


def test_info_has_every_key(jitllm: Jitllm, model: Path) -> None:
    report = jitllm("info", model, "--json").json
    with Container.open(model) as container:
        header = container.header
    lengths = [extent.length for extent in header.blocks]
    assert report["arch"] == "llama"
    assert report["blocks"] == len(lengths)
    assert report["dense_bytes"] == header.dense.length
    assert report["block_bytes"] == sum(lengths)
    assert report["largest_block_bytes"] == max(lengths)
    assert report["expert_bytes"] == 0
    assert report["weight_types"]["F32"]["tensors"] == len(header.tensors)
    embedding = next(t for t in header.tensors if t.role == "token_embd")
    assert report["bytes_per_token"] == (
        header.dense.length
        + sum(lengths)
        - embedding.size_bytes
        + embedding.size_bytes // embedding.rows
    )


def test_experts_are_told_apart_from_their_blocks(jitllm: Jitllm, tiny_model: TinyModel) -> None:
    """Converting and looking say the same: how many there are, and what a token reads of them."""
    path = tiny_model("deepseek")
    report = jitllm("info", path, "-json").json
    with Container.open(path) as container:
        header = container.header
    lengths = [expert.extent.length for expert in header.experts]
    assert (report["blocks"], report["experts"]) == (3, 16)
    assert report["expert_bytes"] == sum(lengths)
    assert report["largest_expert_bytes"] == max(lengths)
    assert sum(kind["bytes"] for kind in report["weight_types"].values()) == sum(
        entry.size_bytes * max(entry.experts, 1) for entry in header.tensors
    )
    embedding = next(t for t in header.tensors if t.role == "token_embd")
    assert report["bytes_per_token"] == (
        header.weight_bytes
        - embedding.size_bytes
        + embedding.size_bytes // embedding.rows
        - sum(lengths) * 6 // 8  # two of eight are used
    )
    assert re.search(r"\nexperts +16 in 2 blocks, 2 a token and block", jitllm("info", path).out)


def test_converting_a_mixture_says_how_many_experts(
    jitllm: Jitllm, tiny_gguf: TinyModel, tmp_path: Path
) -> None:
    source = Path(shutil.copy(tiny_gguf("deepseek"), tmp_path))
    assert jitllm("convert", source, "-plan", "-json").json["experts"] == 16
    assert re.search(r"\nexperts +16, together", jitllm("convert", source, "-plan").out)
    assert "\nexperts: 16, together" in jitllm("convert", source).err


def test_info_in_words(jitllm: Jitllm, model: Path) -> None:
    out = jitllm("info", model).out
    assert "architecture    llama\n" in out
    assert re.search(r"\nsource size +[0-9.]+ MiB\n", out)
    assert "rope.freq_base" not in out
    assert "rope.freq_base" in jitllm("info", model, "-kv").out


def test_info_finds_damage(jitllm: Jitllm, model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.jlm"
    with Container.open(model) as container:
        offset = container.header.blocks[1].offset
    data = bytearray(model.read_bytes())
    data[offset + 5] ^= 1
    damaged.write_bytes(data)
    assert jitllm("info", model, "-check").code == 0
    done = jitllm("info", damaged, "-check", "-json")
    assert done.code == 1
    assert len(done.json["problems"]) == 1
    assert done.err.count("\n") == 1
    assert "block 1" in done.err
    assert jitllm("info", damaged).code == 0


def test_tokenize(jitllm: Jitllm, model: Path, stdin: Stdin) -> None:
    report = jitllm("tokenize", model, "Hello", "there", "-json").json
    assert "".join(report["pieces"][1:]).lstrip() == "Hello there"
    assert len(report["ids"]) == len(report["pieces"])
    assert report["is_lossless"]
    lines = jitllm("tokenize", model, "Hello there").out.splitlines()
    assert lines[0] == f"{len(report['ids'])} tokens"
    assert lines[1].split() == [str(token_id) for token_id in report["ids"]]
    assert lines[2].split(" -> ")[0].strip() == str(report["ids"][0])
    assert len(lines) == 2 + len(report["ids"])
    stdin(b"Hello there")
    assert jitllm("tokenize", model, "--json").json["ids"] == report["ids"]
    assert (
        jitllm("tokenize", model, "-json", "-plain", "Hello there").json["ids"]
        == (report["ids"][1:])
    )


def test_tokenize_needs_a_text(jitllm: Jitllm, model: Path, stdin: Stdin) -> None:
    stdin(b"", True)
    assert jitllm("tokenize", model).code == 2
