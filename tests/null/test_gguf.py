import ctypes
import mmap
import os
import struct
import sys
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from jitllm.errors import BadSource, UnsupportedModel
from jitllm.formats import gguf_head
from jitllm.formats.gguf import GgmlType, Gguf
from tests.null.gguf_files import (
    ARRAY,
    F32,
    STRING,
    U64,
    Raw,
    TensorBytes,
    f32,
    gguf_bytes,
    numbers,
    scalar,
    string,
    strings,
    write,
)

ROWS = TensorBytes((4, 3), GgmlType.F32, f32(*range(12)))


def open_bytes(folder: Path, content: bytes) -> Gguf:
    return Gguf.open(write(folder / "m.gguf", content))


def refused(folder: Path, content: bytes) -> str:
    with pytest.raises(BadSource) as caught:
        open_bytes(folder, content)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'm.gguf'}: ")
    return message.removeprefix(f"{folder / 'm.gguf'}: ")


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = reference.GGUFWriter(path, "thing")
    kinds = reference.GGUFValueType
    scalars = {
        kinds.UINT8: 200,
        kinds.INT8: -100,
        kinds.UINT16: 60_000,
        kinds.INT16: -30_000,
        kinds.UINT32: 4_000_000_000,
        kinds.INT32: -2_000_000_000,
        kinds.FLOAT32: 0.5,
        kinds.BOOL: True,
        kinds.STRING: "naïve \n 中",
        kinds.UINT64: 1 << 63,
        kinds.INT64: -(1 << 62),
        kinds.FLOAT64: 0.1,
    }
    for kind, value in scalars.items():
        writer.add_key_value(f"one.{kind.name}", value, kind)
        writer.add_key_value(f"many.{kind.name}", [value] * 3, kinds.ARRAY, sub_type=kind)
    writer.add_array("nested", [[1, 2], [3]])
    weights = np.arange(64, dtype=np.float32).reshape(2, 32)
    quantised = reference.quants.quantize(weights, reference.GGMLQuantizationType.Q8_0)
    writer.add_tensor("w", weights)
    writer.add_tensor("q", quantised, raw_dtype=reference.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with Gguf.open(path) as file:
        assert file.metadata["general.architecture"] == "thing"
        for kind, value in scalars.items():
            assert file.metadata[f"one.{kind.name}"] == value
            assert file.metadata[f"many.{kind.name}"] == [value] * 3
            assert type(file.metadata[f"one.{kind.name}"]) is type(value)
        assert file.metadata["nested"] == [[1, 2], [3]]
        assert file.tensors["w"].shape == (32, 2)
        assert bytes(file.read(file.tensors["w"])) == weights.tobytes()
        assert file.tensors["q"].type is GgmlType.Q8_0
        assert bytes(file.read(file.tensors["q"])) == quantised.tobytes()


def test_sizes_are_those_of_the_gguf_package() -> None:
    wrong_there = {"Q8_1"}  # 36 bytes since its sums are f16
    for kind, (group_size, group_bytes) in reference.GGML_QUANT_SIZES.items():
        if kind.name not in wrong_there:
            mine = GgmlType(int(kind))
            assert (mine.name, mine.group_size, mine.group_bytes) == (
                kind.name,
                group_size,
                group_bytes,
            )


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_and_rows(tmp_path: Path, version: int) -> None:
    content = gguf_bytes({"a": 7, "b": ["x", ""]}, {"t": ROWS, "u": ROWS}, version=version)
    with open_bytes(tmp_path, content) as file:
        assert dict(file.metadata) == {"a": 7, "b": ["x", ""]}
        tensor = file.tensors["u"]
        assert (tensor.num_rows, tensor.row_bytes, tensor.size_bytes) == (3, 16, 48)
        assert tensor.offset % 32 == 0
        assert bytes(file.read(tensor)) == ROWS.data
        assert bytes(file.read_rows(tensor, 1, 3)) == ROWS.data[16:]
        assert file.read_rows(tensor, 2, 2) == b""
        with pytest.raises(ValueError, match=r"rows \[2, 4\)"):
            file.read_rows(tensor, 2, 4)
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.read(tensor)


def test_strings_cross_the_window(tmp_path: Path) -> None:
    words = ["w" * (index % 251) for index in range(9000)]
    with open_bytes(tmp_path, gguf_bytes({"words": words, "last": "x" * 300_000})) as file:
        assert file.metadata["words"] == words
        assert file.metadata["last"] == "x" * 300_000


def test_alignment_of_the_file_counts(tmp_path: Path) -> None:
    content = gguf_bytes({"general.alignment": 128}, {"a": ROWS, "b": ROWS}, alignment=128)
    with open_bytes(tmp_path, content) as file:
        assert file.tensors["b"].offset - file.tensors["a"].offset == 128
        assert bytes(file.read(file.tensors["b"])) == ROWS.data


def test_an_unknown_weight_type_can_be_listed_but_not_read(tmp_path: Path) -> None:
    content = gguf_bytes({}, {"t": TensorBytes((5, 3), 99, bytes(64)), "u": ROWS})
    with open_bytes(tmp_path, content) as file:
        tensor = file.tensors["t"]
        assert (tensor.type.name, int(tensor.type), tensor.type.is_known) == ("type 99", 99, False)
        for use in (lambda: tensor.size_bytes, lambda: file.read(tensor)):
            with pytest.raises(UnsupportedModel, match="weight type 'type 99'.*Q4_K"):
                use()
        assert bytes(file.read(file.tensors["u"])) == ROWS.data


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"GGU", "too short"),
        (b"PK\3\4" + bytes(60), "does not begin with GGUF"),
        (gguf_bytes(version=1), "GGUF version 1 is not supported; 2 and 3 are"),
        (gguf_bytes(version=4), "GGUF version 4"),
        (gguf_bytes(version=0), "GGUF version 0"),
        (gguf_bytes(version=3 << 24), "big endian; fetch the little-endian one"),
        (gguf_bytes()[:20], "needs 8 bytes and 4 are left"),
        (gguf_bytes(num_keys=HUGE), f"{HUGE} keys"),
        (gguf_bytes(num_keys=9), "9 keys do not fit into the 0 bytes left"),
        (gguf_bytes(num_tensors=HUGE), f"{HUGE} tensors"),
        (gguf_bytes(num_tensors=3), "3 tensors do not fit"),
        (gguf_bytes({"k": Raw(STRING, struct.pack("<Q", HUGE))}), "the value of 'k' is"),
        (gguf_bytes({"k": Raw(STRING, struct.pack("<Q", 9) + b"x")}), "needs 9 bytes and 1 are"),
        (gguf_bytes({"k": Raw(STRING, string(b"\xff\xfe"))}), "the value of 'k' is not UTF-8"),
        (gguf_bytes({"k": strings(["fine", b"\x80"])}), "item 1 of the value of 'k' is not UTF-8"),
        (gguf_bytes({"k": Raw(13, b"")}), "has the unknown kind 13"),
        (gguf_bytes({"k": Raw(ARRAY, struct.pack("<IQ", 13, 0))}), "has the unknown kind 13"),
        (gguf_bytes({"k": Raw(ARRAY, struct.pack("<IQ", F32, HUGE))}), "numbers"),
        (gguf_bytes({"k": Raw(ARRAY, struct.pack("<IQ", U64, 2))}), "2 numbers do not fit"),
        (gguf_bytes({"k": Raw(ARRAY, struct.pack("<IQ", STRING, 5))}), "5 strings do not fit"),
        (gguf_bytes({"k": Raw(ARRAY, struct.pack("<IQ", ARRAY, 1) * 5)}), "arrays in arrays"),
        (gguf_bytes([("k", 1), ("k", 2)]), "key 'k' stands there twice"),
        (gguf_bytes({"k" * 1025: 1}), "a key is 1025 bytes long"),
        (gguf_bytes({}, [("t", ROWS), ("t", ROWS)]), "tensor 't' stands there twice"),
        (gguf_bytes({}, {"t": TensorBytes((4,) * 5, 0, bytes(4096))}), "has 5 dimensions"),
        (gguf_bytes({}, {"t": TensorBytes((1 << 32, 1 << 32), 0, b"")}), "makes no sense"),
        (gguf_bytes({}, {"t": TensorBytes((0, 1 << 63), 0, b"")}), "makes no sense"),
        (gguf_bytes({}, {"t": TensorBytes((33, 2), 8, bytes(99))}), "but Q8_0 comes in 32s"),
        (gguf_bytes({}, {"t": TensorBytes((4, 3), 0, bytes(32))}), "beyond the end of the file"),
        (gguf_bytes({}, {"t": TensorBytes((4,), 0, bytes(16), HUGE)}), "beyond the end"),
        (gguf_bytes({}, {"t": TensorBytes((4,), 99, bytes(16), HUGE)}), "beyond the end"),
        (gguf_bytes({}, {"t": TensorBytes((4,), 0, bytes(64), 16)}), "not a multiple of 32"),
        (gguf_bytes({"general.alignment": 0}, {"t": ROWS}), "alignment of 0"),
        (gguf_bytes({"general.alignment": 48}, {"t": ROWS}), "48 is not a power of two"),
        (gguf_bytes({"general.alignment": 1 << 31}, {"t": ROWS}), "makes no sense"),
        (gguf_bytes({"general.alignment": "32"}, {"t": ROWS}), "'32' makes no sense"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    assert message in refused(tmp_path, content)


def test_all_arrays_share_one_allowance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_head, "MAX_HEAD_VALUES", 100)
    monkeypatch.setattr(gguf_head, "MAX_HEAD_BYTES", 100_000)
    fine = numbers(0, [1] * 60)
    assert "60 numbers; 40 is the most" in refused(tmp_path, gguf_bytes({"a": fine, "b": fine}))
    big = gguf_bytes({"a": "x" * 70_000, "b": "x" * 300_000})
    assert "header larger than" in refused(tmp_path, big)


def test_a_file_cut_anywhere_was_not_fetched_completely(tmp_path: Path) -> None:
    metadata = {"a": "text", "b": numbers(4, [1, 2, 3]), "c": strings(["x", "yy"])}
    whole = gguf_bytes(metadata, {"t": ROWS})
    with open_bytes(tmp_path, whole) as file:
        end = file.tensors["t"].offset + file.tensors["t"].size_bytes
    for size in range(8, end):
        assert "was not fetched completely" in refused(tmp_path, whole[:size])


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "none.gguf", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "a\0b", "null"),
    ):
        with pytest.raises(BadSource, match=message):
            Gguf.open(path)


def test_a_file_that_shrinks_is_a_short_read(tmp_path: Path) -> None:
    with open_bytes(tmp_path, gguf_bytes({}, {"t": ROWS})) as file:
        os.truncate(tmp_path / "m.gguf", file.tensors["t"].offset + 20)
        with pytest.raises(BadSource, match=f"ends at byte {file.tensors['t'].offset + 20}"):
            file.read(file.tensors["t"])


# Split files


def parts(folder: Path, num_parts: int = 3, **changes: object) -> list[Path]:
    """A split file with one tensor in each part; `changes` go into the metadata of all."""
    paths = []
    for number in range(num_parts):
        said = {
            "split.no": scalar(2, number),
            "split.count": scalar(2, num_parts),
            "split.tensors.count": scalar(5, num_parts),
        }
        metadata = {**({"a": 1} if number == 0 else {}), **said, **changes}
        tensor = TensorBytes((4,), GgmlType.F32, f32(*[float(number)] * 4))
        name = f"m-{number + 1:05d}-of-{num_parts:05d}.gguf"
        paths.append(write(folder / name, gguf_bytes(metadata, {f"t{number}": tensor})))
    return paths


def test_any_part_opens_all(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    for path in paths:
        with Gguf.open(path) as file:
            assert file.paths == tuple(paths)
            assert file.metadata["a"] == 1
            assert list(file.tensors) == ["t0", "t1", "t2"]
            for number, tensor in enumerate(file.tensors.values()):
                assert bytes(file.read(tensor)) == f32(*[float(number)] * 4)
                assert tensor.path == paths[number]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    paths[1].unlink()
    with pytest.raises(BadSource) as caught:
        Gguf.open(paths[2])
    assert str(caught.value).startswith(f"{paths[1]}: this part is missing; put it beside")


def test_parts_must_be_what_their_names_say(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    paths[0].rename(tmp_path / "x")
    paths[2].rename(paths[0])
    (tmp_path / "x").rename(paths[2])
    with pytest.raises(BadSource, match=r"it says it is part 2 \(from 0\) of 3, but stands as par"):
        Gguf.open(paths[0])


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    path = parts(tmp_path)[1].rename(tmp_path / "other.gguf")
    with pytest.raises(BadSource, match="part 1 .* of 3, but stands as part 0 of 1"):
        Gguf.open(path)


def test_parts_must_hold_all_tensors_once(tmp_path: Path) -> None:
    paths = parts(tmp_path, **{"split.tensors.count": scalar(5, 4)})
    with pytest.raises(BadSource, match="hold 3 tensors and should hold 4"):
        Gguf.open(paths[0])
    parts(tmp_path)
    again = TensorBytes((4,), GgmlType.F32, f32(0, 0, 0, 0))
    write(paths[2], gguf_bytes({}, {"t0": again}))
    with pytest.raises(BadSource, match="tensor 't0' is also in m-00001-of-00003.gguf"):
        Gguf.open(paths[0])
    with pytest.raises(BadSource, match="no part of a split file"):
        Gguf.open(tmp_path / "m-00004-of-00003.gguf")


# What stays behind


def resident_pages(path: Path) -> int:
    """Pages of a file in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        num_pages = -(-len(mapped) // mmap.PAGESIZE)
        states = (ctypes.c_ubyte * num_pages)()
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
        assert libc.mincore(address, ctypes.c_size_t(len(mapped)), states) == 0
        return sum(state & 1 for state in states)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise here")
def test_closing_leaves_no_pages_behind(tmp_path: Path) -> None:
    tensor = TensorBytes((1 << 18,), GgmlType.F32, bytes(1 << 20))
    path = write(tmp_path / "m.gguf", gguf_bytes({"a": 1}, {"t": tensor}))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(path):
        pytest.skip("this filesystem lives in the page cache")
    with Gguf.open(path) as model:
        model.read(model.tensors["t"])
        assert resident_pages(path) >= 200
    assert resident_pages(path) == 0


def test_a_refused_file_leaves_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    paths = parts(tmp_path)
    write(paths[2], gguf_bytes(version=1))
    for path in (paths[0], write(tmp_path / "m.gguf", b"GGUF" + bytes(9)), tmp_path / "none"):
        with pytest.raises(BadSource):
            Gguf.open(path)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_vocabulary_is_read_in_one_loop(tmp_path: Path) -> None:
    words = [f"word{index}" for index in range(50_000)]
    path = write(tmp_path / "m.gguf", gguf_bytes({"words": words, "scores": [0.5] * 50_000}))
    num_calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        Gguf.open(path).close()
    finally:
        sys.setprofile(None)
    assert num_calls < 1000
