"""What travels between two processes that hold actors: frames, and refs by name.

Knows bytes and pickles. Knows no socket and no runtime. A frame is a kind, the number of the
question that it belongs to (0 for none) and a pickled value. Peers trust each other: they run as
one user, and who is not that user is not let in.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple

from actors.actor import Ref
from jitllm.errors import JitllmError

FindRef = Callable[[str], Ref]
"""The ref of the actor that is called so, as this process reaches it."""

MAX_FRAME_BYTES = 1 << 30

_HEADER = Struct("<IBQ")  # bytes that follow the header, kind, question
_find: ContextVar[FindRef] = ContextVar("find")


class Kind(IntEnum):
    """What a frame says."""

    TELL = 1
    """A message; nothing comes back."""
    ASK = 2
    """A message; exactly one REPLY, FAILURE or NOTHING comes back."""
    FOLLOW = 3
    """A message; any number of PART comes back, then exactly one REPLY, FAILURE or NOTHING."""
    CANCEL = 4
    """Who asked or followed does not wait any more."""
    LOST = 5
    """A message and its reply, which came when nobody waited any more."""
    PING = 6
    """Say PONG."""

    PART = 7
    """The next part of a reply."""
    REPLY = 8
    """The reply; empty when all of it came in parts."""
    FAILURE = 9
    """The handler's error."""
    NOTHING = 10
    """Nobody waited any more: a reply, if there was one, was taken back."""
    PONG = 11
    """I live, and my mailbox moves."""


_KINDS = frozenset(Kind)


class Frame(NamedTuple):
    """A frame as it arrived. The body may not be readable: that concerns one question only."""

    kind: Kind
    question: int
    body: bytes


def peek(data: bytes) -> tuple[Kind, int]:
    """Kind and question of the frame that `data` begins with."""
    _, kind, question = _HEADER.unpack_from(data)
    return Kind(kind), question


def pack(kind: Kind, question: int = 0, body: bytes = b"") -> bytes:
    """A frame as it travels. Raises `JitllmError` when it is too large for that."""
    if len(body) > MAX_FRAME_BYTES:
        raise JitllmError(f"a message of {len(body)} bytes", "ask for less at once")
    return _HEADER.pack(len(body), kind, question) + body


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames that `data` completes. Raises `ValueError` for what is no frame."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                num_bytes, kind, question = _HEADER.unpack_from(self._buffer, start)
                if num_bytes > MAX_FRAME_BYTES or kind not in _KINDS:
                    raise ValueError(f"a frame of kind {kind} and {num_bytes} bytes")
                stop = start + _HEADER.size + num_bytes
                if len(self._buffer) < stop:
                    return
                body = bytes(self._buffer[start + _HEADER.size : stop])
                start = stop
                yield Frame(Kind(kind), question, body)
        finally:
            del self._buffer[:start]


class NamedRef:
    """Base of the refs that travel between processes by their name."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """See `Ref`."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by a hook of the pickler, which would be called for every object of every message.
        return _found, (self.name,)


class Carrier:
    """Pickles values for other processes; refs in them travel by name."""

    def __init__(self, find: FindRef) -> None:
        self._find = find

    def dump(self, value: object) -> bytes:
        """`value` as bytes; raises whatever pickling raises."""
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)

    def load(self, data: bytes) -> Any:
        """The value again; raises whatever it raises when it is made."""
        token = _find.set(self._find)
        try:
            return pickle.loads(data)
        finally:
            _find.reset(token)

    def dump_error(self, error: BaseException) -> bytes:
        """An error as bytes; one that could not travel becomes a `RuntimeError` that names it."""
        if not isinstance(error, JitllmError):
            error.add_note("".join(traceback.format_exception(error)).rstrip())
        try:
            data = self.dump(error)
            self.load(data)
        except Exception as untold:
            told = f"{type(error).__name__} could not travel ({untold}): {error}"
            return self.dump(RuntimeError(told))
        return data


def _found(name: str) -> Ref:
    return _find.get()(name)
