"""The prefix cache on disk: files of all models in one folder, and what is in those of one of them.

A file is written beside its place, synced and renamed, and so it is whole or not there, however the
process ends. What was used last stays longest when the files of all models together take too much.
Other processes may use the same folder: a file that is gone, or is another one, is found out when
it is read. `PrefixStore` waits for disks, so it is called from threads; `Catalogue` is memory.
Knows files and digests. Knows no device and no sequence.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from jitllm.memory.prefix_file import (
    GRANULE_TOKENS,
    Damaged,
    Draft,
    PrefixFile,
    PrefixKind,
    decode,
    encode,
)

SUFFIX, UNFINISHED = ".kv", ".part"

_SLACK = 16
"""A part of the limit: where files take too much, so much less than it is left, and once so much
was written, the folder is looked through for what other processes have written to it."""


_FRONT_PART_BYTES = 20
"""What a position takes besides: its id, and its part of the front of a small file."""


@dataclass(frozen=True, slots=True)
class PrefixFolder:
    """Where prefixes of a model are kept: plain values that travel.

    root: for those of all models. max_bytes: most that all of them take; 0 for no bound.
    """

    root: Path
    max_bytes: int
    kind: PrefixKind


@dataclass(frozen=True, slots=True)
class Scan:
    """What was found. num_damaged: files that were none, or not whole; they are gone, if that can
    be. num_gone: whole ones that there is no room for any more. problem: why something could not be
    looked at."""

    files: tuple[PrefixFile, ...] = ()
    num_damaged: int = 0
    num_gone: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Saved:
    """A file is there for good; `gone` had to go for it. file: None where it is larger than all
    files may be together."""

    file: PrefixFile | None
    gone: tuple[Path, ...] = ()


class PrefixStore:
    """The files of one model. Not for two threads at a time, but for `PrefixFile.read`."""

    def __init__(self, folder: PrefixFolder) -> None:
        self.kind = folder.kind
        self.root = folder.root
        self._max_bytes = folder.max_bytes
        self._folder = folder.root / folder.kind.identity.hex()
        self._unsurveyed_bytes = 0
        self.held_bytes = 0
        """What files of all models take, as far as this process knows."""

    @property
    def most_tokens(self) -> int:
        """Positions from the start of a prompt that can be kept: more of it would take the room of
        what it builds on."""
        most = self._max_bytes - self._max_bytes // _SLACK
        return most // (self.kind.position_bytes + _FRONT_PART_BYTES) if most else 1 << 62

    def scan(self) -> Scan:
        """Look at every file. What an earlier process left unfinished goes, and what is beyond the
        room that there is now."""
        files, num_damaged, problem = [], 0, ""
        paths: list[Path] = []
        gone: tuple[Path, ...] = ()
        try:
            for path in self.root.glob(f"*/*{UNFINISHED}"):
                _remove_unfinished(path)
            gone = self._make_room(None)
            paths = sorted(self._folder.glob(f"*{SUFFIX}"))
        except OSError as error:
            problem = f"{self._folder}: {error.strerror}"
        for path in paths:
            try:
                file = decode(path, self.kind)
                _ = file.end  # its digests take a while, and nobody waits here
                files.append(file)
            except Damaged:
                num_damaged += 1
                with suppress(OSError):
                    path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                problem = f"{path}: {error.strerror}"
        return Scan(tuple(files), num_damaged, len(gone), problem)

    def save(self, draft: Draft) -> Saved:
        """Write a file, for good; nothing of it is there before. Raises `OSError`."""
        front, checks = encode(draft, self.kind)
        made = PrefixFile(
            self._folder / "unnamed",
            self.kind,
            draft.parent,
            draft.start,
            array("i", draft.tokens),
            bool(draft.hidden),
            checks,
            len(front),
        )
        if self._max_bytes and made.num_bytes > self._max_bytes:
            return Saved(None)
        kept = "end" if made.has_end else "part"
        path = self._folder / f"{made.end.hex()}-{made.start}-{kept}{SUFFIX}"
        self._write(path, (front, draft.data, draft.hidden))
        self.held_bytes += made.num_bytes
        self._unsurveyed_bytes += made.num_bytes
        gone = self._make_room(path)
        return Saved(replace(made, path=path), gone)

    def _write(self, path: Path, parts: Iterable[bytes | bytearray]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, unfinished = tempfile.mkstemp(suffix=UNFINISHED, dir=self._folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # whoever gets it later knows that the writer has died
            for part in parts:
                _write_all(fd, part)
            os.fsync(fd)
            os.rename(unfinished, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        finally:
            os.close(fd)
        _sync(self._folder)

    def used(self, files: Iterable[PrefixFile]) -> None:
        """Those were of use, the first one most: it is what the others build on."""
        for file in reversed(tuple(files)):
            with suppress(OSError):  # a folder that is only read keeps its order
                os.utime(file.path)

    def remove(self, file: PrefixFile) -> None:
        """Delete a file that turned out to be damaged."""
        with suppress(OSError):
            file.path.unlink()
            self.held_bytes -= file.num_bytes

    def _make_room(self, newest: Path | None) -> tuple[Path, ...]:
        """Delete what was used least recently until all files take no more than they may.

        newest: was written just now, and stays whatever the clock says; None: nothing is known yet.
        """
        most, slack = self._max_bytes, self._max_bytes // _SLACK
        is_known = self.held_bytes <= most and self._unsurveyed_bytes <= slack
        if newest is not None and (not most or is_known):
            return ()
        found = sorted(self._survey())
        self.held_bytes, self._unsurveyed_bytes = sum(size for _, size, _ in found), 0
        if not most or self.held_bytes <= most:
            return ()
        gone: list[Path] = []
        for _, size, path in found:
            if self.held_bytes <= most - slack:
                break
            if path == newest:
                continue
            with suppress(OSError):
                path.unlink(missing_ok=True)
                self.held_bytes -= size
                gone.append(path)
        return tuple(gone)

    def _survey(self) -> Iterator[tuple[int, int, Path]]:
        """(last use in ns, bytes, path) of the files of all models."""
        for path in self.root.glob(f"*/*{SUFFIX}"):
            with suppress(OSError):  # gone meanwhile, say
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    yield found.st_mtime_ns, found.st_size, path


@dataclass(frozen=True, slots=True)
class Stretch:
    """Positions [start, stop) of a prompt, to be had from a file."""

    file: PrefixFile
    start: int
    stop: int


class Catalogue:
    """Which prefixes are in which file."""

    def __init__(self) -> None:
        self._files: dict[Path, PrefixFile] = {}
        self._granules: dict[bytes, PrefixFile] = {}
        self._ends: dict[bytes, PrefixFile] = {}

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, digest: object) -> bool:
        return digest in self._granules

    def add(self, file: PrefixFile) -> None:
        """A file is there."""
        self.drop(file.path)
        self._files[file.path] = file
        self._granules |= dict.fromkeys(file.digests, file)
        if file.has_end:
            self._ends[file.end] = file

    def drop(self, path: Path) -> None:
        """A file is not there any more, or is of no use."""
        if (file := self._files.pop(path, None)) is None:
            return
        for digest in file.digests:
            if self._granules.get(digest) is file:
                del self._granules[digest]
        if file.has_end and self._ends.get(file.end) is file:
            del self._ends[file.end]

    def end(self, digest: bytes) -> PrefixFile | None:
        """The file that a whole prompt ends with."""
        return self._ends.get(digest)

    def find(self, digests: Sequence[bytes], start: int) -> list[Stretch]:
        """What follows the first `start` positions of a prompt, as far as there is all of it.

        digests: of the prompt, one for each granule.
        """
        found: list[Stretch] = []
        for number in range(start // GRANULE_TOKENS, len(digests)):
            file, stop = self._granules.get(digests[number]), (number + 1) * GRANULE_TOKENS
            if file is None or not file.has_at(stop, digests[number]):
                break
            if found and found[-1].file is file:
                found[-1] = Stretch(file, found[-1].start, stop)
            else:
                found.append(Stretch(file, max(stop - GRANULE_TOKENS, start), stop))
        return found


def _write_all(fd: int, data: bytes | bytearray) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _sync(folder: Path) -> None:
    """Have a rename last."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_unfinished(path: Path) -> None:
    """Delete what nobody writes any more."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(fd)
