"""The copies of a table, one after the other, row by row."""

from __future__ import annotations

from typing import Any

from jitllm.jit.emit import Kernel, Value, i8, i64, lanes_of
from jitllm.kernels.copy import RECORD_BYTES, RECORD_WORDS

_PIECES = (64, 16, 4, 2, 1)
"""Bytes that are moved at once: as many as fit, then ever fewer. A row is often one or two
elements, or 128 bytes."""


def signature() -> dict[str, Any]:
    """copy(table, num_copies)."""
    return {"params": (i64, i64)}


def emit(k: Kernel) -> None:
    """All copies of a table."""
    table, num_copies = k.params
    with k.loop(0, num_copies) as n:
        record = table + n * RECORD_BYTES
        words = (k.load(record + 8 * word, i64) for word in range(RECORD_WORDS))
        destination, destination_stride, source, source_stride, rows, num_bytes = words
        with k.loop(0, rows) as row:
            into, from_ = destination + row * destination_stride, source + row * source_stride
            _copy_row(k, into, from_, num_bytes)


def _copy_row(k: Kernel, into: Value, from_: Value, num_bytes: Value) -> None:
    start: Value = k.const(0)
    for piece in _PIECES:
        stop = num_bytes & -piece
        with k.loop(start, stop, piece) as at:
            k.store(k.load(from_ + at, lanes_of(i8, piece)), into + at)
        start = stop
