"""What goes to the terminal: text and JSON on stdout, lines about it on stderr.

Knows streams. Knows no model.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any


def say(text: str) -> None:
    """Text on stdout, visible at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(line: str) -> None:
    """A line on stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(report: Mapping[str, Any]) -> None:
    """One JSON object on stdout; a number that JSON lacks is null."""
    say(json.dumps(_plain(report), allow_nan=False) + "\n")


def table(rows: Mapping[str, str]) -> str:
    """Names and values, aligned."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows.items())


def leave_the_pipe() -> None:
    """Nobody reads any more: what is left in the buffers goes nowhere, silently."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value
