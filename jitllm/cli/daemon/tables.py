"""Columns of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jitllm.errors import one_line


def columns(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a line of names above it."""
    lines = [[one_line(str(cell)) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )
