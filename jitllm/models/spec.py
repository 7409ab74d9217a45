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


class QkNorm(StrEnum):
    """What queries and keys are normalised by, if at all."""

    NONE = "-"
    HEAD = "head"
    ROW = "row"
    """All heads of a token together."""


class RouterScore(StrEnum):
    """What makes scores of a router's logits; the names are those of `kernels/route`."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class LocalBlocks:
    """Blocks that see only the last `attention.sliding_window` positions.

    period: every period-th block (the last of each run) is global, unless the file has a pattern.
    rope_base: base of the local blocks' rotary frequencies, unless the file has one; None: as in
    the global blocks. The file's rope scaling is for the global blocks: within a window, no
    position is far away.
    """

    period: int
    rope_base: float | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention.

    rope: pairs that are rotated. qk_norm: how queries and keys are normalised; before they are
    rotated, or after that (norm_after_rope). optional_norm: only where there are tensors for it.
    local: the blocks with a window, if the architecture has any.
    has_temperature: queries grow with the logarithm of their position
    (`attention.temperature_scale`).
    width_scaled: numbers of blocks of released models that divide scores by sqrt(width / heads)
    where all others divide by sqrt(head size); their files have no key that says so.
    """

    rope: RopeStyle
    qk_norm: QkNorm = QkNorm.NONE
    norm_after_rope: bool = False
    optional_norm: bool = False
    local: LocalBlocks | None = None
    has_temperature: bool = False
    width_scaled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A gated feed-forward layer."""

    activation: Activation = Activation.SILU


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: each token's feed-forward layers are chosen by a router.

    How many there are, and which blocks have them, says the file. score, is_normalised (the chosen
    weights are divided by their sum): what holds where the file is silent. A bias on the choice and
    shared experts, which every token goes to, are there when the file has them. shared_gate: what
    these say is multiplied by the sigmoid of a product of its own.
    """

    score: RouterScore = RouterScore.SOFTMAX
    is_normalised: bool = False
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """One architecture: blocks of attention and feed-forward, each normalised before it.

    name: `general.architecture` of its files. experts: in files that count some; None: such files
    are refused. ffn_norm: role of the norm before the feed-forward layer. post_norms: attention and
    feed-forward are also normalised after, before the residual is added. scaled_embedding: hidden
    states start as embeddings times sqrt(width). scaled_by_file: embeddings, what is added to the
    residual, and logits are scaled as the file says (`embedding_scale`, `residual_scale`, and
    `logit_scale`, which divides).
    """

    name: str
    attention: Attention
    feed_forward: FeedForward = FeedForward()
    experts: Experts | None = None
    ffn_norm: str = "ffn_norm"
    post_norms: bool = False
    scaled_embedding: bool = False
    scaled_by_file: bool = False
