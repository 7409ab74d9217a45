"""Every way in which jitllm refuses, and what each refusal tells the user to do next.

Knows messages and exit codes. Knows nothing that raises them. A message is one line: what comes
from files is made printable, so that a hostile name cannot write to a terminal. Errors survive
pickling with all their fields, because they travel between actors.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from os import PathLike, fspath
from typing import Any, ClassVar

AnyPath = str | PathLike[str]


class JitllmError(Exception):
    """A refusal: what went wrong, and the remedy if there is one."""

    exit_code: ClassVar[int] = 1

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.problem}; {self.remedy}" if self.remedy else self.problem
        return one_line(text)

    def __reduce__(self) -> tuple[Callable[..., JitllmError], tuple[Any, ...]]:
        return _restore, (type(self), self.__dict__)


class UsageError(JitllmError):
    """The command line or a setting cannot mean anything."""

    exit_code = 2


class BadContainer(JitllmError):
    """A .jlm file is damaged, or no .jlm file at all."""

    def __init__(
        self, path: AnyPath, problem: str, remedy: str = "convert its source again"
    ) -> None:
        super().__init__(f"{fspath(path)}: {problem}", remedy)
        self.path = fspath(path)


class BadSource(JitllmError):
    """A model file that should be converted is damaged or incomplete."""

    def __init__(self, path: AnyPath, problem: str, remedy: str = "") -> None:
        super().__init__(f"{fspath(path)}: {problem}", remedy)
        self.path = fspath(path)


class UnsupportedModel(JitllmError):
    """A sound file asks for something that this program lacks: an architecture, a weight type."""

    def __init__(self, kind: str, name: str, supported: Iterable[str]) -> None:
        known = ", ".join(supported)
        super().__init__(f"{kind} {shown(name)} is not supported", f"supported: {known}")
        self.kind = kind
        self.name = name


class NotConverted(JitllmError):
    """A model that must be converted first; `command` is the line that does it."""

    def __init__(self, path: AnyPath, found: str, command: str | None = None) -> None:
        self.path = fspath(path)
        self.command = command or convert_command(self.path)
        super().__init__(f"{self.path} is {found}", f"convert it: {self.command}")


class ContextOverflow(JitllmError):
    """A prompt does not fit into the context."""

    def __init__(self, num_tokens: int, ctx_tokens: int) -> None:
        from jitllm.units import counted  # it lies above this module

        super().__init__(
            f"the prompt has {counted(num_tokens, 'token')} and the context holds {ctx_tokens}",
            "shorten the prompt or raise -ctx",
        )
        self.num_tokens = num_tokens
        self.ctx_tokens = ctx_tokens


class QueueFull(JitllmError):
    """As many requests wait as may wait; nothing was taken in."""

    def __init__(self, max_queue: int, retry_after_s: float = 1.0) -> None:
        from jitllm.units import counted  # it lies above this module

        super().__init__(
            f"the queue is full ({counted(max_queue, 'request')})",
            f"try again in {retry_after_s:g} s",
        )
        self.max_queue = max_queue
        self.retry_after_s = retry_after_s


class Draining(JitllmError):
    """A model takes no more requests; those under way end."""

    def __init__(self) -> None:
        super().__init__("the model is draining and takes no more requests", "ask another one")


class PageError(JitllmError):
    """Paging in failed: a short read, an I/O error or a wrong checksum.

    rows: of the step that need what could not be read; empty where all of them do.
    """

    def __init__(
        self, path: AnyPath, offset: int, problem: str, rows: tuple[int, ...] = ()
    ) -> None:
        super().__init__(
            f"{fspath(path)} at byte {offset}: {problem}",
            "check the file: " + shlex.join(["jitllm", "info", "-check", fspath(path)]),
        )
        self.path = fspath(path)
        self.offset = offset
        self.rows = rows


class OverBudget(JitllmError):
    """Something needs more memory than its budget allows."""

    def __init__(
        self,
        what: str,
        needed_bytes: int,
        budget_bytes: int,
        remedy: str = "raise -maxmem or lower -ctx",
    ) -> None:
        super().__init__(
            f"{what} needs {_size(needed_bytes)} and the budget leaves {_size(budget_bytes)}",
            remedy,
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class OutOfPages(OverBudget):
    """A device has no memory for the next positions of a sequence; nothing was computed.

    device: the name of its actor. num_tokens: how many positions the sequence would have had.
    """

    def __init__(
        self,
        device: str,
        sequence: int,
        num_tokens: int,
        what: str,
        needed_bytes: int,
        room_bytes: int,
        remedy: str,
    ) -> None:
        super().__init__(what, needed_bytes, room_bytes, f"{remedy} or lower -ctx")
        self.device = device
        self.sequence = sequence
        self.num_tokens = num_tokens


class HistoryError(JitllmError):
    """Keys and values beyond a budget cannot be read or written; the step was not computed.

    sequences: those that cannot go on with what they have. is_lost: what is there cannot be read,
    so it has to be computed again. cause: what the store says, which this says too.
    """

    def __init__(self, sequences: tuple[int, ...], cause: JitllmError, *, is_lost: bool) -> None:
        super().__init__(cause.problem, cause.remedy)
        self.sequences = sequences
        self.is_lost = is_lost


class PlacementError(JitllmError):
    """Blocks cannot go where they should: a pin, or a block or device that there is not."""


class UnknownSession(JitllmError):
    """No request of that name is under way."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no request {shown(name, 200)} under way")
        self.name = name


class DiskFull(JitllmError):
    """A file does not fit on its disk; what stood there before is intact."""

    def __init__(self, path: AnyPath, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"{fspath(path)} needs {_size(needed_bytes)} and its disk has {_size(free_bytes)} free",
            "free some space or write to another disk",
        )
        self.path = fspath(path)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


def convert_command(source: AnyPath, output: AnyPath | None = None) -> str:
    """The command that converts `source`, ready to be pasted into a shell."""
    paths = (source,) if output is None else (source, output)
    return shlex.join(["jitllm", "convert", *(fspath(path) for path in paths)])


def one_line(text: str) -> str:
    """`text` with every character that is not printable written as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: object, most: int = 60) -> str:
    """`value` as a message quotes what comes from a file: `most` characters at the most."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _size(num_bytes: int) -> str:
    from jitllm.units import format_size  # it raises UsageError, so it lies above this module

    return format_size(num_bytes)


def _restore(cls: type[JitllmError], fields: dict[str, Any]) -> JitllmError:
    error = cls.__new__(cls)
    error.__dict__.update(fields)
    return error
