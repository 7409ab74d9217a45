"""Containers: what is written is what is read, and nothing unsound gets through."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from jitllm.errors import BadContainer, NotConverted
from jitllm.formats import layout
from jitllm.formats.gguf import Gguf
from jitllm.formats.jlm import Container, ExpertExtent, Extent, Header, TensorEntry
from jitllm.formats.jlm_head import (
    EXTENT_ALIGNMENT,
    MAGIC,
    PROLOGUE,
    VERSION,
    checksum,
    encode,
    expert_places,
    round_up,
)
from jitllm.formats.names import source_name
from jitllm.kernels.layout import FormatCode
from tests.conftest import TinyModel


def small_header() -> Header:
    """A dense region with an embedding and a norm, and two blocks with a matrix each."""
    f32 = FormatCode.F32
    tensors = [
        TensorEntry("token_embd", None, f32, 16, 32, True, 0, 2048),
        TensorEntry("output_norm", None, f32, 0, 32, True, 2048, 128),
        TensorEntry("attn_q", 0, FormatCode.Q8_0, 64, 32, False, 0, 2176),
        TensorEntry("attn_q", 1, FormatCode.Q8_0, 64, 32, False, 0, 2176),
    ]
    return Header(
        version=VERSION,
        arch="llama",
        config={"block_count": 2, "eps": 1e-5, "kinds": [1, 2], "name": "x", "flag": True},
        tensors=tuple(tensors),
        vocabulary={"types": bytes(16), "tokens": "\0a\0b"},
        chat_templates={"default": "{{ messages }}"},
        stop_ids=(2, 15),
        fingerprint={"source": "x.gguf", "source_bytes": 1 << 40},
        dense=Extent(4096, 2176, 1),
        blocks=(Extent(8192, 2176, 2), Extent(12288, 2176, 3)),
    )


def mixture_header() -> Header:
    """The same, with two experts in block 1, each with two matrices."""
    header = small_header()
    bank = ("ffn_up_exps", 1, FormatCode.Q8_0, 32, 64, False, 0, 2176, 2)
    down = ("ffn_down_exps", 1, FormatCode.Q8_0, 64, 32, False, 2176, 2176, 2)
    experts = tuple(ExpertExtent(1, n, Extent(16384 + n * 8192, 4352, n)) for n in range(2))
    tensors = (*header.tensors, TensorEntry(*bank), TensorEntry(*down))
    return replace(header, tensors=tensors, experts=experts)


def write(path: Path, header: Header, size: int = 16384) -> Path:
    path.write_bytes(encode(header).ljust(size, b"\0"))
    return path


def open_and_close(path: Path) -> Header:
    with Container.open(path) as container:
        return container.header


def refusal(path: Path) -> str:
    with pytest.raises(BadContainer) as caught:
        Container.open(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_a_header_comes_back(tmp_path: Path) -> None:
    header = small_header()
    assert open_and_close(write(tmp_path / "x.jlm", header)) == header


def test_a_header_is_as_long_before_the_sums_are_known(tmp_path: Path) -> None:
    header = small_header()
    other = replace(header, dense=replace(header.dense, xxh3=2**64 - 1))
    assert len(encode(header)) == len(encode(other))


def test_a_large_header_is_read_whole(tmp_path: Path) -> None:
    header = replace(small_header(), chat_templates={"default": "x" * 20000})
    shift = 20480
    header = replace(
        header,
        dense=replace(header.dense, offset=header.dense.offset + shift),
        blocks=tuple(replace(b, offset=b.offset + shift) for b in header.blocks),
    )
    path = write(tmp_path / "x.jlm", header, 16384 + shift)
    with Container.open(path) as container:
        assert container.header == header
        assert container.bytes_read == round_up(len(encode(header)), EXTENT_ALIGNMENT)


# --- refusals ---------------------------------------------------------------------------------

F32 = FormatCode.F32


def tensor(index: int, **changes: Any) -> Callable[[Header], Header]:
    def change(header: Header) -> Header:
        tensors = list(header.tensors)
        tensors[index] = replace(tensors[index], **changes)
        return replace(header, tensors=tuple(tensors))

    return change


def dense(**changes: Any) -> Callable[[Header], Header]:
    return lambda header: replace(header, dense=replace(header.dense, **changes))


def block(index: int, **changes: Any) -> Callable[[Header], Header]:
    def change(header: Header) -> Header:
        blocks = list(header.blocks)
        blocks[index] = replace(blocks[index], **changes)
        return replace(header, blocks=tuple(blocks))

    return change


def fields(**changes: Any) -> Callable[[Header], Header]:
    return lambda header: replace(header, **changes)


UNSOUND: list[tuple[Callable[[Header], Header], str]] = [
    (block(1, offset=8192), "block 1 begins inside the block 0"),
    (block(1, offset=12289), "block 1 begins at 12289, no multiple of 4096"),
    (block(1, offset=16384), "block 1 ends at byte 20480 and the file at 16384"),
    (block(1, offset=2**64 - 4096), "block 1 ends at byte"),
    (block(1, length=2**64 - 1), "block 1 ends at byte"),
    (block(0, length=0), "block 0 is empty"),
    (
        fields(experts=tuple(ExpertExtent(0, n, Extent(12288, 64, 0)) for n in range(5))),
        "it has more experts than pages",
    ),
    (dense(offset=0), "dense region begins inside the header"),
    (dense(length=2175), "output_norm ends at 2176 of 2175 bytes"),
    (tensor(3, block=0), "attn_q of block 0 stands there twice"),
    (tensor(3, block=2), "attn_q of block 2: the model has 2 blocks"),
    (tensor(3, block=-1), "the block of attn_q is -1"),
    (tensor(3, offset=64), "attn_q of block 1 ends at 2240 of 2176 bytes"),
    (tensor(1, offset=2112, cols=16, size_bytes=64), ""),
    (tensor(1, offset=2047), "no multiple of 64"),
    (tensor(1, offset=1984), "output_norm overlaps another tensor"),
    (tensor(0, rows=2**31), "the rows of token_embd is 2147483648"),
    (tensor(0, rows=17), "token_embd has 2048 bytes and needs 4096"),
    (tensor(0, cols=0), "has 0 columns"),
    (tensor(0, dense=False), "token_embd lies in the wrong extent"),
    (tensor(2, dense=True), "attn_q of block 0 lies in the wrong extent"),
    (tensor(2, cols=33), "has 33 columns, which Q8_0 cannot have"),
    (tensor(2, format=99), "the unknown weight format 99"),
    (tensor(2, format=True), "the unknown weight format True"),
    (tensor(2, format=[1]), "the unknown weight format [1]"),
    (tensor(2, rows=0, dense=True, size_bytes=128, offset=0), "is a vector in Q8_0"),
    (tensor(2, role="A\x1b[2J"), "a tensor has the role"),
    (tensor(2, role=7), "a tensor has the role 7"),
    (fields(stop_ids=(16,)), "a stop id is 16, not a number below 16"),
    (fields(stop_ids=(True,)), "a stop id is True"),
    (fields(vocabulary={"types": bytes(17)}), "it has 17 tokens and rows for 16"),
    (fields(vocabulary={}), "its vocabulary has no types"),
    (fields(vocabulary=[]), "vocabulary is no map"),
    (fields(config={"x": {}}), "config 'x' is a dict"),
    (fields(config={"x": None}), "config 'x' is a NoneType"),
    (fields(config={"x": [[[[[1]]]]]}), "config 'x' is a list"),
    (fields(config={1: 2}), "msgpack"),
    (fields(chat_templates={"x": 1}), "chat template 'x' is no text"),
    (fields(fingerprint={"x": []}), "fingerprint 'x' is a list"),
    (fields(arch=None), "arch is no text"),
]


@pytest.mark.parametrize(("change", "problem"), UNSOUND, ids=[p for _, p in UNSOUND])
def test_what_is_unsound_is_refused_by_name(
    tmp_path: Path, change: Callable[[Header], Header], problem: str
) -> None:
    """The sum of every one of these headers is right."""
    path = write(tmp_path / "x.jlm", change(small_header()))
    if not problem:
        open_and_close(path)
    else:
        assert problem in refusal(path)


def expert(index: int, **changes: Any) -> Callable[[Header], Header]:
    def change(header: Header) -> Header:
        experts = list(header.experts)
        experts[index] = replace(experts[index], **changes)
        return replace(header, experts=tuple(experts))

    return change


UNSOUND_MIXTURES: list[tuple[Callable[[Header], Header], str]] = [
    (fields(), ""),
    (fields(experts=()), "ffn_up_exps of block 1 is of 2 experts, not there"),
    (lambda h: replace(h, experts=h.experts[:1]), "is of 2 experts, not there"),
    (lambda h: replace(h, experts=h.experts[::-1]), "expert 1 of block 1 is out of order"),
    (lambda h: replace(h, tensors=h.tensors[:-2]), "there are experts without tensors"),
    (lambda h: replace(h, experts=(h.experts[0],) * 2), "expert 0 of block 1 is out of order"),
    (expert(1, block=2), "an expert belongs to block 2 of 2"),
    (expert(1, block=0, expert=0), "is of 2 experts, not there"),
    (expert(1, extent=Extent(28672, 4352, 1)), "expert 1 of block 1 is not where it must be"),
    (expert(0, extent=Extent(12288, 4352, 1)), "expert 0 of block 1 is not where it must be"),
    (expert(0, extent=Extent(16384, 4096, 1)), "expert 0 of block 1 is not where it must be"),
    (expert(0, extent=Extent(16384, 4351, 1)), "ffn_down_exps of block 1 ends at 4352 of 4351"),
    (tensor(5, offset=2112), "ffn_down_exps of block 1 overlaps another tensor"),
    (tensor(5, offset=6144), "is not where it must be"),
    (tensor(4, experts=3), "ffn_up_exps of block 1 is of 3 experts, not there"),
    (tensor(4, experts=-1), "the experts of ffn_up_exps is -1"),
    (tensor(4, experts=True), "the experts of ffn_up_exps is True"),
    (tensor(4, block=None), "is of 2 experts, not there"),
    (tensor(4, block=0), "is of 2 experts, not there"),
    (tensor(2, experts=2), "attn_q of block 0 is of 2 experts, not there"),
    (tensor(4, dense=True), "ffn_up_exps of block 1 lies in the wrong extent"),
    (tensor(4, rows=0, dense=True, format=F32, size_bytes=256), "is of experts and in the dense"),
]


@pytest.mark.parametrize(
    ("change", "problem"), UNSOUND_MIXTURES, ids=[p for _, p in UNSOUND_MIXTURES]
)
def test_what_is_unsound_in_a_mixture_is_refused_by_name(
    tmp_path: Path, change: Callable[[Header], Header], problem: str
) -> None:
    header = change(mixture_header())
    path = write(tmp_path / "x.jlm", header, 32768)
    if problem:
        assert problem in refusal(path)
    else:
        assert open_and_close(path) == header


def with_body(path: Path, body: bytes) -> Path:
    front = PROLOGUE.pack(MAGIC, VERSION, 0, len(body), 0)
    front = front[:24] + checksum(front, body).to_bytes(8, "little")
    path.write_bytes((front + body).ljust(16384, b"\0"))
    return path


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "no sound msgpack"),
        (b"\xc1", "no sound msgpack"),
        (b"\x90\x90", "no sound msgpack"),
        (b"\x90", "the header is no map"),
        (b"\x80", "lacks or adds"),
        (b"\xdd\xff\xff\xff\xff", "no sound msgpack"),
        (b"\xdc\x40\x00" * 1000, "no sound msgpack"),
        (b"\xdf\xff\xff\xff\xff", "no sound msgpack"),
        (b"\xdb\xff\xff\xff\xff", "no sound msgpack"),
        (b"\x91" * 5000 + b"\xc0", "no sound msgpack"),
        (b"\xdc\x3f\xff" + b"\x95\x80\x80\x80\x80\x80" * 0x3FFF, "more than 65536 lists"),
        (b"\xdc\x40\x01" + b"\xc0" * 0x4001, "no sound msgpack"),
        (b"\xa1\xff", "no sound msgpack"),
        (b"\xd6\xff\0\0\0\1", "no sound msgpack"),
        (msgpack.packb({"arch": 1, "more": 2}), "lacks or adds"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[:6].hex(),
)
def test_hostile_msgpack_is_refused(tmp_path: Path, body: bytes, problem: str) -> None:
    path = tmp_path / "x.jlm"
    with_body(path, body)
    if len(body) > 16000:
        path.write_bytes(path.read_bytes() + bytes(8192))
    assert problem in refusal(path)


def test_the_header_has_a_sum(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jlm", small_header())
    data = bytearray(path.read_bytes())
    end = len(encode(small_header()))
    for at in (16, 24, 31, 32, 100, end - 1):
        data[at] ^= 1
        path.write_bytes(data)
        refusal(path)
        data[at] ^= 1


@pytest.mark.parametrize("size", [0, 1, 8, 31, 32, 100, 4096, 8192, 16383])
def test_a_short_file_is_refused(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "x.jlm", small_header())
    os.truncate(path, size)
    refusal(path)


def test_a_file_cut_behind_its_header_says_how_long_it_is(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model("llama")
    with Container.open(source) as container:
        header = container.header
    path, whole = tmp_path / "x.jlm", source.read_bytes()
    for size in (header.dense.end - 1, header.dense.end, header.blocks[1].offset, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert f"and the file at {size}; convert its source again" in refusal(path)


def test_a_gguf_file_is_refused_with_the_command(tmp_path: Path) -> None:
    path = tmp_path / "my model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(NotConverted) as caught:
        Container.open(path)
    assert caught.value.command == f"jitllm convert '{path}'"


def test_another_version_is_refused_with_the_command(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jlm", replace(small_header(), version=VERSION + 1))
    with pytest.raises(NotConverted, match=f"version {VERSION + 1}.*version {VERSION}") as caught:
        Container.open(path)
    assert caught.value.command == f"jitllm convert SOURCE.gguf {path}"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "missing.jlm")
    assert "regular file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.jlm")
    assert "regular file" in refusal(tmp_path / "pipe.jlm")
    with pytest.raises(BadContainer):
        Container.open("a\0b")


# --- real ones --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weight_type"),
    [("llama", "f32"), ("gemma3", "f32"), ("qwen2", "bf16"), ("llama-q", "q6_k")],
)
def test_a_container_holds_the_sources_weights(
    tiny_model: TinyModel, tiny_gguf: TinyModel, name: str, weight_type: str
) -> None:
    source = tiny_gguf(name, weight_type)
    with Container.open(tiny_model(name, weight_type)) as container, Gguf.open(source) as gguf:
        assert len(container.header.tensors) == len(gguf.tensors)
        for entry in container.header.tensors:
            original = gguf.tensors[source_name(entry.role, entry.block)]
            raw, data = gguf.read(original), container.read(entry)
            if entry.rows == 0:
                values = layout.vector(original.type, raw)
                assert data == values.tobytes()
            else:
                packed = layout.pack(entry.format, raw, entry.rows, entry.cols)
                assert data == packed.tobytes()


@pytest.mark.parametrize(
    ("name", "weight_type"), [("llama-moe", "q4_1"), ("qwen2moe", "f32"), ("glm4moe", "f32")]
)
def test_a_container_holds_the_weights_of_every_expert(
    tiny_model: TinyModel, tiny_gguf: TinyModel, name: str, weight_type: str
) -> None:
    source = tiny_gguf(name, weight_type)
    with Container.open(tiny_model(name, weight_type)) as container, Gguf.open(source) as gguf:
        header = container.header
        assert container.check() == []
        of_experts = [entry for entry in header.tensors if entry.experts]
        blocks = {entry.block for entry in of_experts}
        assert {entry.experts for entry in of_experts} == {8}
        assert len(header.experts) == 8 * len(blocks)
        for entry in of_experts:
            original = gguf.tensors[source_name(entry.role, entry.block)]
            for number in range(8):
                rows = (number * entry.rows, (number + 1) * entry.rows)
                raw = gguf.read_rows(original, *rows)
                packed = layout.pack(entry.format, raw, entry.rows, entry.cols)
                assert container.read(entry, number) == packed.tobytes()


def test_experts_lie_behind_their_block(tiny_model: TinyModel) -> None:
    """Every extent of the file follows the one before it."""
    with Container.open(tiny_model("deepseek")) as container:
        header = container.header
        names, extents = zip(*header.extents(), strict=True)
        assert names[:5] == (
            *("dense region", "block 0", "block 1"),
            *("expert 0 of block 1", "expert 1 of block 1"),
        )
        ends = [round_up(e.offset + e.length, EXTENT_ALIGNMENT) for e in extents]
        assert [e.offset for e in extents[1:]] == ends[:-1]
        assert container.path.stat().st_size == ends[-1]
        places = expert_places(header.tensors)
        assert places.keys() == {1, 2}
        for found in header.experts:
            first, stride = places[found.block]
            begin = header.blocks[found.block].offset + first
            assert found.extent.offset == begin + found.expert * stride


def test_places_are_as_promised(tiny_model: TinyModel) -> None:
    with Container.open(tiny_model("llama")) as container:
        header = container.header
        assert [b.offset % 4096 for b in header.blocks] == [0] * 3
        assert {t.dense for t in header.tensors if t.block is None or t.rows == 0} == {True}
        assert {t.dense for t in header.tensors if t.block is not None and t.rows} == {False}
        assert all(t.offset % 64 == 0 for t in header.tensors)
        assert container.path.stat().st_size == header.blocks[-1].end
        assert container.check() == []


def test_a_damaged_extent_is_found(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "x.jlm"
    data = bytearray(tiny_model("llama").read_bytes())
    header = open_and_close(tiny_model("llama"))
    data[header.blocks[1].offset + 17] ^= 4
    data[header.dense.offset + header.dense.length - 1] ^= 1
    path.write_bytes(data)
    steps: list[tuple[int, int]] = []
    with Container.open(path) as container:
        problems = container.check(lambda done, total: steps.append((done, total)))
        os.truncate(path, header.blocks[2].offset + 5)
        problems += container.check()[2:]
    assert [re.findall(r"dense region|block \d|ends at byte \d+", p)[0] for p in problems] == [
        "dense region",
        "block 1",
        f"ends at byte {header.blocks[2].offset + 5}",
    ]
    assert steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize("seed", range(4))
def test_no_mutation_of_a_header_does_harm(
    tiny_model: TinyModel, tmp_path: Path, seed: int
) -> None:
    """Half of them have their sums made right again: then the fields must hold the fort."""
    rng = random.Random(seed)
    whole = tiny_model("llama").read_bytes()
    path = tmp_path / "x.jlm"
    num_opened = 0
    for number in range(250):
        path.write_bytes(mutated(whole, rng, mend=number % 2 == 1))
        try:
            with Container.open(path) as container:
                num_opened += 1
                touch(container)
        except (BadContainer, NotConverted) as error:
            assert "\n" not in str(error)  # noqa: PT017
    assert num_opened < 250


def mutated(whole: bytes, rng: random.Random, *, mend: bool) -> bytes:
    """A container with some damage in its header; `mend` makes the header's sum right again."""
    data = bytearray(whole)
    end = PROLOGUE.size + PROLOGUE.unpack_from(whole)[3]
    for _ in range(rng.choice([1, 1, 2, 8])):
        mutate(data, rng, min(end, len(data)))
    if mend:
        body_bytes = PROLOGUE.unpack_from(data)[3]
        body = bytes(data[PROLOGUE.size : PROLOGUE.size + min(body_bytes, len(data))])
        data[24:32] = checksum(bytes(data[:24]), body).to_bytes(8, "little")
    return bytes(data)


def mutate(data: bytearray, rng: random.Random, end: int) -> None:
    at = rng.randrange(end if rng.random() < 0.9 else min(end, 48))
    match rng.randrange(9):
        case 0 | 1:
            data[at] ^= 1 << rng.randrange(8)
        case 2 | 3:
            data[at] = rng.randrange(256)
        case 4 | 5:
            data[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), rng.randbytes(8)])
        case 6 | 7:  # what announces lists, maps, texts and bytes
            data[at] = rng.choice([0xC0, 0xC1, 0xDC, 0xDD, 0xDE, 0xDF, 0xDB, 0xC6, 0xC9, 0xD9])
        case _:
            del data[rng.randrange(len(data)) :]
            data.extend(bytes(max(PROLOGUE.size - len(data), 0)))


def touch(container: Container) -> None:
    """Read all that the header promises."""
    for entry in container.header.tensors:
        assert len(container.read(entry)) == entry.size_bytes
    for _, extent in container.header.extents():
        assert extent.end <= container.path.stat().st_size


CHILD = """
import sys
from jitllm.formats.jlm import Container

def read_bytes():
    lines = open("/proc/self/io").read().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])

before = read_bytes()
with Container.open(sys.argv[1]) as container:
    print(read_bytes() - before, container.bytes_read)
"""


def test_opening_reads_the_header_and_nothing_else(tiny_model: TinyModel) -> None:
    """By the kernel's count of what was fetched from the disk."""
    args = [sys.executable, "-c", CHILD, str(tiny_model("gemma3"))]
    done = subprocess.run(
        args, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    counted, stated = map(int, done.stdout.split())
    if counted == 0:
        pytest.skip("this filesystem has no disk that could be counted")
    assert counted == stated


HOSTILE = """
import random, resource, sys
from pathlib import Path
from jitllm.errors import JitllmError
from jitllm.formats.jlm import Container
from tests.formats.test_jlm import mutated

resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
path, whole = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
rng = random.Random(sys.argv[3])
num_opened = 0
for number in range(300):
    path.write_bytes(mutated(whole, rng, mend=number % 2 == 1))
    try:
        Container.open(path).close()
        num_opened += 1
    except JitllmError as error:
        assert "\\n" not in str(error)
print(num_opened)
"""


def test_damage_costs_no_memory(tiny_model: TinyModel, tmp_path: Path) -> None:
    """One GiB of address space is enough for every mutation."""
    whole = tiny_model("qwen3", "q4_0")
    args = [sys.executable, "-c", HOSTILE, str(tmp_path / "x.jlm"), str(whole), "1"]
    done = subprocess.run(
        args, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300
