"""The numbers of a model, taken from its file's keys and checked one by one.

Knows keys, ranges and defaults. Knows no architecture and no tensors. Files are untrusted: what
leaves this module is of the right type, finite and bounded, so that whoever sizes something from
it needs no checks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitllm.errors import shown
from jitllm.models.expert_numbers import ExpertNumbers
from jitllm.models.keys import BadModel, Config, Keys, at_least
from jitllm.models.rope import Scaling, ScalingKind
from jitllm.units import counted

__all__ = ["BadModel", "Config", "ExpertNumbers", "Hparams", "Temperature"]

MAX_POSITIONS = 2**24
"""Rotary angles are exact up to here (`kernels/rope_table`)."""

MAX_BLOCKS = 4096
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_WIDTH = 2**20


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries at position p are multiplied by 1 + scale * log(1 + p // period)."""

    scale: float
    period: int


@dataclass(frozen=True, slots=True)
class Hparams:
    """The numbers of one file.

    Sizes in elements: width of the hidden state, ffn_width, k_dim and v_dim of a head, num_rotated
    elements of a head that are rotated. window: positions that a local block sees, 0 for no local
    blocks. local_pattern: a period, or which blocks are local, or None where the file is silent.
    attention_scale: multiplies scores, None where the file is silent. temperature, experts: None
    where the file has none. embedding_scale, residual_scale, logit_scale: 1 where it is silent.
    """

    context_length: int
    num_blocks: int
    width: int
    ffn_width: int
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    eps: float
    rope_base: float
    num_rotated: int
    scaling: Scaling
    local_rope_base: float | None
    window: int
    local_pattern: int | tuple[bool, ...] | None
    attention_scale: float | None
    temperature: Temperature | None
    experts: ExpertNumbers | None
    embedding_scale: float
    residual_scale: float
    logit_scale: float

    @staticmethod
    def read(config: Config) -> Hparams:
        """The numbers in `config`: keys without the architecture's prefix. Raises BadModel."""
        keys = Keys(config)
        keys.refuse_nonzero("attn_logit_softcapping", "final_logit_softcapping")
        context_length = keys.count("context_length", MAX_POSITIONS)
        num_blocks = keys.count("block_count", MAX_BLOCKS)
        width = keys.count("embedding_length", MAX_WIDTH)
        heads = keys.count("attention.head_count", MAX_HEADS)
        kv_heads = keys.count("attention.head_count_kv", MAX_HEADS, default=heads)
        if heads % kv_heads:
            raise BadModel(f"attention.head_count {heads} is no multiple of {kv_heads} KV heads")
        head_dim = width // heads if width % heads == 0 else None
        k_dim = keys.count("attention.key_length", MAX_HEAD_DIM, default=head_dim)
        scaling = _scaling(keys, context_length)
        ffn_width = keys.count("feed_forward_length", MAX_WIDTH)
        return Hparams(
            context_length=context_length,
            num_blocks=num_blocks,
            width=width,
            ffn_width=ffn_width,
            heads=heads,
            kv_heads=kv_heads,
            k_dim=k_dim,
            v_dim=keys.count("attention.value_length", MAX_HEAD_DIM, default=head_dim),
            eps=keys.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
            rope_base=keys.number("rope.freq_base", _ABOVE_ONE, _MAX_BASE, default=10_000.0),
            num_rotated=_num_rotated(keys, k_dim),
            scaling=scaling,
            local_rope_base=keys.optional("rope.freq_base_swa", _ABOVE_ONE, _MAX_BASE),
            window=keys.count("attention.sliding_window", 2**31 - 1, default=0, least=0),
            local_pattern=_local_pattern(keys, num_blocks),
            attention_scale=keys.optional("attention.scale", 0.0, 1e3) or None,
            temperature=_temperature(keys, context_length, scaling.original_context),
            experts=ExpertNumbers.read(keys, num_blocks, ffn_width),
            embedding_scale=keys.scale("embedding_scale"),
            residual_scale=keys.scale("residual_scale"),
            logit_scale=keys.scale("logit_scale"),
        )


_ABOVE_ONE = 1.0 + 1e-6
_MAX_BASE = 1e30
_MAX_LEVELS = 2**16


def _num_rotated(keys: Keys, k_dim: int) -> int:
    """`rope.dimension_count`: even, and no more than a head has."""
    key = "rope.dimension_count"
    num_rotated = keys.count(key, k_dim, default=k_dim)
    if num_rotated % 2:
        raise BadModel(f"{key} is {num_rotated}, an odd number")
    return num_rotated


def _scaling(keys: Keys, context_length: int) -> Scaling:
    """`rope.scaling.*`; a factor without a type is linear, as in files from before there were
    types."""
    kind = keys.word("rope.scaling.type", ScalingKind.LINEAR)
    if kind not in set(ScalingKind):
        known = ", ".join(ScalingKind)
        raise BadModel(f"rope.scaling.type {shown(kind)} is not supported (supported: {known})")
    factor = keys.number("rope.scaling.factor", 0.0, 1e6, default=0.0)
    if not factor:
        factor = keys.number("rope.scale_linear", 0.0, 1e6, default=0.0) or 1.0
    return Scaling(
        kind=ScalingKind(kind),
        factor=at_least(factor, 1e-6, "rope.scaling.factor"),
        original_context=keys.count(
            "rope.scaling.original_context_length", MAX_POSITIONS, default=context_length
        ),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 1e-6, 1e6, default=32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1e-6, 1e6, default=1.0),
        attention_factor=keys.number("rope.scaling.attn_factor", 1e-3, 1e3, default=1.0),
        log_multiplier=keys.number("rope.scaling.yarn_log_multiplier", 0.0, 1e3, default=0.0),
    )


def _local_pattern(keys: Keys, num_blocks: int) -> int | tuple[bool, ...] | None:
    """`attention.sliding_window_pattern`: a period, or for each block whether it is local."""
    key = "attention.sliding_window_pattern"
    value = keys.config.get(key)
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != num_blocks:
            raise BadModel(
                f"{key} has {counted(len(value), 'entry')} for {counted(num_blocks, 'block')}"
            )
        return tuple(bool(item) for item in value)
    return keys.count(key, 2**31 - 1, least=0)


def _temperature(keys: Keys, context_length: int, period: int) -> Temperature | None:
    """`attention.temperature_scale`, with as many steps as the context has periods."""
    key = "attention.temperature_scale"
    scale = keys.number(key, 0.0, 1e3, default=0.0)
    if not scale:
        return None
    if context_length // period >= _MAX_LEVELS:
        raise BadModel(
            f"{key} with rope.scaling.original_context_length {period} has too many steps"
        )
    return Temperature(scale, period)
