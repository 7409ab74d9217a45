"""Wires a spec, its numbers and its tensors to a graph: the only wiring there is.

Knows which op follows which (of a mixture of experts, `mixture.py` does). Knows no architecture by
name, no device and no bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jitllm.kernels.attention import Attention
from jitllm.kernels.embed import Embed
from jitllm.kernels.gather import Gather
from jitllm.kernels.glu import Glu
from jitllm.kernels.kv_write import KvWrite
from jitllm.kernels.op import Buffer, Const, Op, Rows, Weight
from jitllm.kernels.rope import Rope
from jitllm.kernels.rope_table import RopeTable
from jitllm.models.graph import Graph, KvShape
from jitllm.models.hparams import BadModel, Hparams
from jitllm.models.mixture import Mixture
from jitllm.models.rope import Scaling, frequencies
from jitllm.models.spec import LocalBlocks, QkNorm, RopeStyle, Spec
from jitllm.models.wires import Ops, Tensors

MIN_TEMPERATURE_STEPS = 1024
"""Steps of the temperature table, at least: a context may be longer than the trained one."""


def build(
    spec: Spec,
    hparams: Hparams,
    weights: Iterable[Weight],
    rope_factors: Sequence[float] | None = None,
) -> Graph:
    """The graph of a model.

    weights: the whole tensor table. rope_factors: the values of `rope_freqs`, if there is one.
    Raises BadModel: a tensor is missing, has the wrong shape, or is not part of this model.
    """
    return _Wiring(spec, hparams, Tensors(weights), rope_factors).graph()


@dataclass(frozen=True, slots=True)
class _Positions:
    """How a block sees positions: its window and its rotary table."""

    window: int
    table: Buffer
    base: float
    scaling: Scaling = Scaling()
    factors: tuple[float, ...] | None = None


class _Wiring:
    """Buffers and choices that all blocks share."""

    def __init__(
        self,
        spec: Spec,
        hparams: Hparams,
        tensors: Tensors,
        rope_factors: Sequence[float] | None,
    ) -> None:
        self.spec = spec
        self.hp = hp = hparams
        self.tensors = tensors
        self.rope_factors = self._checked(rope_factors)
        self.x = Buffer("x", hp.width)
        self.h = Buffer("h", hp.width)
        self.q = Buffer("q", hp.heads * hp.k_dim)
        self.k = Buffer("k", hp.kv_heads * hp.k_dim)
        self.v = Buffer("v", hp.kv_heads * hp.v_dim)
        self.attn = Buffer("attn", hp.heads * hp.v_dim)
        self.gate = Buffer("gate", hp.ffn_width)
        self.up = Buffer("up", hp.ffn_width)
        self.y = Buffer("y", hp.width)
        self.temperature = self._temperature()
        self.positions = self._positions()
        self.mixture = self._mixture()
        self._check_scales()

    def graph(self) -> Graph:
        """Everything, in order."""
        table = self.tensors.matrix("token_embd", None, 0, self.hp.width)
        scale = math.sqrt(self.hp.width) if self.spec.scaled_embedding else self.hp.embedding_scale
        blocks = tuple(self.block(i) for i in range(self.hp.num_blocks))
        head = self.head(table)
        self.tensors.refuse_unused()
        return Graph(
            width=self.hp.width,
            vocab=table.rows,
            context_length=self.hp.context_length,
            embed=(Embed(table, self.x, scale),),
            tables=self.tables(),
            blocks=blocks,
            kv=tuple(self.kv_shape(p) for p in self.positions),
            head=head,
        )

    def tables(self) -> tuple[Op, ...]:
        """One rotary table for each kind of block that occurs."""
        return tuple(self._rope_table(p) for p in dict.fromkeys(self.positions))

    def block(self, block: int) -> tuple[Op, ...]:
        """Attention, then the feed-forward layer."""
        ops = Ops(self.tensors, block)
        self._attend(ops, block)
        self._feed_forward(ops, block)
        return tuple(ops.ops)

    def head(self, table: Weight) -> tuple[Op, ...]:
        """The rows whose logits are wanted, normalised, times the head; without a matrix of its
        own the head is the embedding `table`."""
        ops = Ops(self.tensors)
        out = Buffer("out", self.hp.width, Rows.OUTPUTS)
        logits = Buffer("logits", table.rows, Rows.OUTPUTS)
        ops.add(Gather(self.x, out))
        ops.norm("output_norm", out, out, self.hp.eps)
        scale = 1.0 / self.hp.logit_scale
        if self.tensors.has("output"):
            ops.product("output", out, logits, scale=scale)
        else:
            ops.product_with(table, out, logits, scale=scale)
        return tuple(ops.ops)

    def kv_shape(self, positions: _Positions) -> KvShape:
        """What a block keeps."""
        return KvShape(self.hp.kv_heads, self.hp.k_dim, self.hp.v_dim, positions.window)

    # --- the two halves of a block ------------------------------------------------------------

    def _attend(self, ops: Ops, block: int) -> None:
        hp, positions = self.hp, self.positions[block]
        ops.norm("attn_norm", self.x, self.h, hp.eps)
        for role, dst in (("attn_q", self.q), ("attn_k", self.k), ("attn_v", self.v)):
            ops.product(role, self.h, dst)
        if self.spec.attention.norm_after_rope:
            self._rotate(ops, positions)
            self._normalise_heads(ops)
        else:
            self._normalise_heads(ops)
            self._rotate(ops, positions)
        ops.add(KvWrite(self.k, self.v, block, hp.kv_heads, hp.k_dim, hp.v_dim))
        ops.add(
            Attention(
                q=self.q,
                dst=self.attn,
                block=block,
                heads=hp.heads,
                kv_heads=hp.kv_heads,
                k_dim=hp.k_dim,
                v_dim=hp.v_dim,
                scale=self._score_scale(),
                window=positions.window,
            )
        )
        self._add_to_residual(ops, "attn", self.attn, "attn_output")

    def _feed_forward(self, ops: Ops, block: int) -> None:
        ops.norm(self.spec.ffn_norm, self.x, self.h, self.hp.eps)
        if self.mixture is not None and self.mixture.numbers.has_block(block):
            self._mix(ops, self.mixture)
            return
        ops.product("ffn_gate", self.h, self.gate)
        ops.product("ffn_up", self.h, self.up)
        ops.add(Glu(self.gate, self.up, self.gate, self.spec.feed_forward.activation))
        self._add_to_residual(ops, "ffn", self.gate, "ffn_down")

    def _mix(self, ops: Ops, mixture: Mixture) -> None:
        """The feed-forward layer of a block with experts."""
        scale = self.hp.residual_scale
        if self.spec.post_norms:
            mixture.add_to(ops, self.h, self.y, None, scale)
            ops.norm("ffn_post_norm", self.y, self.x, self.hp.eps, add=self.x)
        else:
            mixture.add_to(ops, self.h, self.x, self.x, scale)

    def _add_to_residual(self, ops: Ops, half: str, src: Buffer, role: str) -> None:
        """Project back to the hidden state and add it, normalised first where the spec says so."""
        scale = self.hp.residual_scale
        if self.spec.post_norms:
            ops.product(role, src, self.y, scale=scale)
            ops.norm(f"{half}_post_norm", self.y, self.x, self.hp.eps, add=self.x)
        else:
            ops.product(role, src, self.x, self.x, scale)

    def _normalise_heads(self, ops: Ops) -> None:
        attention = self.spec.attention
        pairs = (("attn_q_norm", self.q), ("attn_k_norm", self.k))
        if attention.qk_norm is QkNorm.NONE:
            return
        if attention.optional_norm and not any(ops.has(role) for role, _ in pairs):
            return
        for role, heads in pairs:
            segment = self.hp.k_dim if attention.qk_norm is QkNorm.HEAD else heads.width
            ops.norm(role, heads, heads, self.hp.eps, segment=segment)

    def _rotate(self, ops: Ops, positions: _Positions) -> None:
        hp = self.hp
        interleaved = self.spec.attention.rope is RopeStyle.INTERLEAVED
        period = hp.temperature.period if hp.temperature else 1
        rope = Rope(self.k, positions.table, hp.k_dim, hp.num_rotated, interleaved)
        ops.add(replace(rope, x=self.q, position_scale=self.temperature, scale_positions=period))
        ops.add(rope)

    def _score_scale(self) -> float:
        hp = self.hp
        if hp.attention_scale is not None:
            return hp.attention_scale
        by_width = hp.num_blocks in self.spec.attention.width_scaled
        return 1.0 / math.sqrt(hp.width // hp.heads if by_width else hp.k_dim)

    # --- what file and spec must agree on ------------------------------------------------------

    def _mixture(self) -> Mixture | None:
        """The experts of the file, routed as the spec says."""
        numbers, experts = self.hp.experts, self.spec.experts
        if numbers is None:
            return None
        if experts is None:
            raise BadModel(f"expert_count is {numbers.count}, and this architecture has no experts")
        activation = self.spec.feed_forward.activation
        return Mixture(numbers, experts, activation, self.hp.width, self.tensors)

    def _check_scales(self) -> None:
        for key in ("embedding_scale", "residual_scale", "logit_scale"):
            value = getattr(self.hp, key)
            if value != 1.0 and not self.spec.scaled_by_file:
                raise BadModel(f"{key} is {value:g}, and this architecture scales by no file")

    # --- positions ----------------------------------------------------------------------------

    def _positions(self) -> tuple[_Positions, ...]:
        """How each block sees positions."""
        hp = self.hp
        table = Buffer("rope", hp.num_rotated)
        far = _Positions(0, table, hp.rope_base, hp.scaling, self.rope_factors)
        local = self.spec.attention.local
        if local is None or not hp.window:
            return (far,) * hp.num_blocks
        base = hp.local_rope_base or local.rope_base or hp.rope_base
        near = _Positions(hp.window, Buffer("rope_local", hp.num_rotated), base)
        return tuple(near if is_local else far for is_local in self._local_blocks(local))

    def _local_blocks(self, local: LocalBlocks) -> list[bool]:
        """For each block, whether it has a window."""
        pattern = self.hp.local_pattern
        if isinstance(pattern, tuple):
            return list(pattern)
        period = local.period if pattern is None else pattern
        return [not period or i % period < period - 1 for i in range(self.hp.num_blocks)]

    def _rope_table(self, positions: _Positions) -> RopeTable:
        found = frequencies(
            positions.base, self.hp.num_rotated, positions.scaling, positions.factors
        )
        const = Const(f"{positions.table.name}.frequencies", found.pack())
        return RopeTable(positions.table, const, found.scale)

    def _temperature(self) -> Const | None:
        """The factors of queries by their position, where architecture and file have them."""
        temperature = self.hp.temperature
        if temperature is None or not self.spec.attention.has_temperature:
            return None
        trained_steps = self.hp.context_length // temperature.period + 1
        factors = (
            1.0 + temperature.scale * math.log(1 + step)
            for step in range(max(trained_steps, MIN_TEMPERATURE_STEPS))
        )
        return Const("attention.temperature", b"".join(struct.pack("<f", f) for f in factors))

    def _checked(self, factors: Sequence[float] | None) -> tuple[float, ...] | None:
        """The divisors of the rotary frequencies: all there, and positive."""
        vector = self.tensors.optional_vector("rope_freqs", None, self.hp.num_rotated // 2)
        if (vector is None) != (factors is None):
            raise BadModel("rope_freqs: its tensor and its values must come together")
        if factors is None:
            return None
        if len(factors) != self.hp.num_rotated // 2:
            raise BadModel(f"tensor rope_freqs.weight has {len(factors)} values")
        if not all(math.isfinite(f) and 1e-6 <= f <= 1e6 for f in factors):
            raise BadModel("tensor rope_freqs.weight holds a value that divides no frequency")
        return tuple(factors)
