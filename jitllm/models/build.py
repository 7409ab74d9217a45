"""Wires a spec, its numbers and its tensors to a graph: the only wiring there is.

Knows which op follows which. Knows no architecture by name, no device and no bytes. Tensors are
untrusted: each one's shape is checked against the numbers, and one that no op reads is refused,
because leaving it out would silently be another model.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jitllm.formats.names import source_name
from jitllm.kernels.attention import Attention
from jitllm.kernels.embed import Embed
from jitllm.kernels.gather import Gather
from jitllm.kernels.glu import Glu
from jitllm.kernels.kv_write import KvWrite
from jitllm.kernels.layout import FORMATS
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.norm import Norm
from jitllm.kernels.op import Buffer, Const, Element, Op, Rows, Weight
from jitllm.kernels.quantize import Quantize
from jitllm.kernels.rope import Rope
from jitllm.kernels.rope_table import RopeTable
from jitllm.models.graph import Graph, KvShape
from jitllm.models.hparams import BadModel, Hparams
from jitllm.models.rope import Scaling, frequencies
from jitllm.models.spec import LocalBlocks, RopeStyle, Spec

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
    return _Wiring(spec, hparams, _Tensors(weights), rope_factors).graph()


class _Tensors:
    """The tensor table; remembers what was asked for."""

    def __init__(self, weights: Iterable[Weight]) -> None:
        self.table: dict[tuple[str, int | None], Weight] = {}
        for weight in weights:
            if (weight.role, weight.block) in self.table:
                raise BadModel(f"tensor {_name(weight)} occurs twice")
            self.table[weight.role, weight.block] = weight
        self.used: set[tuple[str, int | None]] = set()

    def matrix(self, role: str, block: int | None, rows: int, cols: int) -> Weight:
        """A matrix of exactly this shape; `rows` 0 stands for as many as there are."""
        found = self._take(role, block)
        if found is None:
            raise BadModel(f"tensor {source_name(role, block)} is missing")
        if not found.rows or found.cols != cols or found.rows != (rows or found.rows):
            wanted = f"[{rows or 'any'}, {cols}]"
            raise BadModel(f"tensor {_name(found)} has shape {_shape(found)}, not {wanted}")
        return found

    def vector(self, role: str, block: int | None, size: int) -> Weight:
        """A vector of exactly this size."""
        found = self.optional_vector(role, block, size)
        if found is None:
            raise BadModel(f"tensor {source_name(role, block)} is missing")
        return found

    def optional_vector(self, role: str, block: int | None, size: int) -> Weight | None:
        """A vector of exactly this size, or None where there is none."""
        found = self._take(role, block)
        if found is not None and (found.rows or found.cols != size):
            raise BadModel(f"tensor {_name(found)} has shape {_shape(found)}, not [{size}]")
        return found

    def has(self, role: str) -> bool:
        """Is there a tensor of this role in the dense region?"""
        return (role, None) in self.table

    def refuse_unused(self) -> None:
        """Every tensor must have been asked for."""
        for key, weight in self.table.items():
            if key not in self.used:
                raise BadModel(f"tensor {_name(weight)} is no part of this architecture")

    def _take(self, role: str, block: int | None) -> Weight | None:
        self.used.add((role, block))
        return self.table.get((role, block))


def _name(weight: Weight) -> str:
    return source_name(weight.role, weight.block)


def _shape(weight: Weight) -> str:
    return f"[{weight.rows}, {weight.cols}]" if weight.rows else f"[{weight.cols}]"


class _Ops:
    """Collects the ops of one part; quantises a source at most once, and only on demand."""

    def __init__(self, tensors: _Tensors, block: int | None = None) -> None:
        self.tensors = tensors
        self.block = block
        self.ops: list[Op] = []
        self.quantized: set[Buffer] = set()

    def add(self, op: Op) -> None:
        """Append an op; what it writes is quantised afresh by its next reader."""
        self.ops.append(op)
        self.quantized -= set(op.writes)

    def norm(
        self,
        role: str,
        src: Buffer,
        dst: Buffer,
        eps: float,
        *,
        segment: int = 0,
        add: Buffer | None = None,
    ) -> None:
        """Normalise rows, or the segments of them."""
        segment = segment or src.width
        gain = self.tensors.vector(role, self.block, segment)
        self.add(Norm(src, dst, gain, eps, segment, add))

    def product(self, role: str, src: Buffer, dst: Buffer, add: Buffer | None = None) -> None:
        """Multiply by a matrix of the block, with its bias if it has one."""
        weight = self.tensors.matrix(role, self.block, dst.width, src.width)
        self.product_with(weight, src, dst, self._bias(role, dst), add)

    def product_with(
        self,
        weight: Weight,
        src: Buffer,
        dst: Buffer,
        bias: Weight | None = None,
        add: Buffer | None = None,
    ) -> None:
        """Multiply by `weight`: its format decides whether it meets f32 or quantised rows."""
        if FORMATS[weight.format].is_quantized:
            src = self._quantized(src)
        self.add(MatMul(src, dst, weight, bias, add))

    def _bias(self, role: str, dst: Buffer) -> Weight | None:
        return self.tensors.optional_vector(f"{role}.bias", self.block, dst.width)

    def _quantized(self, src: Buffer) -> Buffer:
        twin = replace(src, name=f"{src.name}q", element=Element.Q8)
        if src not in self.quantized:
            self.add(Quantize(src, twin))
            self.quantized.add(src)
        return twin


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
        tensors: _Tensors,
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

    def graph(self) -> Graph:
        """Everything, in order."""
        table = self.tensors.matrix("token_embd", None, 0, self.hp.width)
        scale = math.sqrt(self.hp.width) if self.spec.scaled_embedding else 1.0
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
        ops = _Ops(self.tensors, block)
        self._attend(ops, block)
        self._feed_forward(ops)
        return tuple(ops.ops)

    def head(self, table: Weight) -> tuple[Op, ...]:
        """The rows whose logits are wanted, normalised, times the head; without a matrix of its
        own the head is the embedding `table`."""
        ops = _Ops(self.tensors)
        out = Buffer("out", self.hp.width, Rows.OUTPUTS)
        logits = Buffer("logits", table.rows, Rows.OUTPUTS)
        ops.add(Gather(self.x, out))
        ops.norm("output_norm", out, out, self.hp.eps)
        if self.tensors.has("output"):
            ops.product("output", out, logits)
        else:
            ops.product_with(table, out, logits)
        return tuple(ops.ops)

    def kv_shape(self, positions: _Positions) -> KvShape:
        """What a block keeps."""
        return KvShape(self.hp.kv_heads, self.hp.k_dim, self.hp.v_dim, positions.window)

    # --- the two halves of a block ------------------------------------------------------------

    def _attend(self, ops: _Ops, block: int) -> None:
        hp, positions = self.hp, self.positions[block]
        ops.norm("attn_norm", self.x, self.h, hp.eps)
        for role, dst in (("attn_q", self.q), ("attn_k", self.k), ("attn_v", self.v)):
            ops.product(role, self.h, dst)
        if self.spec.attention.head_norm:
            for role, heads in (("attn_q_norm", self.q), ("attn_k_norm", self.k)):
                ops.norm(role, heads, heads, hp.eps, segment=hp.k_dim)
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

    def _feed_forward(self, ops: _Ops) -> None:
        ops.norm("ffn_norm", self.x, self.h, self.hp.eps)
        ops.product("ffn_gate", self.h, self.gate)
        ops.product("ffn_up", self.h, self.up)
        ops.add(Glu(self.gate, self.up, self.gate, self.spec.feed_forward.activation))
        self._add_to_residual(ops, "ffn", self.gate, "ffn_down")

    def _add_to_residual(self, ops: _Ops, half: str, src: Buffer, role: str) -> None:
        """Project back to the hidden state and add it, normalised first where the spec says so."""
        if self.spec.post_norms:
            ops.product(role, src, self.y)
            ops.norm(f"{half}_post_norm", self.y, self.x, self.hp.eps, add=self.x)
        else:
            ops.product(role, src, self.x, add=self.x)

    def _rotate(self, ops: _Ops, positions: _Positions) -> None:
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

    # --- positions ----------------------------------------------------------------------------

    def _positions(self) -> tuple[_Positions, ...]:
        """How each block sees positions."""
        hp = self.hp
        table = Buffer("rope", hp.num_rotated)
        far = _Positions(0, table, hp.rope_base, hp.scaling, self.rope_factors)
        local = self.spec.attention.local
        if local is None or not hp.window:
            return (far,) * hp.num_blocks
        base = hp.local_rope_base or local.rope_base
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
