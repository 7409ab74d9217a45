"""The header of one GGUF file: metadata and the table of tensors.

Knows bytes, names and types. Everything is untrusted: a count or a length is compared with the
bytes that are left before anything is allocated for it, and all of a header has an allowance, so
damage ends in `BadSource` and costs neither memory nor time.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from sys import byteorder
from typing import NoReturn, TypeAlias, cast

from jitllm.errors import BadSource, shown
from jitllm.formats.ggml import GgmlType

GgufValue: TypeAlias = "int | float | bool | str | list[GgufValue]"

# The largest real header is some 15 MB (a vocabulary of 262k words with 515k merges).
MAX_HEAD_BYTES = 64 << 20
MAX_HEAD_VALUES = 1 << 22
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_NAME_BYTES = 1 << 10
MAX_DEPTH = 4
MAX_DIMS = 4

_MAGIC = b"GGUF"
_CUT = "the file is damaged or was not fetched completely"
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies and what it is."""

    name: str
    shape: tuple[int, ...]
    """GGUF order: `shape[0]` is the length of a row, whose weights are neighbours."""
    type: GgmlType
    offset: int
    """Absolute, in bytes, in the file `path`."""
    path: Path

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row. Raises `UnsupportedModel` for an unknown type, as all sizes do."""
        row = self.shape[0] if self.shape else 1
        return row // self.type.group_size * self.type.group_bytes

    @property
    def size_bytes(self) -> int:
        return self.row_bytes * self.num_rows


def read_head(fd: int, path: Path) -> tuple[dict[str, GgufValue], dict[str, GgufTensor]]:
    """Metadata and tensors of an open file. Raises `BadSource` when they make no sense."""
    head = _Head(fd, path)
    num_tensors, num_keys = _read_counts(head)
    metadata = _read_metadata(head, num_keys)
    return metadata, _read_tensors(head, num_tensors, metadata)


_U32 = Struct("<I")
_U64 = Struct("<Q")

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, tuple[str, Struct]] = {  # kind: array's type code, one value
    0: ("B", Struct("<B")),
    1: ("b", Struct("<b")),
    2: ("H", Struct("<H")),
    3: ("h", Struct("<h")),
    4: ("I", _U32),
    5: ("i", Struct("<i")),
    6: ("f", Struct("<f")),
    7: ("?", Struct("<?")),
    10: ("Q", _U64),
    11: ("q", Struct("<q")),
    12: ("d", Struct("<d")),
}
_MIN_STRING_BYTES = 8
_MIN_ARRAY_BYTES = 12
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


class _Head:
    """The front of a file, read in order through a window.

    `need` is the only place that reads, and refuses what the file cannot hold.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        self.file_bytes = os.fstat(fd).st_size
        self.window = b""
        self.at = 0
        """Position in the window."""
        self.window_offset = 0
        self.num_values = 0

    @property
    def offset(self) -> int:
        return self.window_offset + self.at

    @property
    def bytes_left(self) -> int:
        return self.file_bytes - self.offset

    def fail(self, problem: str, remedy: str = "") -> NoReturn:
        raise BadSource(self.path, f"{problem} (at byte {self.offset})", remedy)

    def need(self, num_bytes: int, what: str) -> None:
        """Have the next `num_bytes` in the window."""
        if self.at + num_bytes <= len(self.window):
            return
        if num_bytes > self.bytes_left:
            self.fail(f"{what} needs {num_bytes} bytes and {self.bytes_left} are left", _CUT)
        if self.offset + num_bytes > MAX_HEAD_BYTES:
            self.fail(f"{what} makes its header larger than {MAX_HEAD_BYTES >> 20} MiB")
        self.window_offset, rest = self.offset, self.window[self.at :]
        self.at = 0
        more = max(num_bytes, 1 << 16, min(self.offset, 4 << 20)) - len(rest)
        start = self.window_offset + len(rest)
        self.window = rest + read_at(self.fd, self.path, start, min(more, self.file_bytes - start))

    def number(self, struct: Struct, what: str) -> int:
        self.need(struct.size, what)
        value = struct.unpack_from(self.window, self.at)[0]
        self.at += struct.size
        return cast("int", value)  # or a float or a bool, where `struct` says so

    def count(self, struct: Struct, min_bytes: int, most: int, what: str) -> int:
        """A count of things that take at least `min_bytes` each."""
        number = self.number(struct, f"the number of {what}")
        if number > most:
            self.fail(f"{number} {what}; {most} is the most that makes sense")
        if number * min_bytes > self.bytes_left:
            self.fail(f"{number} {what} do not fit into the {self.bytes_left} bytes left", _CUT)
        return number

    def values(self, min_bytes: int, what: str) -> int:
        """A count of array items; all arrays of a header share one allowance."""
        number = self.count(_U64, min_bytes, MAX_HEAD_VALUES - self.num_values, what)
        self.num_values += number
        return number

    def string(self, what: str, most: int = MAX_HEAD_BYTES) -> str:
        size = self.number(_U64, f"the length of {what}")
        if size > most:
            self.fail(f"{what} is {size} bytes long; {most} is the most that makes sense")
        self.need(size, what)
        raw = self.window[self.at : self.at + size]
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")
        self.at += size
        return text

    def strings(self, number: int, what: str) -> list[str]:
        """Many strings; a tight loop, because a vocabulary with its merges has 780 thousand."""
        texts: list[str] = []
        add, unpack = texts.append, _U64.unpack_from
        while len(texts) < number:
            window, at, end = self.window, self.at, len(self.window)
            try:
                for _ in range(number - len(texts)):
                    start = at + 8
                    if start > end:
                        break
                    stop = start + unpack(window, at)[0]
                    if stop > end:
                        break
                    add(window[start:stop].decode())
                    at = stop
            except UnicodeDecodeError:
                self.at = at
                self.fail(f"item {len(texts)} of {what} is not UTF-8")
            self.at = at
            if len(texts) < number:
                add(self.string(f"item {len(texts)} of {what}"))
        return texts


def _read_counts(head: _Head) -> tuple[int, int]:
    """Magic, version, and how many tensors and keys there are."""
    if head.file_bytes < len(_MAGIC) + 4:
        raise BadSource(head.path, "this is not a GGUF file: it is too short")
    head.need(8, "the magic")
    if head.window[:4] != _MAGIC:
        raise BadSource(head.path, "this is not a GGUF file: it does not begin with GGUF")
    head.at = 4
    version = head.number(_U32, "the version")
    if version and version & 0xFFFF == 0:
        raise BadSource(head.path, "this GGUF file is big endian", "fetch the little-endian one")
    if version not in (2, 3):
        raise BadSource(head.path, f"GGUF version {version} is not supported; 2 and 3 are")
    num_tensors = head.count(_U64, _MIN_TENSOR_BYTES, MAX_TENSORS, "tensors")
    return num_tensors, head.count(_U64, _MIN_KEY_BYTES, MAX_KEYS, "keys")


def _read_metadata(head: _Head, num_keys: int) -> dict[str, GgufValue]:
    metadata: dict[str, GgufValue] = {}
    for _ in range(num_keys):
        key = head.string("a key", MAX_NAME_BYTES)
        if key in metadata:
            head.fail(f"key {shown(key)} stands there twice")
        kind = head.number(_U32, f"the kind of {shown(key)}")
        metadata[key] = _read_value(head, kind, f"the value of {shown(key)}", 0)
    return metadata


def _read_value(head: _Head, kind: int, what: str, depth: int) -> GgufValue:
    if kind == _STRING:
        return head.string(what)
    if kind == _ARRAY:
        return _read_array(head, what, depth + 1)
    if kind not in _SCALARS:
        head.fail(f"{what} has the unknown kind {kind}")
    return head.number(_SCALARS[kind][1], what)


def _read_array(head: _Head, what: str, depth: int) -> GgufValue:
    if depth > MAX_DEPTH:
        head.fail(f"{what} holds arrays in arrays, {depth} deep")
    kind = head.number(_U32, f"the kind of {what}")
    if kind == _STRING:
        return cast("GgufValue", head.strings(head.values(_MIN_STRING_BYTES, "strings"), what))
    if kind == _ARRAY:
        number = head.values(_MIN_ARRAY_BYTES, "arrays")
        return [_read_array(head, what, depth + 1) for _ in range(number)]
    if kind not in _SCALARS:
        head.fail(f"{what} has the unknown kind {kind}")
    return _read_numbers(head, kind, what)


def _read_numbers(head: _Head, kind: int, what: str) -> GgufValue:
    code, struct = _SCALARS[kind]
    size = head.values(struct.size, "numbers") * struct.size
    head.need(size, what)
    raw = head.window[head.at : head.at + size]
    head.at += size
    if code == "?":
        return [value != 0 for value in raw]
    numbers = array(code)
    numbers.frombytes(raw)
    if byteorder == "big":
        numbers.byteswap()
    return cast("GgufValue", numbers.tolist())


def _read_tensors(
    head: _Head, num_tensors: int, metadata: Mapping[str, GgufValue]
) -> dict[str, GgufTensor]:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
        head.fail(f"an alignment of {shown(alignment)} makes no sense")
    if alignment & (alignment - 1):
        head.fail(f"an alignment of {alignment} is not a power of two")
    found = [_read_tensor(head, alignment) for _ in range(num_tensors)]

    data_offset = -(-head.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in found:
        tensor = GgufTensor(name, shape, kind, data_offset + offset, head.path)
        if name in tensors:
            head.fail(f"tensor {shown(name)} stands there twice")
        _check_extent(head, tensor)
        tensors[name] = tensor
    return tensors


def _read_tensor(head: _Head, alignment: int) -> tuple[str, tuple[int, ...], GgmlType, int]:
    """Name, shape, type, and offset in the data region."""
    name = head.string("the name of a tensor", MAX_NAME_BYTES)
    what = f"tensor {shown(name)}"
    num_dims = head.number(_U32, f"the number of dimensions of {what}")
    if num_dims > MAX_DIMS:
        head.fail(f"{what} has {num_dims} dimensions; {MAX_DIMS} is the most")
    shape = tuple(head.number(_U64, f"the shape of {what}") for _ in range(num_dims))
    if math.prod(shape) >= 1 << 63 or max(shape, default=0) >= 1 << 63:
        head.fail(f"the shape {shape} of {what} makes no sense")
    kind = GgmlType(head.number(_U32, f"the type of {what}"))
    if kind.is_known and (shape[0] if shape else 1) % kind.group_size:
        head.fail(f"{what} has rows of {shape[:1]}, but {kind.name} comes in {kind.group_size}s")
    offset = head.number(_U64, f"the offset of {what}")
    if offset % alignment:
        head.fail(f"the offset {offset} of {what} is not a multiple of {alignment}")
    return name, shape, kind, offset


def _check_extent(head: _Head, tensor: GgufTensor) -> None:
    size = tensor.size_bytes if tensor.type.is_known else 0
    if tensor.offset + size > head.file_bytes:
        raise BadSource(
            head.path,
            f"tensor {shown(tensor.name)} lies at [{tensor.offset}, {tensor.offset + size}), "
            f"beyond the end of the file at {head.file_bytes}",
            _CUT,
        )


def read_at(fd: int, path: Path, offset: int, size: int) -> bytearray:
    """`size` bytes at `offset`, which the caller knows to lie inside the file."""
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise BadSource(path, f"byte {offset + done}: {error.strerror}") from error
        if not got:
            raise BadSource(path, f"the file ends at byte {offset + done}, in the middle of a read")
        done += got
    return data
