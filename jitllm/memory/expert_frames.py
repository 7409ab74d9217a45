"""Where experts that come one by one lie: in which of the places of their block.

Knows blocks, experts and numbers of places. Knows no addresses and no order of use. A block has as
many places as experts, and memory only in those that are taken. A place that one expert leaves to
another keeps its memory: to give it back and fault it in anew costs more than the read itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jitllm.memory.experts import Expert


class ExpertFrames:
    """The places of experts that are there or on their way.

    counts: experts of each block. release: gives the memory of a place of a block back.
    """

    def __init__(self, counts: Mapping[int, int], release: Callable[[int, int], None]) -> None:
        self._release = release
        self._free = {block: list(range(count)) for block, count in counts.items()}
        self._places: dict[Expert, int] = {}

    def place(self, expert: Expert) -> int:
        """Where an expert lies that has a place."""
        return self._places[expert]

    def take(self, expert: Expert, victims: Iterable[Expert]) -> int:
        """A place for an expert that has none, where possible that of a victim.

        victims: experts that go for it; the memory of those whose place it does not take goes.
        """
        found = None
        for victim in victims:
            if found is None and victim.block == expert.block:
                found = self._places.pop(victim)
            else:
                self.drop(victim)
        self._places[expert] = self._free[expert.block].pop() if found is None else found
        return self._places[expert]

    def drop(self, expert: Expert) -> None:
        """An expert goes, and the memory of its place."""
        place = self._places.pop(expert)
        self._release(expert.block, place)
        self._free[expert.block].append(place)
