"""Rotary frequencies under every kind of scaling, computed once, at load.

Knows angles. Knows no heads and no architecture. Follows llama.cpp: linear scaling divides every
frequency; YaRN leaves the fast ones alone, divides the slow ones, blends those between, and
stretches cosines and sines by a factor that grows with the logarithm of the scaling.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class ScalingKind(StrEnum):
    """`rope.scaling.type` of a file."""

    NONE = "none"
    LINEAR = "linear"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the positions of a longer context are squeezed into the trained range.

    factor: how much longer. original_context: positions of the trained range (YaRN). beta_fast,
    beta_slow: turns within `original_context` above which a frequency stays as it is, and below
    which it is divided. attention_factor: stretches cosines and sines, beyond what YaRN does by
    itself. log_multiplier: share of YaRN's own stretch that the model was trained without; 0: none.
    """

    kind: ScalingKind = ScalingKind.NONE
    factor: float = 1.0
    original_context: int = 1
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    log_multiplier: float = 0.0


@dataclass(frozen=True, slots=True)
class Frequencies:
    """radians: angle per position of each rotated pair. scale: of their cosines and sines."""

    radians: tuple[float, ...]
    scale: float

    def pack(self) -> bytes:
        """`radians` as f64, the constant of `kernels/rope_table`."""
        return struct.pack(f"<{len(self.radians)}d", *self.radians)


def frequencies(
    base: float, num_rotated: int, scaling: Scaling, factors: Sequence[float] | None = None
) -> Frequencies:
    """Frequencies of the `num_rotated` / 2 pairs of a head.

    base: of the geometric series, above 1. factors: divisors of the unscaled frequencies, one a
    pair (`rope_freqs`).
    """
    plain = [base ** (-2.0 * i / num_rotated) for i in range(num_rotated // 2)]
    if factors is not None:
        plain = [f / factor for f, factor in zip(plain, factors, strict=True)]
    match scaling.kind:
        case ScalingKind.NONE:
            return Frequencies(tuple(plain), scaling.attention_factor)
        case ScalingKind.LINEAR:
            divided = tuple(f / scaling.factor for f in plain)
            return Frequencies(divided, scaling.attention_factor)
        case ScalingKind.YARN:
            kept = _kept(base, num_rotated, scaling)
            blended = tuple(
                f * (share + (1.0 - share) / scaling.factor)
                for f, share in zip(plain, kept, strict=True)
            )
            return Frequencies(blended, _stretch(scaling) * scaling.attention_factor)


def _kept(base: float, num_rotated: int, scaling: Scaling) -> list[float]:
    """Share of each pair's frequency that YaRN leaves undivided: a ramp from 1 to 0."""

    def pair_that_turns(turns: float) -> float:
        span = scaling.original_context / (turns * 2.0 * math.pi)
        return num_rotated * math.log(span) / (2.0 * math.log(base))

    low = max(0.0, math.floor(pair_that_turns(scaling.beta_fast)))
    high = min(num_rotated - 1.0, math.ceil(pair_that_turns(scaling.beta_slow)))
    width = max(0.001, high - low)
    ramp = (min(1.0, max(0.0, (i - low) / width)) for i in range(num_rotated // 2))
    return [1.0 - share for share in ramp]


def _stretch(scaling: Scaling) -> float:
    """Factor of YaRN's cosines and sines; queries and keys both get it."""
    if scaling.factor <= 1.0:
        return 1.0
    growth = 0.1 * math.log(scaling.factor)
    return (1.0 + growth) / (1.0 + scaling.log_multiplier * growth)
