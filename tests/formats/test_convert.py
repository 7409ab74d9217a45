"""Conversion: what it writes, what it refuses, and that stopping it anywhere costs nothing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jitllm.errors import BadSource, DiskFull, JitllmError, UnsupportedModel, UsageError
from jitllm.formats import convert as convert_module
from jitllm.formats.convert import Plan, Report, convert, plan
from jitllm.formats.jlm import Container, Header
from jitllm.text.vocabulary import VocabularyData
from tests.conftest import TinyModel
from tests.oracle import make_models

SMALL = 64 << 10
"""Bytes between two syncs: these models have 1 to 3 MB."""

MODELS = sorted(make_models.specs())


class Stopped(Exception):
    pass


def run(source: Path, dest: Path, **options: Any) -> Report:
    return convert(source, dest, read_vocabulary=VocabularyData.from_gguf, **options)


def header_of(path: Path) -> Header:
    with Container.open(path) as container:
        return container.header


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def whole(tiny_model: TinyModel) -> bytes:
    """An uninterrupted conversion of `llama`."""
    return tiny_model("llama").read_bytes()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch, tiny_model: TinyModel) -> None:
    """Many pieces, of uneven sizes; the conversions to compare with were made of large ones."""
    tiny_model("llama")
    monkeypatch.setattr(convert_module, "PIECE_WEIGHTS", 20000)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_converts(tiny_model: TinyModel, name: str) -> None:
    with Container.open(tiny_model(name)) as container:
        assert container.check() == []
        assert container.header.arch == make_models.specs()[name]["arch"]
        assert container.header.config["block_count"] == len(container.header.blocks)


@pytest.mark.parametrize(
    "weight_type",
    ["f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"],
)
def test_every_weight_type_converts(tiny_model: TinyModel, weight_type: str) -> None:
    header = header_of(tiny_model("llama-q", weight_type))
    assert weight_type.upper() in {t.format.name for t in header.tensors}


def test_the_report_and_the_plan_say_what_happened(tiny_gguf: TinyModel, tmp_path: Path) -> None:
    dest = tmp_path / "x.jlm"
    steps: list[tuple[int, int]] = []
    report = run(tiny_gguf("llama"), dest, progress=lambda *step: steps.append(step))
    assert report.path == dest
    assert report.resumed_bytes == report.plan.header.dense.offset
    assert files(tmp_path) == ["x.jlm"]
    planned = plan(tiny_gguf("llama"), read_vocabulary=VocabularyData.from_gguf)
    assert planned == report.plan
    assert planned.file_bytes == dest.stat().st_size
    header = header_of(dest)
    assert planned.dense_bytes == header.dense.length
    assert planned.block_bytes == tuple(b.length for b in header.blocks)
    counts = planned.weight_types
    assert sum(c.num_tensors for c in counts.values()) == len(header.tensors)
    assert sum(c.size_bytes for c in counts.values()) == sum(t.size_bytes for t in header.tensors)
    assert steps == sorted(steps)
    assert steps[-1] == (planned.file_bytes, planned.file_bytes)


def test_a_plan_writes_nothing(tiny_gguf: TinyModel, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    source = tiny_gguf("llama")
    before = files(source.parent)
    assert isinstance(plan(source, read_vocabulary=VocabularyData.from_gguf), Plan)
    assert files(tmp_path) == []
    assert files(source.parent) == before


def test_pieces_make_no_difference(tiny_gguf: TinyModel, tmp_path: Path, whole: bytes) -> None:
    run(tiny_gguf("llama"), tmp_path / "x.jlm")
    assert (tmp_path / "x.jlm").read_bytes() == whole


# --- templates and stop ids -------------------------------------------------------------------


def tiny_file(path: Path, *, arch: str = "llama", **changes: Any) -> Path:
    """The tiny llama with keys added (values) or tensors replaced (arrays, or None to drop)."""
    spec = make_models.specs()["llama"]
    writer = gguf.GGUFWriter(path, arch)
    for key, (kind, value) in spec["kv"].items():
        writer.add_key_value(key, value, make_models.KINDS[kind])
    make_models.add_vocabulary(writer, 320)
    for key, value in changes.pop("keys", {}).items():
        writer.add_string(key, value)
    tensors = {
        name: np.ones(tuple(reversed(shape)), np.float32) for name, shape in spec["tensors"].items()
    }
    raw_type = changes.pop("raw_type", None)
    for name, array in (tensors | changes.pop("tensors", {})).items():
        if array is not None:
            is_raw = array.dtype == np.uint8
            writer.add_tensor(name, array, raw_dtype=raw_type if is_raw else None)
    assert not changes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_chat_templates_travel(tmp_path: Path) -> None:
    key = "tokenizer.chat_template"
    source = tiny_file(tmp_path / "a.gguf", keys={key: "one", f"{key}.tool_use": "two"})
    run(source, tmp_path / "a.jlm")
    assert header_of(tmp_path / "a.jlm").chat_templates == {"default": "one", "tool_use": "two"}
    run(source, tmp_path / "a.jlm", chat_template="mine")
    assert header_of(tmp_path / "a.jlm").chat_templates == {"default": "mine", "tool_use": "two"}


def test_stop_ids_are_added(tiny_gguf: TinyModel, tmp_path: Path) -> None:
    run(tiny_gguf("llama"), tmp_path / "x.jlm", stop_ids=[7, 2])
    assert header_of(tmp_path / "x.jlm").stop_ids == (2, 7)
    with pytest.raises(UsageError, match="stop id 320 is no token; the vocabulary has 320 tokens"):
        run(tiny_gguf("llama"), tmp_path / "y.jlm", stop_ids=[320])
    assert files(tmp_path) == ["x.jlm"]


# --- refusals ---------------------------------------------------------------------------------


def refused(tmp_path: Path, source: Path, kind: type[JitllmError], problem: str) -> None:
    """No file is left, and what stood there is intact."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "x.jlm").write_bytes(b"old")
    with pytest.raises(kind, match=problem):
        run(source, folder / "x.jlm")
    assert files(folder) == ["x.jlm"]
    assert (folder / "x.jlm").read_bytes() == b"old"


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    source = tiny_file(tmp_path / "a.gguf", arch="falcon")
    refused(tmp_path, source, UnsupportedModel, "architecture 'falcon'.*supported: .*llama")


def test_an_unknown_weight_type_is_refused(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.IQ4_NL
    tensors = {"blk.0.attn_q.weight": np.zeros((256, 144), np.uint8)}
    source = tiny_file(tmp_path / "a.gguf", raw_type=kind, tensors=tensors)
    refused(tmp_path, source, UnsupportedModel, "weight type 'IQ4_NL'.*supported: F32, .*Q6_K")


@pytest.mark.parametrize(
    ("tensors", "kind", "problem"),
    [
        ({"blk.0.wonder.weight": np.zeros((4, 4), np.float32)}, UnsupportedModel, "blk.0.wonder"),
        ({"blk.0.attn_q.weight": None}, BadSource, "blk.0.attn_q.weight is missing"),
        ({"blk.0.attn_q.weight": np.zeros((8, 256), np.float32)}, BadSource, "blk.0.attn_q"),
        ({"blk.0.attn_norm.weight": np.zeros((1, 256), np.float32)}, BadSource, "attn_norm"),
        ({"blk.4.attn_norm.weight": np.zeros(256, np.float32)}, BadSource, "block 3 of 5"),
        ({"blk.0.attn_q.weight": np.zeros((1, 256, 256), np.float32)}, BadSource, "3 dimensions"),
        ({"token_embd.weight": np.zeros((319, 256), np.float32)}, BadSource, "319"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_a_model_that_does_not_fit_together_is_refused(
    tmp_path: Path, tensors: dict[str, Any], kind: type[JitllmError], problem: str
) -> None:
    refused(tmp_path, tiny_file(tmp_path / "a.gguf", tensors=tensors), kind, problem)


def test_a_block_in_the_millions_costs_nothing(tmp_path: Path) -> None:
    tensors = {"blk.999999.attn_norm.weight": np.zeros(256, np.float32)}
    source = tiny_file(tmp_path / "a.gguf", tensors=tensors)
    refused(tmp_path, source, BadSource, "block 3 of 1000000 is missing")


def test_a_damaged_source_leaves_nothing(
    tiny_gguf: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.gguf"
    source.write_bytes(tiny_gguf("llama").read_bytes())

    def cut(done: int, total: int) -> None:
        if done > total // 2:
            os.truncate(source, 100_000)

    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(BadSource, match="ends at byte"):
        run(source, folder / "x.jlm", progress=cut, sync_bytes=SMALL)
    assert files(folder) == []


def test_the_source_is_not_written_over(tiny_gguf: TinyModel, tmp_path: Path) -> None:
    source = tmp_path / "a.gguf"
    data = tiny_gguf("llama").read_bytes()
    source.write_bytes(data)
    (tmp_path / "link.jlm").symlink_to(source)
    os.link(source, tmp_path / "b.jlm.part")
    for name in ("a.gguf", "link.jlm", "b.jlm"):
        with pytest.raises(UsageError, match="would overwrite its source"):
            run(source, tmp_path / name)
    with pytest.raises(UsageError, match="is a folder"):
        run(source, tmp_path)
    with pytest.raises(JitllmError, match="No such file"):
        run(source, tmp_path / "missing" / "x.jlm")
    assert source.read_bytes() == data


def test_two_conversions_to_one_file_do_not_mix(tiny_gguf: TinyModel, tmp_path: Path) -> None:
    with open(tmp_path / "x.jlm.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(JitllmError, match="written by another conversion"):
            run(tiny_gguf("llama"), tmp_path / "x.jlm")
    assert files(tmp_path) == ["x.jlm.part"]


# --- interruptions ----------------------------------------------------------------------------


def stop_at(share: float) -> Any:
    def progress(done: int, total: int) -> None:
        if done >= share * total:
            raise Stopped

    return progress


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.7, 0.99])
def test_an_interrupted_conversion_resumes(
    tiny_gguf: TinyModel, tmp_path: Path, whole: bytes, share: float
) -> None:
    source, dest = tiny_gguf("llama"), tmp_path / "x.jlm"
    with pytest.raises(Stopped):
        run(source, dest, progress=stop_at(share), sync_bytes=SMALL)
    assert not dest.exists()
    if share:
        assert files(tmp_path) == ["x.jlm.part", "x.jlm.part.resume"]
    report = run(source, dest)
    assert report.resumed_bytes >= (share - 0.1) * len(whole)
    assert dest.read_bytes() == whole
    assert files(tmp_path) == ["x.jlm"]


def test_it_may_be_interrupted_again_and_again(
    tiny_gguf: TinyModel, tmp_path: Path, whole: bytes
) -> None:
    source, dest = tiny_gguf("llama"), tmp_path / "x.jlm"
    for share in (0.1, 0.3, 0.6, 0.9):
        with pytest.raises(Stopped):
            run(source, dest, progress=stop_at(share), sync_bytes=1)
    run(source, dest)
    assert dest.read_bytes() == whole


CHILD = """
import os, signal, sys
from pathlib import Path
from jitllm.formats import convert
from jitllm.text.vocabulary import VocabularyData

source, dest, share = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
convert.PIECE_WEIGHTS = 20000

def progress(done, total):
    if done >= share * total:
        os.kill(os.getpid(), signal.SIGKILL)

convert.convert(source, dest, read_vocabulary=VocabularyData.from_gguf, progress=progress,
                sync_bytes=65536)
"""


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_killed_conversion_resumes(
    tiny_gguf: TinyModel, tmp_path: Path, whole: bytes, share: float
) -> None:
    source, dest = tiny_gguf("llama"), tmp_path / "x.jlm"
    args = [sys.executable, "-c", CHILD, str(source), str(dest), str(share)]
    done = subprocess.run(args, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert files(tmp_path) == ["x.jlm.part", "x.jlm.part.resume"]
    assert run(source, dest).resumed_bytes > (share - 0.1) * len(whole)
    assert dest.read_bytes() == whole


def test_what_is_not_the_same_conversion_starts_afresh(
    tiny_gguf: TinyModel, tmp_path: Path, whole: bytes
) -> None:
    source, dest = tmp_path / "a.gguf", tmp_path / "x.jlm"
    source.write_bytes(tiny_gguf("llama").read_bytes())
    part, journal = tmp_path / "x.jlm.part", tmp_path / "x.jlm.part.resume"

    def stopped(**options: Any) -> None:
        with pytest.raises(Stopped):
            run(source, dest, progress=stop_at(0.6), sync_bytes=SMALL, **options)

    def from_the_start() -> bool:
        report = run(source, dest)
        assert header_of(dest).dense.xxh3 == header_of_whole.dense.xxh3
        return report.resumed_bytes == report.plan.header.dense.offset

    run(source, dest)
    header_of_whole = header_of(dest)
    stopped()
    assert not from_the_start()
    stopped(stop_ids=[9])  # other options
    assert from_the_start()
    stopped()
    os.utime(source, (1, 1))  # another source
    assert from_the_start()
    stopped()
    journal.write_bytes(b"{}")
    assert from_the_start()
    stopped()
    os.truncate(part, 4096)
    assert from_the_start()
    stopped()
    with open(part, "r+b") as file:  # the extent under way is damaged
        file.seek(header_of_whole.blocks[1].offset)
        file.write(b"damage")
    assert from_the_start()


def test_a_journal_without_its_part_starts_afresh(
    tiny_gguf: TinyModel, tmp_path: Path, whole: bytes
) -> None:
    source, dest = tiny_gguf("llama"), tmp_path / "x.jlm"
    with pytest.raises(Stopped):
        run(source, dest, progress=stop_at(0.6), sync_bytes=SMALL)
    (tmp_path / "x.jlm.part").unlink()
    run(source, dest)
    assert dest.read_bytes() == whole


# --- the disk and the page cache --------------------------------------------------------------


def test_a_disk_without_room_is_refused_first(
    tiny_gguf: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "_free_bytes", lambda dest: 12345)
    refused(tmp_path, tiny_gguf("llama"), DiskFull, r"needs .* MiB and its disk has .* free")


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fdatasync"])
def test_a_disk_that_fills_up_is_an_error(
    tiny_gguf: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Nothing useless is left; what is of use is gone on with when there is room."""
    num_calls = 0
    real = getattr(os, call)

    def full(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if call == "posix_fallocate" or num_calls > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    dest = tmp_path / "x.jlm"
    dest.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(DiskFull, match="x.jlm needs"):
            run(tiny_gguf("llama"), dest, sync_bytes=SMALL)
    assert dest.read_bytes() == b"old"
    assert files(tmp_path)[:1] == ["x.jlm"]
    if call == "posix_fallocate":
        assert files(tmp_path) == ["x.jlm"]
    run(tiny_gguf("llama"), dest)
    assert files(tmp_path) == ["x.jlm"]


@contextlib.contextmanager
def tiny_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A real disk of that size; needs root."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_real_disk_that_is_too_small(
    tiny_gguf: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_disk(tmp_path / "disk", 1 << 20) as disk:
        (disk / "x.jlm").write_bytes(b"old")
        with pytest.raises(DiskFull):
            run(tiny_gguf("llama"), disk / "x.jlm")
        monkeypatch.setattr(convert_module, "_free_bytes", lambda dest: 1 << 40)
        with pytest.raises(DiskFull):
            run(tiny_gguf("llama"), disk / "x.jlm")
        assert files(disk) == ["x.jlm"]
        assert (disk / "x.jlm").read_bytes() == b"old"


def test_a_filesystem_that_cannot_allocate_ahead_will_do(
    tiny_gguf: TinyModel, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    run(tiny_gguf("llama"), tmp_path / "x.jlm")
    assert (tmp_path / "x.jlm").read_bytes() == whole


def cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as view:
        num_pages = -(-size // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * num_pages)()
        start = ctypes.c_char.from_buffer(view)
        address = ctypes.c_void_p(ctypes.addressof(start))
        failed = libc.mincore(address, ctypes.c_size_t(size), found)
        del start
        assert not failed, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in found)


def is_cached_for_good(folder: Path) -> bool:
    """tmpfs and the like have nothing but their cache."""
    probe = folder / "probe"
    probe.write_bytes(bytes(1 << 16))
    fd = os.open(probe, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return cached_pages(probe) > 0


def test_nothing_stays_in_the_page_cache(tiny_gguf: TinyModel, tmp_path: Path) -> None:
    if is_cached_for_good(tmp_path):
        pytest.skip("this filesystem keeps everything in memory")
    source, dest = tmp_path / "a.gguf", tmp_path / "x.jlm"
    source.write_bytes(tiny_gguf("llama").read_bytes())
    with open(source, "rb") as file:
        os.fsync(file.fileno())
    assert cached_pages(source) > 0
    run(source, dest)
    assert cached_pages(dest) == 0
    assert cached_pages(source) == 0
    with Container.open(dest) as container:
        assert container.check() == []
        assert cached_pages(dest) == 0
