"""Which ops must wait for the ones before them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jitllm.kernels.op import Op


def ordered(ops: Iterable[Op]) -> Iterator[tuple[Op, bool]]:
    """Each op, and whether it depends on one since the last that did: it reads or writes what one
    of them wrote, or writes what one of them reads. The first of a run always does."""
    read: set[str] = set()
    written: set[str] = set()
    for index, op in enumerate(ops):
        reads = {b.name for b in op.reads}
        writes = {b.name for b in op.writes}
        depends = index == 0 or bool(reads & written or writes & (read | written))
        if depends:
            read, written = set(), set()
        read |= reads
        written |= writes
        yield op, depends
