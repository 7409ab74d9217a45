"""From a GGUF file to a container, tensor by tensor, in bounded memory.

    plan -> OUT.jlm.part (extents, then the header with their sums) -> OUT.jlm

Knows files and order. The weights go through `layout.py`; nothing is computed with them. The part
file grows behind a journal: what the journal says is done is on the disk, so that an interrupted
conversion goes on from there and ends with the same bytes. Neither the source nor the container
stays in the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import xxhash

from jitllm.errors import AnyPath, DiskFull, JitllmError, UsageError
from jitllm.formats import layout
from jitllm.formats.gguf import Gguf, drop_from_page_cache
from jitllm.formats.jlm import Container
from jitllm.formats.jlm_head import Extent, TensorEntry, encode
from jitllm.formats.placing import Source
from jitllm.formats.plan import Plan, ReadVocabulary, make_plan, plan
from jitllm.kernels.layout import FORMATS, TILE_ROWS

__all__ = ["Plan", "Report", "convert", "plan"]

PIECE_WEIGHTS = 1 << 20
"""Weights of a matrix that are packed at once; this takes some 16 MiB."""

SYNC_BYTES = 256 << 20
"""Bytes after which the part file goes to the disk and the journal says so."""

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Report:
    """A finished conversion. resumed_bytes: what an earlier attempt had written."""

    path: Path
    plan: Plan
    resumed_bytes: int
    seconds: float


def convert(
    source: AnyPath,
    dest: AnyPath,
    *,
    read_vocabulary: ReadVocabulary,
    chat_template: str | None = None,
    stop_ids: Sequence[int] = (),
    progress: Progress | None = None,
    sync_bytes: int = SYNC_BYTES,
) -> Report:
    """Write the model of a GGUF file (any part of a split one) to the container `dest`.

    read_vocabulary: `VocabularyData.from_gguf`. chat_template: text that replaces the unnamed
    template. stop_ids: tokens that end a reply, besides those of the source.

    Raises UnsupportedModel or BadSource before anything is written, DiskFull, and UsageError when
    `dest` is the source. Whatever happens, a container that stood at `dest` stands there intact
    until its successor is complete.
    """
    started = time.monotonic()
    dest = Path(dest)
    with Gguf.open(source) as gguf:
        planned = make_plan(gguf, read_vocabulary, chat_template, stop_ids)
        _refuse_target(dest, gguf.paths)
        with _os_errors(dest, planned), _Part(dest, planned, _digest(gguf, planned)) as part:
            resumed_bytes = part.done
            _write(gguf, planned, part, progress, sync_bytes)
            part.finish()
    if progress:
        progress(planned.file_bytes, planned.file_bytes)
    return Report(dest, planned, resumed_bytes, time.monotonic() - started)


def _refuse_target(dest: Path, sources: Sequence[Path]) -> None:
    if dest.is_dir():
        raise UsageError(f"{dest} is a folder", "name a file in it")
    part = _part_path(dest)
    for path in sources:
        for target in (dest, part, _journal_path(part)):
            if target.exists() and target.samefile(path):
                raise UsageError(f"{dest} would overwrite its source", "write to another file")


def _digest(gguf: Gguf, planned: Plan) -> str:
    """Names the conversion: the source's files, and everything about the result but its weights."""
    digest = hashlib.sha256(encode(planned.header))
    for path in gguf.paths:
        status = path.stat()
        identity = (str(path.resolve()), status.st_size, status.st_mtime_ns)
        digest.update(repr(identity).encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _os_errors(dest: Path, planned: Plan) -> Iterator[None]:
    """What the system says, as a refusal with its remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(dest, planned.file_bytes, _free_bytes(dest)) from error
        raise JitllmError(f"{dest}: {error.strerror or error}") from error


# --- the weights ------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Rows [start, stop) of a tensor of the source (0, 0: a vector), their place in the extent."""

    tensor: TensorEntry
    source: Source
    start: int
    stop: int
    offset: int
    size_bytes: int

    def pack(self, gguf: Gguf) -> memoryview:
        """The bytes to write."""
        tensor = self.tensor
        if not tensor.rows:
            source, first = self.source
            values = layout.vector(source.type, gguf.read(source))
            return values[first : first + tensor.cols].data.cast("B")
        raw = gguf.read_rows(self.source.tensor, self.start, self.stop)
        tiles = layout.pack(tensor.format, raw, self.stop - self.start, tensor.cols)
        return tiles.reshape(-1).data


class _Contents:
    """What lies in each extent."""

    def __init__(self, planned: Plan) -> None:
        self._tensors: dict[tuple[int | None, bool], list[tuple[TensorEntry, Source]]] = {}
        for tensor, source in zip(planned.header.tensors, planned.sources, strict=True):
            place = (None if tensor.dense else tensor.block, tensor.experts > 0)
            self._tensors.setdefault(place, []).append((tensor, source))
        self._runs = planned.header.runs()

    def pieces(self) -> Iterator[Iterator[_Piece]]:
        """Of each extent its pieces, in the order of the file."""
        yield self._of(None)
        for block, (_, *experts) in enumerate(self._runs):
            yield self._of(block)
            for expert in range(len(experts)):
                yield self._of(block, expert)

    def _of(self, block: int | None, expert: int | None = None) -> Iterator[_Piece]:
        for tensor, source in self._tensors.get((block, expert is not None), ()):
            yield from _pieces(tensor, source, expert or 0)


def _pieces(tensor: TensorEntry, source: Source, expert: int) -> Iterator[_Piece]:
    """The pieces of one matrix, or of a vector."""
    if not tensor.rows:
        yield _Piece(tensor, source, 0, 0, tensor.offset, tensor.size_bytes)
        return
    padded_cols = FORMATS[tensor.format].padded_cols(tensor.cols)
    step = max(PIECE_WEIGHTS // padded_cols // TILE_ROWS, 1) * TILE_ROWS
    tile_bytes = tensor.size_bytes // -(-tensor.rows // TILE_ROWS)
    before = source.first + expert * tensor.rows  # a source has experts one after the other
    for start in range(0, tensor.rows, step):
        stop = min(start + step, tensor.rows)
        first, last = start // TILE_ROWS, -(-stop // TILE_ROWS)
        yield _Piece(
            tensor,
            source,
            before + start,
            before + stop,
            tensor.offset + first * tile_bytes,
            (last - first) * tile_bytes,
        )


def _write(
    gguf: Gguf, planned: Plan, part: _Part, progress: Progress | None, sync_bytes: int
) -> None:
    """Every extent that the part file does not hold yet."""
    contents = _Contents(planned).pieces()
    for number, (_, extent) in enumerate(planned.header.extents()):
        pieces = next(contents)
        if number < len(part.sums):
            continue
        part.begin(extent)
        for piece in pieces:
            if extent.offset + piece.offset + piece.size_bytes <= part.done:
                continue
            part.write(extent.offset + piece.offset, piece.pack(gguf))
            if part.done - part.synced >= sync_bytes:
                part.sync()
            if progress:
                progress(part.done, planned.file_bytes)
        part.end()


# --- the part file and its journal ------------------------------------------------------------


class _Part:
    """`OUT.jlm.part`, open for writing and locked, and its journal `OUT.jlm.part.resume`.

    [0, header)       written last, when the sums are known
    [header, synced)  on the disk, as the journal says
    [synced, done)    written
    [done, end)       allocated
    """

    def __init__(self, dest: Path, planned: Plan, digest: str) -> None:
        self.dest = dest
        self.path = _part_path(dest)
        self.journal = _journal_path(self.path)
        self.planned = planned
        self.sums: list[int] = []
        """Of the extents that are complete."""
        self._digest = digest
        self._is_finished = False
        self._sum: Any = xxhash.xxh3_64()
        self._fd = _open_locked(self.path)
        try:
            self.done = self.synced = self._resume() or self._begin()
        except BaseException as error:
            self._leave(error)
            raise

    # --- writing ------------------------------------------------------------------------------

    def begin(self, extent: Extent) -> None:
        """Start an extent, or go on in the middle of it. Padding before it is in no sum."""
        self.done = max(self.done, extent.offset)

    def write(self, offset: int, data: memoryview) -> None:
        """Write at or behind `done`; what lies between is zeros, and belongs to the sum."""
        gap = bytes(offset - self.done)
        for piece in (memoryview(gap), data):
            self._sum.update(piece)
            _write_at(self._fd, self.done, piece)
            self.done += len(piece)

    def end(self) -> None:
        """The extent is complete."""
        self.sums.append(self._sum.intdigest())
        self._sum = xxhash.xxh3_64()

    def sync(self) -> None:
        """Bring everything to the disk, out of the page cache, and into the journal."""
        os.fdatasync(self._fd)
        drop_from_page_cache(self._fd)
        self.synced = self.done
        state = {
            "digest": self._digest,
            "done": self.done,
            "sums": self.sums,
            "sum": self._sum.intdigest(),
        }
        _replace_file(self.journal, json.dumps(state).encode())

    def finish(self) -> None:
        """Write the header, look at the result as a reader would, and put it in its place."""
        header = self.planned.header
        summed = (
            replace(extent, xxh3=found)
            for (_, extent), found in zip(header.extents(), self.sums, strict=True)
        )
        front = encode(header.with_extents(summed))
        _write_at(self._fd, 0, memoryview(front))
        os.fsync(self._fd)
        drop_from_page_cache(self._fd)
        Container.open(self.path).close()
        os.replace(self.path, self.dest)
        self._is_finished = True
        _sync_folder(self.dest.parent)
        self.journal.unlink(missing_ok=True)

    # --- beginning and going on ---------------------------------------------------------------

    def _begin(self) -> int:
        """An empty file of the right size; returns where writing starts."""
        self.journal.unlink(missing_ok=True)
        os.ftruncate(self._fd, 0)
        free_bytes = _free_bytes(self.dest)
        if free_bytes < self.planned.file_bytes:
            raise DiskFull(self.dest, self.planned.file_bytes, free_bytes)
        try:
            os.posix_fallocate(self._fd, 0, self.planned.file_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(self._fd, self.planned.file_bytes)
        self.sums, self._sum = [], xxhash.xxh3_64()
        return self.planned.header.dense.offset

    def _resume(self) -> int | None:
        """Where an earlier attempt at the same conversion stopped, if there was one."""
        try:
            state = json.loads(self.journal.read_bytes())
            done, sums, running = state["done"], state["sums"], state["sum"]
            is_same = state["digest"] == self._digest
        except (OSError, ValueError, KeyError, TypeError):
            return None
        extents = [extent for _, extent in self.planned.header.extents()]
        if (
            not is_same
            or not isinstance(done, int)
            or not isinstance(sums, list)
            or not all(isinstance(found, int) for found in sums)
            or len(sums) >= len(extents)
            or os.fstat(self._fd).st_size != self.planned.file_bytes
        ):
            return None
        # A sum cannot be saved half-way: read again what there is of the extent under way.
        self._sum = _sum_of(self._fd, extents[len(sums)].offset, done)
        if self._sum.intdigest() != running:
            return None
        self.sums = sums
        return done

    # --- leaving ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Close; keep the part file where a later attempt can go on from it."""
        # A refusal would only be repeated, and a part without a journal is of no use.
        is_resumable = self.journal.exists() and not isinstance(error, JitllmError)
        if not self._is_finished and not is_resumable:
            self.path.unlink(missing_ok=True)
            self.journal.unlink(missing_ok=True)
        drop_from_page_cache(self._fd)
        os.close(self._fd)  # and with it the lock


def _part_path(dest: Path) -> Path:
    return dest.with_name(dest.name + ".part")


def _journal_path(part: Path) -> Path:
    return part.with_name(part.name + ".resume")


def _open_locked(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        fd = os.open(path, flags, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between opening and locking its owner may have finished and moved it to its place.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except OSError as error:
            os.close(fd)
            if error.errno == errno.EWOULDBLOCK:
                raise JitllmError(f"{path} is being written by another conversion") from error
            raise
        os.close(fd)


def _write_at(fd: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        offset += written
        data = data[written:]


def _sum_of(fd: int, start: int, stop: int) -> Any:
    """The running sum of bytes [start, stop) of the part file."""
    found = xxhash.xxh3_64()
    while start < stop:
        data = os.pread(fd, min(stop - start, 4 << 20), start)
        if not data:
            break
        found.update(data)
        start += len(data)
    drop_from_page_cache(fd)
    return found


def _replace_file(path: Path, data: bytes) -> None:
    """Replace a small file at once, or not at all."""
    draft = path.with_name(path.name + ".new")
    with open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _free_bytes(dest: Path) -> int:
    status = os.statvfs(dest.parent)
    return status.f_bavail * status.f_frsize
