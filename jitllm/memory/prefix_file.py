"""One file of the prefix cache: keys and values of positions in a row, and of which tokens.

A file has the positions [start, stop) of some prompt, in pieces that are cut at multiples of
`PrefixKind.piece_tokens`; a piece lies as `jitllm.memory.history` says, for all blocks in order.
Others can share it up to every GRANULE_TOKENS positions. Where a prompt ends with the file, the
hidden state of its last token follows, so that the output head alone gives the first token of the
reply. It is untrusted: lengths are checked against the file before anything is sized from them,
and no byte is used before its sum was right. Knows bytes. Knows no folder and no device.

    magic, version, bytes of the header, xxh3 of the header    24 bytes
    header (msgpack)
    zeros up to a multiple of 64
    pieces, then the hidden state if there is one
"""

from __future__ import annotations

import os
import stat
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import msgpack
import xxhash

from jitllm.errors import JitllmError
from jitllm.memory.prefix import DIGEST_BYTES, extend

GRANULE_TOKENS = 16
"""Prompts share what they have in common up to a multiple of so many positions."""

PIECE_TOKENS, PIECE_BYTES = 64, 4 << 20
"""Most positions of a piece, a page of the usual size, which is copied in one run; and most bytes
of it that travel at once."""

VERSION = 1
_MAGIC = b"JITLLMKV"
_FRONT = struct.Struct("<8sIIQ")
_ALIGN = 64
_MAX_HEADER_BYTES = 1 << 20


class Damaged(JitllmError):
    """A file that is no file of this cache, or not whole any more."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class PrefixKind:
    """What all files of a model have in common.

    identity: names everything that keys and values depend on besides tokens. kv_bytes: bytes of a
    position, by block. hidden_bytes: of one row of hidden states.
    """

    identity: bytes
    kv_bytes: tuple[int, ...]
    hidden_bytes: int

    @property
    def position_bytes(self) -> int:
        """Keys and values of a position in all blocks."""
        return sum(self.kv_bytes)

    @property
    def piece_tokens(self) -> int:
        """Positions of a piece: a power of two, a granule at the least."""
        size = PIECE_TOKENS
        while size > GRANULE_TOKENS and size * self.position_bytes > PIECE_BYTES:
            size //= 2
        return size

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Half-open ranges of positions that a file of [start, stop) has pieces of."""
        size = self.piece_tokens
        while start < stop:
            end = min(start - start % size + size, stop)
            yield start, end
            start = end

    @property
    def parcel_bytes(self) -> int:
        """Most that a group of blocks has of a piece."""
        whole = self.piece_tokens * self.position_bytes
        return max(min(whole, PIECE_BYTES), GRANULE_TOKENS * max(self.kv_bytes, default=0))

    def groups(
        self, blocks: Sequence[int], num_tokens: int, most: int = PIECE_BYTES
    ) -> list[tuple[int, ...]]:
        """Blocks in order, as many together as `most` bytes hold of so many positions; one group
        at the least, and one block in each."""
        groups: list[tuple[int, ...]] = [()]
        taken = 0
        for block in blocks:
            num_bytes = self.kv_bytes[block] * num_tokens
            if groups[-1] and taken + num_bytes > most:
                groups.append(())
                taken = 0
            groups[-1] += (block,)
            taken += num_bytes
        return groups

    def runs(self, blocks: Iterable[int], num_tokens: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) in a piece of what blocks, in ascending order, have of it; neighbours
        together."""
        before = [0, *accumulate(self.kv_bytes)]
        begin = end = 0
        for block in blocks:
            offset = before[block] * num_tokens
            if offset != end:
                if begin < end:
                    yield begin, end - begin
                begin = offset
            end = before[block + 1] * num_tokens
        if begin < end:
            yield begin, end - begin


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to become a file.

    parent: digest of the tokens before `start`, a multiple of GRANULE_TOKENS; empty at the start.
    tokens: those of its positions. data: of its pieces, one after the other. hidden: the hidden
    state of the last token where a prompt ends, else nothing.
    """

    parent: bytes
    start: int
    tokens: tuple[int, ...]
    data: bytes | bytearray
    hidden: bytes = b""

    @property
    def num_bytes(self) -> int:
        """What waits in memory."""
        return len(self.data) + len(self.hidden)

    def names(self) -> tuple[bytes, ...]:
        """The digests of its granules, and of the prompt that ends with it."""
        digests = granules(self.parent, self.tokens)
        return (*digests, _end(self.parent, self.tokens, digests)) if self.hidden else digests

    @property
    def stop(self) -> int:
        """Position after the last one."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, eq=False)
class PrefixFile:
    """A file that is there. checks: xxh3 of each piece, then of the hidden state if it has one.
    data_offset: where pieces begin."""

    path: Path
    kind: PrefixKind = field(repr=False)
    parent: bytes
    start: int
    tokens: array[int] = field(repr=False)
    has_end: bool
    checks: tuple[int, ...] = field(repr=False)
    data_offset: int

    @property
    def stop(self) -> int:
        """Position after the last one."""
        return self.start + len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        hidden = self.kind.hidden_bytes if self.has_end else 0
        return self.data_offset + len(self.tokens) * self.kind.position_bytes + hidden

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """Of all tokens up to the end of each granule in it."""
        return granules(self.parent, self.tokens)

    def has_at(self, stop: int, digest: bytes) -> bool:
        """Whether the granule that ends at a position has this digest. One that has it elsewhere
        lies about what it builds on."""
        number = (stop - self.start) // GRANULE_TOKENS - 1
        return 0 <= number < len(self.digests) and self.digests[number] == digest

    @cached_property
    def end(self) -> bytes:
        """The digest of all tokens up to its end; see `end_digest`."""
        return _end(self.parent, self.tokens, self.digests)

    def pieces(self) -> tuple[tuple[int, int], ...]:
        """The ranges of positions that it is read in."""
        return tuple(self.kind.pieces(self.start, self.stop))

    def piece_tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at these positions."""
        return tuple(self.tokens[start - self.start : stop - self.start])

    def read(self, number: int) -> bytes:
        """Piece `number`, whole. Raises `Damaged`, `OSError`."""
        start, stop = self.pieces()[number]
        size = self.kind.position_bytes
        offset = self.data_offset + (start - self.start) * size
        return self._checked(offset, (stop - start) * size, number)

    def read_hidden(self) -> bytes:
        """The hidden state at its end. Raises `Damaged`, `OSError`."""
        offset = self.data_offset + len(self.tokens) * self.kind.position_bytes
        return self._checked(offset, self.kind.hidden_bytes, -1)

    def _checked(self, offset: int, num_bytes: int, number: int) -> bytes:
        with _opened(self.path) as (fd, _):
            data = _read(fd, offset, num_bytes, self.path)
        if xxhash.xxh3_64_intdigest(data) != self.checks[number]:
            raise Damaged(self.path, f"the sum of {num_bytes} bytes at {offset} is wrong")
        return data


def granules(parent: bytes, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """The digest of all tokens up to the end of each granule after what `parent` names."""
    digests, digest = [], parent
    for stop in range(GRANULE_TOKENS, len(tokens) + 1, GRANULE_TOKENS):
        digest = extend(digest, tokens[stop - GRANULE_TOKENS : stop])
        digests.append(digest)
    return tuple(digests)


def _end(parent: bytes, tokens: Sequence[int], digests: Sequence[bytes]) -> bytes:
    return end_digest(digests[-1] if digests else parent, tokens[len(digests) * GRANULE_TOKENS :])


def end_digest(last: bytes, tail: Sequence[int]) -> bytes:
    """The name of a whole prompt: its last granule's digest, and the tokens after that."""
    return extend(last + b"end", tail)


def encode(draft: Draft, kind: PrefixKind) -> tuple[bytes, tuple[int, ...]]:
    """The front of a file, up to its pieces, and the sums in it."""
    checks, offset, data = [], 0, memoryview(draft.data)
    for start, stop in kind.pieces(draft.start, draft.stop):
        num_bytes = (stop - start) * kind.position_bytes
        checks.append(xxhash.xxh3_64_intdigest(data[offset : offset + num_bytes]))
        offset += num_bytes
    if offset != len(data):
        raise ValueError(f"{len(data)} bytes for positions that take {offset}")
    if draft.hidden:
        checks.append(xxhash.xxh3_64_intdigest(draft.hidden))
    plain = {
        "identity": kind.identity,
        "parent": draft.parent,
        "start": draft.start,
        "tokens": array("i", draft.tokens).tobytes(),
        "has_end": bool(draft.hidden),
        "checks": checks,
    }
    header = cast("bytes", msgpack.packb(plain))
    sum_ = xxhash.xxh3_64_intdigest(header)
    front = _FRONT.pack(_MAGIC, VERSION, len(header), sum_) + header
    return front + bytes(-len(front) % _ALIGN), tuple(checks)


def decode(path: Path, kind: PrefixKind) -> PrefixFile:
    """A file, from its front. Raises `Damaged`, also for one of another model; `OSError`."""
    with _opened(path) as (fd, file_bytes):
        magic, version, header_bytes, sum_ = _FRONT.unpack(_read(fd, 0, _FRONT.size, path))
        if magic != _MAGIC or version != VERSION:
            raise Damaged(path, "it is no file of this cache, or of another version")
        if header_bytes > min(file_bytes, _MAX_HEADER_BYTES):
            raise Damaged(path, f"a header of {header_bytes} bytes")
        header = _read(fd, _FRONT.size, header_bytes, path)
    if xxhash.xxh3_64_intdigest(header) != sum_:
        raise Damaged(path, "the sum of its header is wrong")
    end = _FRONT.size + header_bytes
    found = _plain(path, kind, header, end + -end % _ALIGN)
    if found.num_bytes != file_bytes:
        raise Damaged(path, f"it has {file_bytes} bytes and should have {found.num_bytes}")
    return found


def _plain(path: Path, kind: PrefixKind, header: bytes, data_offset: int) -> PrefixFile:
    """What a header says. The sum was right; who wrote it may still have meant something else."""
    try:
        plain: dict[str, Any] = msgpack.unpackb(header)
        tokens = array("i")
        tokens.frombytes(plain["tokens"])
        identity, parent, start = plain["identity"], plain["parent"], plain["start"]
        checks, has_end = tuple(plain["checks"]), plain["has_end"]
    except Exception as error:  # whatever a stranger's bytes lead to
        raise Damaged(path, f"its header cannot be read: {error}") from error
    if identity != kind.identity:
        raise Damaged(path, "it is of another model")
    makes_sense = (
        isinstance(start, int)
        and 0 <= start < 2**31
        and start % GRANULE_TOKENS == 0
        and isinstance(parent, bytes)
        and (len(parent) == DIGEST_BYTES or start == len(parent) == 0)
        and isinstance(has_end, bool)
        and all(isinstance(check, int) for check in checks)
    )
    stop = start + len(tokens) if makes_sense else 0
    if not makes_sense or len(tuple(kind.pieces(start, stop))) + has_end != len(checks):
        raise Damaged(path, "its header makes no sense")
    return PrefixFile(path, kind, parent, start, tokens, has_end, checks, data_offset)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """A file to read, and its bytes. Raises `Damaged` for what is no file: nobody waits for what a
    stranger's pipe has to say."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(path, "it is no file")
        yield fd, found.st_size
    finally:
        os.close(fd)


def _read(fd: int, offset: int, num_bytes: int, path: Path) -> bytes:
    """All of it, however little comes at a time. Raises `Damaged` where the file ends before."""
    data = os.pread(fd, num_bytes, offset)
    while len(data) < num_bytes:
        more = os.pread(fd, num_bytes - len(data), offset + len(data))
        if not more:
            raise Damaged(path, f"it ends {num_bytes - len(data)} bytes too early")
        data += more
    return data
