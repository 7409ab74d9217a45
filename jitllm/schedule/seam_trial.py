"""Whether a model would be faster with fewer of its blocks on a GPU: trials and their verdicts.

A seam is a number of blocks that stay on the device. Each one is tried against the one before it in
runs of steps, in the order ABBA, so that what drifts meanwhile drifts for both. Knows counts and
ratios. Reads no clock, and moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

SKIP_STEPS = 8
"""After a move, before steps count."""

RUN_STEPS = 24
"""Steps of a run, whose median counts."""

NUM_QUADS = 3
"""ABBA runs of a trial, each of which gives two ratios."""

LEAST_GAIN = 1.05
MOST_SPREAD = 0.10


@dataclass(frozen=True, slots=True)
class SeamTrial:
    """What one seam came to against another one.

    num_blocks, num_before: blocks on the device, now and with what it is compared to. gain: how
    many times as fast, the median of all ratios. spread: their interquartile range as a part of it.
    """

    device: str
    num_blocks: int
    num_before: int
    gain: float
    spread: float

    @property
    def is_adopted(self) -> bool:
        """Whether it is faster by more than a little, and surely so."""
        return self.gain > LEAST_GAIN and self.spread <= MOST_SPREAD

    def __str__(self) -> str:
        verdict = "it stays so" if self.is_adopted else f"{self.num_before} stay there"
        return (
            f"{self.num_blocks} blocks on {self.device} instead of {self.num_before}: "
            f"{self.gain:.2f} times as fast, within {self.spread:.0%}; {verdict}"
        )


def seams(num_blocks: int) -> tuple[int, ...]:
    """What is tried, each against the one before: all, a half, a quarter, none."""
    return tuple(dict.fromkeys((num_blocks, num_blocks // 2, num_blocks // 4, 0)))


def judge(device: str, num_blocks: int, num_before: int, ratios: Sequence[float]) -> SeamTrial:
    """The verdict on ratios, two at the least, of a step before to a step now."""
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return SeamTrial(device, num_blocks, num_before, middle, (high - low) / middle)
