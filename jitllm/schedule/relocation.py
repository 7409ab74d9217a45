"""How far the history of each sequence has been copied to where its blocks go.

Knows sequences, positions and bytes. Knows no device and no clock; nothing here waits. History is
copied in rounds while replies go on, up to a watermark for each sequence; what they compute
meanwhile is the next round's, and the last round is short whatever the length of the history.
Pieces are named by sequence and positions, never by pages, whose numbers are used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Range(NamedTuple):
    """Positions `[start, stop)` of a sequence."""

    sequence: int
    start: int
    stop: int

    @property
    def num_positions(self) -> int:
        """How many they are."""
        return self.stop - self.start


class Watermarks:
    """What is there of each sequence at the destination of one move.

    position_bytes: what a position takes in all blocks that move. parcel_bytes: most that travels
    at once; a single position always does.
    """

    def __init__(self, position_bytes: int, parcel_bytes: int) -> None:
        self.position_bytes = position_bytes
        self._parcel_positions = max(parcel_bytes // max(position_bytes, 1), 1)
        self._marks: dict[int, int] = {}
        self._falls: dict[int, int] = {}  # how far down, since pieces were named

    def begin(self, sequence: int, position: int) -> None:
        """Positions below `position` are there."""
        self._marks[sequence] = position

    def lag(self, computed: Mapping[int, int]) -> int:
        """Positions still to be copied. computed: of each sequence that runs, how many it has.

        A sequence that fell back (it is computed again from an earlier position) has lost its
        mark above that, and one that runs no more is forgotten.
        """
        self._marks = {
            sequence: min(mark, computed[sequence])
            for sequence, mark in self._marks.items()
            if sequence in computed
        }
        return sum(num - self._marks.get(sequence, 0) for sequence, num in computed.items())

    def fell_back(self, sequence: int, position: int) -> None:
        """A sequence is computed again from `position` on: what is there above that, or on its
        way, is not its history any more."""
        self._marks[sequence] = min(self._marks.get(sequence, 0), position)
        self._falls[sequence] = min(self._falls.get(sequence, position), position)

    def next(self, computed: Mapping[int, int]) -> tuple[Range, ...]:
        """What should travel now, the sequence that lags most first; nothing when all is there.

        Pieces that were named before have arrived, or are named again.
        """
        self.lag(computed)
        self._falls.clear()
        behind = sorted(
            (self._marks.get(sequence, 0) - num, sequence) for sequence, num in computed.items()
        )
        room = self._parcel_positions
        chosen = []
        for lag, sequence in behind:
            count = min(-lag, room)
            if count <= 0:
                break
            start = self._marks.get(sequence, 0)
            chosen.append(Range(sequence, start, start + count))
            room -= count
        return tuple(chosen)

    def arrived(self, piece: Range) -> None:
        """A piece is there. What a fall back or a duplicate made meaningless changes nothing."""
        mark = self._marks.get(piece.sequence, 0)
        stop = min(piece.stop, self._falls.get(piece.sequence, piece.stop))
        if piece.start <= mark:
            self._marks[piece.sequence] = max(mark, stop)
