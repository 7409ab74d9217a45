"""The container (.jlm): opening one, and checking its extents.

Knows files. `jlm_head.py` knows what stands in the header; `docs/format.md` draws both. Opening
reads the header and nothing else, and leaves nothing in the page cache; extents are read, and their
sums checked, by whoever pages them in.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import xxhash

from jitllm.errors import AnyPath, BadContainer, NotConverted, convert_command
from jitllm.formats.jlm_head import (
    EXTENT_ALIGNMENT,
    MAGIC,
    MAX_HEADER_BYTES,
    PROLOGUE,
    VERSION,
    ExpertExtent,
    Extent,
    Header,
    TensorEntry,
    decode,
    round_up,
)

__all__ = ["VERSION", "Container", "ExpertExtent", "Extent", "Header", "TensorEntry"]

READ_BYTES = 4 << 20
"""Bytes that a check reads at once."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Container:
    """An open container; `close` it, or use it in a `with`.

    bytes_read: what opening took from the file, in whole pages.
    """

    def __init__(self, path: Path, fd: int, header: Header, bytes_read: int) -> None:
        self.path = path
        self.header = header
        self.bytes_read = bytes_read
        self._fd = fd

    @classmethod
    def open(cls, path: AnyPath) -> Self:
        """Open a container and read its header.

        Raises NotConverted, which carries the command, for a GGUF file and for a container of
        another version; BadContainer, which names the field, for anything else that is not sound.
        """
        path = Path(path)
        fd = _open(path)
        try:
            header, bytes_read = _read_header(path, fd)
            return cls(path, fd, header, bytes_read)
        except BaseException:
            os.close(fd)
            raise

    def check(self, progress: Progress | None = None) -> list[str]:
        """Read every extent and compare its sum; what is wrong, a line for each damaged extent."""
        extents = list(self.header.extents())
        total = sum(extent.length for _, extent in extents)
        problems: list[str] = []
        done = 0
        for name, extent in extents:
            try:
                if _sum(self.path, self._fd, extent) != extent.xxh3:
                    problems.append(
                        f"the checksum of the {name} (bytes {extent.offset} to "
                        f"{extent.offset + extent.length}) is wrong"
                    )
            except BadContainer as error:
                problems.append(error.problem)
            done += extent.length
            if progress:
                progress(done, total)
        return problems

    def read(self, tensor: TensorEntry, expert: int = 0) -> bytes:
        """The bytes of one tensor, or of one expert's matrix; the extent's sum is not looked at."""
        offset = self.header.extent_of(tensor, expert).offset + tensor.offset
        data = _read_at(self.path, self._fd, offset, tensor.size_bytes)
        _drop(self._fd)
        return data

    def close(self) -> None:
        """Close the file. Twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __reduce__(self) -> tuple[Callable[..., Container], tuple[Path]]:
        """In another process it is opened again."""
        return Container.open, (self.path,)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open(path: Path) -> int:
    try:
        # Not blocking: opening a pipe must not wait for somebody to write into it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        problem = getattr(error, "strerror", None) or str(error)
        raise BadContainer(path, problem, "check the path") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadContainer(path, "this is not a regular file", "check the path")
    with contextlib.suppress(OSError):  # no read-ahead: it would read what nobody asked for
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd


def _read_header(path: Path, fd: int) -> tuple[Header, int]:
    """The header, and the bytes of the pages that it was read from."""
    file_bytes = os.fstat(fd).st_size
    page = _read_at(path, fd, 0, min(file_bytes, EXTENT_ALIGNMENT))
    front = page[: PROLOGUE.size]
    if len(front) < PROLOGUE.size or not front.startswith(MAGIC):
        _refuse(path, front)
    _, version, _, body_bytes, _ = PROLOGUE.unpack(front)
    if version != VERSION:
        raise NotConverted(
            path,
            f"a container of format version {version}, and this program reads version {VERSION}",
            convert_command("SOURCE.gguf", path),
        )
    end = PROLOGUE.size + body_bytes
    if body_bytes > MAX_HEADER_BYTES or end > file_bytes:
        raise BadContainer(
            path,
            f"its header has {body_bytes} bytes, and the file {file_bytes - PROLOGUE.size} more",
        )
    rest = max(end - len(page), 0)
    body = page[PROLOGUE.size : end] + (_read_at(path, fd, len(page), rest) if rest else b"")
    _drop(fd)
    return decode(path, front, body, file_bytes), round_up(end, EXTENT_ALIGNMENT)


def _refuse(path: Path, front: bytes) -> NoReturn:
    if front.startswith(b"GGUF"):
        raise NotConverted(path, "a GGUF file")
    command = convert_command("SOURCE.gguf")
    raise BadContainer(
        path, "this is no jitllm container", f"a GGUF file becomes one by: {command}"
    )


def _read_at(path: Path, fd: int, offset: int, size: int) -> bytes:
    """`size` bytes at `offset`, known to lie inside the file."""
    parts: list[bytes] = []
    while size:
        try:
            part = os.pread(fd, size, offset)
        except OSError as error:
            raise BadContainer(
                path, f"byte {offset}: {error.strerror}", "check the disk"
            ) from error
        if not part:
            raise BadContainer(path, f"the file ends at byte {offset}, in the middle of a read")
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _sum(path: Path, fd: int, extent: Extent) -> int:
    digest = xxhash.xxh3_64()
    for at in range(0, extent.length, READ_BYTES):
        digest.update(_read_at(path, fd, extent.offset + at, min(READ_BYTES, extent.length - at)))
        _drop(fd)
    return digest.intdigest()


def _drop(fd: int) -> None:
    """Leave nothing of the file in the page cache, where the filesystem can be asked."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
