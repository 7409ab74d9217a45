"""Bad input on the command line: exactly one line that says what is wrong, and what to do."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jitllm.formats import convert as convert_module
from jitllm.formats.jlm import VERSION, Container
from jitllm.formats.reader import Reader
from jitllm.models.registry import SPECS
from tests.cli import damage
from tests.cli.fake import Jitllm
from tests.conftest import TinyModel
from tests.oracle import make_models

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tiny_gguf: TinyModel, tmp_path: Path) -> Path:
    """A GGUF file in a folder whose name a shell would take apart."""
    folder = tmp_path / "my models"
    folder.mkdir()
    return Path(shutil.copy(tiny_gguf("llama", "q8_0"), folder / "it's small.gguf"))


@pytest.fixture
def model(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A container that a test may damage."""
    return Path(shutil.copy(tiny_model("llama", "q8_0"), tmp_path / "m.jlm"))


def refusal(done: Any, code: int = 1) -> str:
    """The one line that says what is wrong; reports of an engine at work may stand before it."""
    lines = done.err.splitlines()
    assert [line for line in lines if line.startswith("jitllm: ")] == lines[-1:], done.err
    assert "Traceback" not in done.err
    assert "a bug" not in done.err
    assert done.code == code
    return str(lines[-1])


def files(path: Path) -> list[str]:
    return sorted(found.name for found in path.parent.iterdir())


def test_the_command_that_a_refusal_names_works(jitllm: Jitllm, source: Path) -> None:
    line = refusal(jitllm("run", source, "Hello"))
    command = shlex.split(line.split("convert it: ")[1])
    assert command == ["jitllm", "convert", str(source)]
    assert line == f"jitllm: {source} is a GGUF file; convert it: {shlex.join(command)}"
    assert jitllm(*command[1:]).code == 0
    assert jitllm("run", source.with_suffix(".jlm"), "-n", "1", "Hello").code == 0


def test_a_container_of_another_version_names_the_command(jitllm: Jitllm, model: Path) -> None:
    data = model.read_bytes()
    for version in (0, VERSION - 1, VERSION + 1, 2**32 - 1):
        body = data[damage.PROLOGUE.size :]
        model.write_bytes(damage.sealed(body, b"", version))
        for verb in (["run", model, "Hello"], ["info", model], ["tokenize", model, "Hello"]):
            line = refusal(jitllm(*verb))
            assert f"format version {version}, and this program reads version {VERSION}" in line
            assert line.endswith(f"convert it: jitllm convert SOURCE.gguf {model}")


def write_source(path: Path, arch: str = "llama", weight_type: Any = None) -> Path:
    """The tiny llama as another architecture, or with one matrix of another type."""
    spec = make_models.specs()["llama"]
    writer = gguf.GGUFWriter(path, arch)
    for key, (kind, value) in spec["kv"].items():
        writer.add_key_value(key.replace("llama.", f"{arch}."), value, make_models.KINDS[kind])
    make_models.add_vocabulary(writer, 320)
    for name, shape in spec["tensors"].items():
        if weight_type is not None and name == "blk.1.ffn_up.weight":
            row_bytes = 256 // 32 * 18
            packed = np.zeros((shape[1], row_bytes), np.uint8)
            writer.add_tensor(name, packed, raw_dtype=weight_type)
        else:
            writer.add_tensor(name, np.ones(tuple(reversed(shape)), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("flags", [(), ("-plan",), ("-json",)])
def test_an_unknown_architecture_is_named(
    jitllm: Jitllm, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    source = write_source(tmp_path / "a.gguf", arch="falcon")
    line = refusal(jitllm("convert", source, *flags))
    assert "architecture 'falcon' is not supported" in line
    assert f"supported: {', '.join(sorted(SPECS))}" in line
    assert files(source) == ["a.gguf"]


def test_an_unknown_weight_type_is_named(jitllm: Jitllm, tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.gguf", weight_type=gguf.GGMLQuantizationType.IQ4_NL)
    line = refusal(jitllm("convert", source))
    assert "weight type 'IQ4_NL' is not supported; supported: F32, F16, BF16, Q4_0" in line
    assert line.endswith("Q6_K")
    assert files(source) == ["a.gguf"]


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fills_up_leaves_the_old_output(
    jitllm: Jitllm, source: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    out = source.with_suffix(".jlm")
    out.write_bytes(b"old")
    real, calls = getattr(os, call), 0

    def full(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= {"pwrite": 5}.get(call, 1):
            raise OSError(code, os.strerror(code))
        return real(*args)

    monkeypatch.setattr(convert_module.os, call, full)
    line = refusal(jitllm("convert", source))
    assert str(out) in line
    wanted = "its disk has" if code != errno.EIO else os.strerror(code)
    assert wanted in line
    assert out.read_bytes() == b"old"
    assert files(source) == [source.name, out.name]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    jitllm: Jitllm, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "_free_bytes", lambda dest: 1 << 20)
    line = refusal(jitllm("convert", source))
    assert "its disk has 1.00 MiB free; free some space or write to another disk" in line
    assert files(source) == [source.name]


@pytest.mark.parametrize("flags", [("-ctx", "4"), ("-ctx", "4", "-json"), ("-ctx", "4", "-chat")])
def test_a_prompt_beyond_the_context_names_both_numbers(
    jitllm: Jitllm, tiny_gguf: TinyModel, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    template, model = tmp_path / "t.jinja", tmp_path / "m.jlm"
    template.write_text("{{ messages[0].content }}")
    convert = jitllm("convert", tiny_gguf("llama", "q8_0"), model, "-chat-template", template)
    assert convert.code == 0
    num = len(jitllm("tokenize", model, "Hello there", "-json").json["ids"])
    done = jitllm("run", model, *flags, "Hello there")
    line = refusal(done)
    assert f"the prompt has {num} tokens and the context holds 4; shorten the prompt" in line
    assert done.out == ""


def test_a_damaged_block_is_named(jitllm: Jitllm, model: Path) -> None:
    with Container.open(model) as container:
        extent = container.header.blocks[1]
    data = bytearray(model.read_bytes())
    data[extent.offset + 7] ^= 1
    model.write_bytes(data)
    for flags in ((), ("-maxmem", "1"), ("-json",)):
        line = refusal(jitllm("run", model, "-n", "3", *flags, "Hello"))
        assert line == (
            f"jitllm: {model} at byte {extent.offset}: the checksum is wrong; "
            f"check the file: jitllm info -check {model}"
        )
    assert "block 1" in refusal(jitllm("info", "-check", model))
    for verb in (["score", model, "Hello there"], ["speed", model, "-p", "8", "-n", "2"]):
        assert f"at byte {extent.offset}: the checksum is wrong" in refusal(jitllm(*verb))


def test_an_io_error_is_named(jitllm: Jitllm, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Container.open(model) as container:
        dense, block = container.header.dense, container.header.blocks[2]
    real = Reader._read_once
    for extent in (dense, block):

        def fail(reader: Reader, into: memoryview, offset: int, extent: Any = extent) -> int:
            if extent.offset <= offset < extent.end:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(reader, into, offset)

        monkeypatch.setattr(Reader, "_read_once", fail)
        line = refusal(jitllm("run", model, "-n", "1", "Hello"))
        assert f"{model} at byte {extent.offset}: read failed: Input/output error" in line


@pytest.mark.parametrize("length", [0, 1, 8, 31, 32, 4095, 4096, 100_000])
def test_a_file_that_was_not_copied_whole_is_refused(
    jitllm: Jitllm, model: Path, length: int
) -> None:
    os.truncate(model, length)
    line = refusal(jitllm("run", model, "-n", "1", "Hello"))
    assert str(model) in line


def test_a_context_beyond_the_address_space_is_refused(model: Path) -> None:
    sound = model.read_bytes()
    plain = damage.header(sound)
    plain["config"]["context_length"] = 1 << 24
    model.write_bytes(damage.resealed(plain, sound))
    limit = 'ulimit -v 1048576; exec "$0" -m jitllm.cli.main run "$@" -n 1 Hello'
    for flags, code in (((), 1), (("-ctx", "64"), 0)):
        command = ["bash", "-c", limit, sys.executable, str(model), *flags]
        child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert child.returncode == code, child.stderr
        if code:
            (line,) = child.stderr.splitlines()
            assert line.startswith("jitllm: no address space for ")
            assert "sequences of 16777216 tokens); lower -ctx" in line


def test_ids_beyond_the_last_token_stand_for_nothing(jitllm: Jitllm, model: Path) -> None:
    """A model may have more rows than tokens, and its weights may prefer them."""
    sound = model.read_bytes()
    plain = damage.header(sound)
    words, num_tokens = plain["vocabulary"], 262
    texts = words["tokens"][1:].split(words["tokens"][0])[:num_tokens]
    words["tokens"] = words["tokens"][0] + words["tokens"][0].join(texts)
    words |= {"types": words["types"][:num_tokens], "merges": b"", "fragments": ""}
    model.write_bytes(damage.resealed(plain, sound))
    ids: list[int] = []
    for seed in range(4):
        flags = ("-n", "8", "-ignore-eos", "-temp", "1", "-seed", str(seed), "-json")
        ids += jitllm("run", model, *flags, "Hello").json["ids"]
    assert max(ids) >= num_tokens
    (model.parent / "ids").write_text(" ".join(map(str, ids)))
    assert jitllm("score", model, "-ids", model.parent / "ids").code == 0


@pytest.mark.parametrize("words", [b"\x7f\xc0\0\0", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f"])
@pytest.mark.parametrize("weight_type", ["f32", "q8_0", "q4_k"])
@pytest.mark.parametrize("draw", [(), ("-temp", "0.7", "-top-k", "9", "-top-p", "0.8")])
def test_weights_without_a_sound_number_still_end(
    jitllm: Jitllm,
    tiny_model: TinyModel,
    tmp_path: Path,
    words: bytes,
    weight_type: str,
    draw: tuple[str, ...],
) -> None:
    """NaN, infinity and the largest f32, through every op, sampling and the tokenizer."""
    sound = tiny_model("llama-q", weight_type).read_bytes()
    with Container.open(tiny_model("llama-q", weight_type)) as container:
        extents = [extent for _, extent in container.header.extents()]
    data = bytearray(sound)
    for extent in extents:
        data[extent.offset : extent.offset + extent.length] = words * (extent.length // 4)
    model = tmp_path / "m.jlm"
    model.write_bytes(damage.resealed(damage.header(sound), bytes(data)))
    runs = [
        jitllm("run", model, "-n", "5", "-ignore-eos", "-tier", tier, *draw, "Hello", "-json").json
        for tier in ("auto", "plain")
    ]
    assert runs[0]["ids"] == runs[1]["ids"]
    assert len(runs[0]["ids"]) == 5


def test_a_budget_of_keys_and_values_wants_a_store_and_room_for_a_page(
    jitllm: Jitllm, model: Path, tmp_path: Path
) -> None:
    line = refusal(jitllm("run", model, "Hello", "-kv-budget", "1M"), code=2)
    assert line.endswith("name one with -kv-cache")
    folder = ("-kv-cache", tmp_path / "spilled")
    line = refusal(jitllm("run", model, "Hello", "-kv-budget", "1K", *folder), code=2)
    assert "-kv-budget 1.00 KiB does not hold 64 positions in 3 blocks; the least is" in line
    assert "-kv-budget" in refusal(jitllm("run", model, "Hello", "-kv-budget", "lots"), code=2)


def test_a_disk_that_fails_under_a_budget_of_keys_and_values_is_said(
    jitllm: Jitllm, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", broken)
    budget = ("-kv-budget", "100K", "-page-size", "16", "-kv-cache", tmp_path / "spilled")
    line = refusal(jitllm("run", model, "Hello", "-n", "120", *budget))
    assert "keys and values beyond -kv-budget in" in line
    assert line.endswith("Input/output error; name another folder with -kv-cache")
