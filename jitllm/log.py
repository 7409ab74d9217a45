"""One tree of loggers, silent until a program turns it on.

Knows the standard `logging`. Knows no message. A library must not write to the terminal of the
program that uses it; the command line calls `to_stderr`.
"""

import logging
import os
import sys
from typing import TextIO

ROOT = "jitllm"
LEVEL_VARIABLE = "JITLLM_LOG"

logging.getLogger(ROOT).addHandler(logging.NullHandler())


def logger(name: str) -> logging.Logger:
    """The logger of module `name`; every one hangs below `jitllm`, those of `actors` too."""
    return logging.getLogger(name if name.split(".")[0] == ROOT else f"{ROOT}.{name}")


def to_stderr(level: str | None = None) -> None:
    """Send records of `level` and above to stderr; by default $JITLLM_LOG, else warnings."""
    name = (level or os.environ.get(LEVEL_VARIABLE) or "warning").upper()
    root = logging.getLogger(ROOT)
    root.setLevel(logging.getLevelNamesMapping().get(name, logging.WARNING))
    if not any(isinstance(handler, _StderrHandler) for handler in root.handlers):
        root.addHandler(_StderrHandler())


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is at that moment, so that redirection works."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
