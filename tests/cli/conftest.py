"""A command line whose engine is a fake."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jitllm.cli.main import main
from tests.cli.fake import TEMPLATE, FakeEngine, Opener, Stdin, stand_in


@dataclass
class Done:
    """What a command line left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on stdout."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Opener:
    """What opens engines in this test."""
    opener = Opener(FakeEngine(), TEMPLATE)
    monkeypatch.setitem(sys.modules, "jitllm.compose", stand_in(opener))
    monkeypatch.delattr("jitllm.compose", raising=False)
    return opener


@pytest.fixture
def jitllm(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs `jitllm ARGS` in this process."""

    def run(*args: str | Path) -> Done:
        code = main([str(arg) for arg in args])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Stdin:
    """Puts bytes into stdin, which is a terminal or not."""

    def feed(data: bytes, is_terminal: bool = False) -> None:
        stream = io.TextIOWrapper(io.BytesIO(data))
        stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", stream)

    return feed
