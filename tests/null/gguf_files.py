"""Writes GGUF files byte by byte, wrong ones too. Knows the format, none of the reader."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STRING, ARRAY, U32, I32, F32, BOOL, U64 = 8, 9, 4, 5, 6, 7, 10
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor to write; `offset` overrides where the table says it lies."""

    shape: tuple[int, ...]
    type_id: int
    data: bytes
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Raw:
    """A value's kind and bytes, as they are."""

    kind: int
    data: bytes


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: object) -> Raw:
    return Raw(kind, struct.pack("<" + CODES[kind], value))


def numbers(kind: int, values: Sequence[object]) -> Raw:
    head = struct.pack("<IQ", kind, len(values))
    return Raw(ARRAY, head + struct.pack(f"<{len(values)}{CODES[kind]}", *values))


def strings(values: Sequence[str | bytes]) -> Raw:
    return Raw(ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(string, values)))


def value(of: object) -> Raw:
    """What a Python value is usually written as."""
    match of:
        case Raw():
            return of
        case bool():
            return scalar(BOOL, of)
        case int():
            return scalar(U32, of)
        case float():
            return scalar(F32, of)
        case str():
            return Raw(STRING, string(of))
        case [str(), *_]:
            return strings(of)
        case [int(), *_]:
            return numbers(I32, of)
        case [float(), *_]:
            return numbers(F32, of)
    raise TypeError(f"{of!r}")


def gguf_bytes(
    metadata: Mapping[str, object] | Sequence[tuple[str, object]] = (),
    tensors: Mapping[str, TensorBytes] | Sequence[tuple[str, TensorBytes]] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; sequences of pairs allow names to come twice."""
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    named = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    parts = [
        magic,
        struct.pack(
            "<IQQ",
            version,
            len(named) if num_tensors is None else num_tensors,
            len(pairs) if num_keys is None else num_keys,
        ),
    ]
    for key, of in pairs:
        raw = value(of)
        parts += [string(key), struct.pack("<I", raw.kind), raw.data]
    data = bytearray()
    for name, tensor in named:
        offset = len(data) if tensor.offset is None else tensor.offset
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        parts += [string(name), shape, struct.pack("<IQ", tensor.type_id, offset)]
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    head = b"".join(parts)
    return head + bytes(-len(head) % alignment) + bytes(data) if named else head


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)
