"""GGUF files, versions 2 and 3, little endian, in one part or in several.

Knows files and parts; `gguf_head.py` knows what stands in them. A file is read, never mapped: one
that shrinks meanwhile is a short read, not a signal.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from jitllm.errors import BadSource, shown
from jitllm.formats.ggml import GgmlType
from jitllm.formats.gguf_head import GgufTensor, GgufValue, read_at, read_head
from jitllm.units import counted

__all__ = ["GgmlType", "Gguf", "GgufTensor", "GgufValue", "drop_from_page_cache"]

MAX_PARTS = 512

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<part>[0-9]{5})-of-(?P<parts>[0-9]{5})\.gguf")


class Gguf:
    """An open GGUF file, or all the parts of a split one; `close` it, or use it in a `with`."""

    def __init__(self, path: Path, parts: list[_Part]) -> None:
        self.path = path
        self._fds = {part.path: part.fd for part in parts}
        self.metadata: Mapping[str, GgufValue] = MappingProxyType(parts[0].metadata)
        tensors: dict[str, GgufTensor] = {}
        for part in parts:
            for name, tensor in part.tensors.items():
                if name in tensors:
                    raise BadSource(
                        part.path, f"tensor {shown(name)} is also in {tensors[name].path.name}"
                    )
                tensors[name] = tensor
        self.tensors: Mapping[str, GgufTensor] = MappingProxyType(tensors)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file, and with any part of a split one all its siblings; read their headers.

        Raises `BadSource` when a file or a part is missing, damaged, or not GGUF 2 or 3.
        """
        paths = _part_paths(Path(path))
        parts: list[_Part] = []
        try:
            for part_path in paths:
                parts.append(_Part(part_path))
            _check_parts(parts)
            return cls(Path(path), parts)
        except BaseException:
            for part in parts:
                _close(part.fd)
            raise

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file, or its parts in order."""
        return tuple(self._fds)

    def read(self, tensor: GgufTensor) -> bytearray:
        """All bytes of a tensor of this file. Raises `BadSource` on a short read or I/O error."""
        return self.read_rows(tensor, 0, tensor.num_rows)

    def read_rows(self, tensor: GgufTensor, start: int, stop: int) -> bytearray:
        """The bytes of rows [start, stop) of a tensor, all outer dimensions counted as rows."""
        if not 0 <= start <= stop <= tensor.num_rows:
            raise ValueError(f"rows [{start}, {stop}) of {tensor.num_rows} in {tensor.name!r}")
        if tensor.path not in self._fds:
            raise ValueError(f"{tensor.path} is closed")
        row_bytes = tensor.row_bytes
        offset = tensor.offset + start * row_bytes
        return read_at(self._fds[tensor.path], tensor.path, offset, (stop - start) * row_bytes)

    def close(self) -> None:
        """Close every part, and leave none of its pages in the page cache. Twice is fine."""
        while self._fds:
            _close(self._fds.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def drop_from_page_cache(fd: int) -> None:
    """Ask the kernel to forget the clean pages of an open file, where it can be asked."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _close(fd: int) -> None:
    try:
        drop_from_page_cache(fd)
    finally:
        os.close(fd)


def _part_paths(path: Path) -> list[Path]:
    """`path` itself, or all its siblings when its name says that it is part of a split file."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    num_parts = int(match["parts"])
    if not 1 <= int(match["part"]) <= num_parts or num_parts > MAX_PARTS:
        raise BadSource(path, f"no part of a split file is called so ({MAX_PARTS} parts at most)")
    names = (
        f"{match['stem']}-{part:05d}-of-{num_parts:05d}.gguf" for part in range(1, num_parts + 1)
    )
    paths = [path.with_name(name) for name in names]
    for sibling in paths:
        if not os.path.exists(sibling):
            raise BadSource(sibling, "this part is missing", f"put it beside {path.name}")
    return paths


def _check_parts(parts: list[_Part]) -> None:
    """Parts that say which they are must say what their names say."""
    for number, part in enumerate(parts):
        said_count = part.metadata.get("split.count", len(parts))
        said_number = part.metadata.get("split.no", number)
        if said_count not in (len(parts), 0) or said_number != number:
            raise BadSource(
                part.path,
                f"it says it is part {said_number} (from 0) of {said_count}, but stands as "
                f"part {number} of {len(parts)}",
                "give the parts back the names they were published with",
            )
    num_tensors = sum(len(part.tensors) for part in parts)
    said_tensors = parts[0].metadata.get("split.tensors.count", num_tensors)
    if len(parts) > 1 and said_tensors != num_tensors:
        raise BadSource(
            parts[0].path,
            f"its parts hold {counted(num_tensors, 'tensor')} and should hold {said_tensors}",
        )


class _Part:
    """One open file with its header read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise BadSource(path, "this is not a regular file")
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise BadSource(path, getattr(error, "strerror", None) or str(error)) from error
        try:
            self.metadata, self.tensors = read_head(self.fd, path)
        except BaseException:
            _close(self.fd)
            raise
