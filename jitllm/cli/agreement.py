"""Whether two devices say the same: their logits, position by position.

Knows rows of numbers. Knows no engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import sub
from typing import Any

from jitllm.units import counted

Row = Sequence[float]

MAX_SHOWN = 5
"""Disagreements that get a line of their own."""
PER_LINE = 8
"""Positions in a line of differences."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A position where the likeliest token is another one.

    reference, device: the token that is likeliest there. reference_margin, device_margin: by how
    much each prefers its own to the other's. is_tie: to the reference they are within the band.
    """

    position: int
    reference: int
    device: int
    reference_margin: float
    device_margin: float
    is_tie: bool

    def __str__(self) -> str:
        return (
            f"position {self.position}: cpu says {self.reference} by {self.reference_margin:.4g}, "
            f"the device {self.device} by {self.device_margin:.4g}"
        )


@dataclass(slots=True)
class Agreement:
    """What a comparison has found so far.

    band: how far a logit may be off; 0 for no limit, and then every flip counts. A flip between two
    tokens that the reference has within the band of each other is a tie.
    """

    band: float = 0.0
    worst: list[float] = field(default_factory=list)
    """The largest difference of a logit, for each position."""
    flips: list[Flip] = field(default_factory=list)
    not_finite: int | None = None
    """The first position with a logit that is no number; nothing is compared from there on."""

    def add(self, position: int, reference: Row, device: Row) -> None:
        """Compare the rows of a position: the next one, or one from before once more."""
        if self.not_finite is not None:
            return
        if not all(map(math.isfinite, chain(reference, device))):
            self.not_finite = position
            return
        off = max(map(abs, map(sub, reference, device)))
        if position < len(self.worst):
            self.worst[position] = max(self.worst[position], off)
        else:
            self.worst.append(off)
        ours, theirs = _likeliest(reference), _likeliest(device)
        if ours != theirs:
            margins = reference[ours] - reference[theirs], device[theirs] - device[ours]
            is_tie = self.band > 0 and margins[0] <= self.band
            self.flips.append(Flip(position, ours, theirs, *margins, is_tie))

    @property
    def disagreements(self) -> list[Flip]:
        """Flips that the band does not explain."""
        return [flip for flip in self.flips if not flip.is_tie]

    @property
    def positions(self) -> set[int]:
        """Those with a disagreement."""
        return {flip.position for flip in self.disagreements}

    @property
    def largest(self) -> float:
        """The largest difference of all."""
        return max(self.worst, default=0.0)

    @property
    def problem(self) -> str:
        """Why this is no agreement; empty where it is one."""
        if self.not_finite is not None:
            return f"a logit of position {self.not_finite} is not a number"
        if self.positions:
            return f"another token is likeliest at {counted(len(self.positions), 'position')}"
        if self.band and self.largest > self.band:
            return f"a logit is off by {self.largest:.4g}, and {self.band:g} is allowed"
        return ""

    def lines(self) -> Iterator[str]:
        """What was found, for people."""
        for flip in self.disagreements[:MAX_SHOWN]:
            yield f"disagreement at {flip}"
        if len(self.disagreements) > MAX_SHOWN:
            yield f"and {len(self.disagreements) - MAX_SHOWN} more"
        if self.worst:
            yield "max |dlogit| by position"
        for start in range(0, len(self.worst), PER_LINE):
            values = self.worst[start : start + PER_LINE]
            yield f"{start:6}  " + " ".join(f"{value:8.2g}" for value in values)
        ties = len(self.flips) - len(self.disagreements)
        yield (
            f"{counted(len(self.worst), 'position')}   disagreements {len(self.disagreements)}   "
            f"ties {ties}   worst |dlogit| {self.largest:.4g}"
        )

    def as_json(self) -> dict[str, Any]:
        """The same, for programs."""
        return {
            "positions": len(self.worst),
            "disagreements": len(self.disagreements),
            "ties": len(self.flips) - len(self.disagreements),
            "worst_dlogit": self.largest,
            "dlogit": self.worst,
            "flips": [
                {
                    "position": flip.position,
                    "reference": flip.reference,
                    "device": flip.device,
                    "reference_margin": flip.reference_margin,
                    "device_margin": flip.device_margin,
                    "is_tie": flip.is_tie,
                }
                for flip in self.flips
            ],
            "problem": self.problem,
        }


def _likeliest(row: Row) -> int:
    """The first of the largest, as a greedy choice takes it."""
    largest = max(row)
    return next(index for index, value in enumerate(row) if value == largest)
