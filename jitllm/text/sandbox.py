"""Chat templates come from strangers: each runs in a process of its own, with bounds.

jinja2's sandbox keeps a template away from this machine, not from its time and memory: loops,
joins and lists that hold each other twice grow without end, and no thread can be stopped in the
middle of that. A process can. Knows no conversation.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from jitllm.errors import JitllmError, UsageError

MAX_SECONDS = 5.0
"""Processor time of one rendering."""

MAX_CHARS = 32 << 20
"""Of a text: more than any context has."""

REMEDY = "convert the model again with another one: -chat-template FILE"

_CHILD = Path(__file__).with_name("sandbox_child.py")


class Sandbox:
    """One template, compiled, and the process that renders it. Several threads may use it.

    Raises `JitllmError` if `source` is no template.
    """

    def __init__(self, source: str, max_seconds: float = MAX_SECONDS) -> None:
        self._source = source
        self._max_seconds = max_seconds
        self._lock = Lock()
        self._child = self._start()

    def render(self, values: Mapping[str, Any]) -> str:
        """The text that the template makes of `values`.

        Raises `UsageError` when the template refuses them, or they are not what JSON can say;
        `JitllmError` when it fails, or takes too much.
        """
        try:
            line = json.dumps(values)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the chat template takes only what JSON can say: {error}") from error
        with self._lock:
            if self._child.has_ended:
                self._child = self._start()
            answer = self._child.ask(line)
        return self._text(answer)

    def _start(self) -> _Child:
        child = _Child()
        about = {"source": self._source, "seconds": self._max_seconds, "chars": MAX_CHARS}
        self._text(child.ask(json.dumps(about)))
        return child

    def _text(self, answer: Mapping[str, str]) -> str:
        match answer:
            case {"text": text}:
                return text
            case {"refused": why}:
                raise UsageError(f"the chat template refuses these messages: {why}")
            case {"wrong": why}:
                raise JitllmError(f"the chat template is wrong {why}", REMEDY)
            case {"failed": why}:
                raise JitllmError(f"the chat template failed: {why}", REMEDY)
            case {"ended": code} if int(code) == -signal.SIGPROF:
                why = f"takes more than {self._max_seconds:g} s"
                raise JitllmError(f"the chat template {why}", REMEDY)
        raise JitllmError(f"the chat template ended its process ({answer})", REMEDY)


class _Child:
    """A process that answers lines; it ends with us, and when nobody holds this any more."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is not for it
        )
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def has_ended(self) -> bool:
        return not self._end.alive or self._process.poll() is not None

    def ask(self, line: str) -> dict[str, str]:
        """The answer to a line; {ended: exit code} when the process has ended instead."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line + "\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if answer.endswith("\n"):
            found: dict[str, str] = json.loads(answer)
            return found
        code = process.wait()
        self._end()
        return {"ended": str(code)}


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # what was not read any more
            pipe.close()  # type: ignore[union-attr]
