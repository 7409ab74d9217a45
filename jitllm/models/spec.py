"""The axes on which architectures differ, as data: a row in `models/arch/` is one `Spec`.

Knows choices. Knows no numbers (`hparams.py` takes those from the file), no wiring (`build.py`)
and no architecture. What a tensor table says by itself is no axis: a bias is added where there
is one, the head is tied to the embedding where there is no `output`, and rotary frequencies are
divided by the factors of `rope_freqs` where that is present.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RopeStyle(StrEnum):
    """Which two elements of a head are rotated as a pair."""

    INTERLEAVED = "interleaved"
    """Elements 2i and 2i + 1."""

    HALVES = "halves"
    """Elements i and i + n/2."""


class Activation(StrEnum):
    """What gates a feed-forward layer; the names are those of `kernels/glu`."""

    SILU = "silu"
    GELU = "gelu"


@dataclass(frozen=True, slots=True)
class LocalBlocks:
    """Blocks that see only the last `attention.sliding_window` positions.

    period: every period-th block (the last of each run) is global, unless the file has a pattern.
    rope_base: base of the local blocks' rotary frequencies, unless the file has one. The file's
    rope scaling is for the global blocks: within a window, no position is far away.
    """

    period: int
    rope_base: float


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention.

    rope: pairs that are rotated. head_norm: queries and keys are normalised head by head before
    they are rotated. local: the blocks with a window, if the architecture has any.
    has_temperature: queries grow with the logarithm of their position
    (`attention.temperature_scale`).
    width_scaled: numbers of blocks of released models that divide scores by sqrt(width / heads)
    where all others divide by sqrt(head size); their files have no key that says so.
    """

    rope: RopeStyle
    head_norm: bool = False
    local: LocalBlocks | None = None
    has_temperature: bool = False
    width_scaled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A gated feed-forward layer."""

    activation: Activation = Activation.SILU


@dataclass(frozen=True, slots=True)
class Spec:
    """One architecture: blocks of attention and feed-forward, each normalised before it.

    name: `general.architecture` of its files. post_norms: attention and feed-forward are also
    normalised after, before the residual is added. scaled_embedding: hidden states start as
    embeddings times sqrt(width).
    """

    name: str
    attention: Attention
    feed_forward: FeedForward = FeedForward()
    post_norms: bool = False
    scaled_embedding: bool = False
