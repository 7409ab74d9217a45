"""How attention gets to see pages that are not in memory: in passes, some of them in each.

A pass is a launch over a range of every row's keys (`jitllm.kernels.attention`). Whatever is in
memory needs no pass of its own: it is taken with what comes before it or after it. Knows numbers of
sets and positions. Knows no memory and no file.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from jitllm.kernels.attention import CHUNK_KEYS
from jitllm.kernels.op import ALL_KEYS

NO_KEYS = (0, 0)


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence in a step: its page sets in order, and the first position that is computed."""

    sets: Sequence[int]
    start: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one pass looks at: the sets that have to come for it, and the keys of each row."""

    sets: frozenset[int]
    ranges: tuple[tuple[int, int], ...]


def stretches(
    rows: Sequence[Row],
    absent: Container[int],
    *,
    window: int,
    page_tokens: int,
    max_sets: int,
) -> list[Stretch]:
    """The passes of one block; a single one where no absent set is looked at.

    absent: sets that are not in memory. window: of the block, 0 for all keys. max_sets: most sets
    that come for a pass, unless one chunk of keys needs more.
    """
    unit = max(page_tokens, CHUNK_KEYS)  # a chunk of keys is not divided
    wanted: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        first = max(row.start + 1 - window, 0) // page_tokens if window else 0
        stop = -(-row.start // page_tokens)
        for position, page_set in enumerate(row.sets[first:stop], first):
            if page_set in absent:
                at = position * page_tokens // unit
                wanted.setdefault((at, index), []).append(page_set)

    found: list[Stretch] = []
    seen = [0] * len(rows)
    coming: frozenset[int] = frozenset()
    stops: dict[int, int] = {}

    def look() -> None:
        ranges = tuple(
            (seen[index], stops[index]) if index in stops else NO_KEYS for index in range(len(rows))
        )
        found.append(Stretch(coming, ranges))
        for index, stop in stops.items():
            seen[index] = stop

    # Rows that share a set stand side by side, so that it comes once for all of them.
    for (at, index), sets in sorted(wanted.items(), key=lambda entry: (entry[0][0], entry[1])):
        if stops and len(coming.union(sets)) > max_sets:
            look()
            coming, stops = frozenset(), {}
        coming = coming.union(sets)
        stops[index] = (at + 1) * unit
    if stops:
        look()
    found.append(Stretch(frozenset(), tuple((start, ALL_KEYS[1]) for start in seen)))
    return found
