"""Runs a graph in NumPy, in float64, straight from a GGUF file: a second pair of eyes.

Shares nothing with the kernels' own references but the contracts. Whole sequences at once, keys
and values in plain arrays instead of pages, exact ones if nobody asks for others. What is quantised
is kept as the numbers it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from jitllm.formats.fused import is_fused, parts_of
from jitllm.formats.names import ROW_ROLES, role_of
from jitllm.kernels.attention import Attention
from jitllm.kernels.combine import Combine
from jitllm.kernels.dispatch import Dispatch
from jitllm.kernels.embed import Embed
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.gather import Gather
from jitllm.kernels.glu import Glu
from jitllm.kernels.kv_write import KvWrite
from jitllm.kernels.layout import GROUP, FormatCode
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.norm import Norm
from jitllm.kernels.op import Weight
from jitllm.kernels.quantize import Quantize
from jitllm.kernels.rope import Rope
from jitllm.kernels.rope_table import RopeTable
from jitllm.kernels.route import LEAST_SUM, Route
from jitllm.models.graph import Graph
from jitllm.models.hparams import Config, Hparams
from jitllm.models.registry import make_graph

F64 = NDArray[np.float64]


@dataclass
class Source:
    """A GGUF file as plain values: what the converter would write, and every tensor in float64."""

    arch: str
    config: Config
    weights: list[Weight]
    values: dict[tuple[str, int | None], F64]

    @property
    def rope_factors(self) -> list[float] | None:
        """The values of `rope_freqs`, if there is one."""
        found = self.values.get(("rope_freqs", None))
        return None if found is None else found.tolist()

    @property
    def hparams(self) -> Hparams:
        """The numbers."""
        return Hparams.read(self.config)

    def graph(self) -> Graph:
        """The graph."""
        return make_graph(self.arch, self.config, self.weights, self.rope_factors)


def load(path: Path) -> Source:
    """Read a small GGUF file."""
    reader = gguf.GGUFReader(path)
    fields = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GG")}
    arch = fields["general.architecture"]
    prefix = f"{arch}."
    config = {k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)}
    weights, values = [], {}
    numbers = Hparams.read(config)
    for tensor in reader.tensors:
        role, block = role_of(tensor.name)
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        value = value[None] if role in ROW_ROLES else value
        code = FormatCode[tensor.tensor_type.name]
        parts = parts_of(role, numbers) if is_fused(role) else ((role, len(value)),)
        ends = np.cumsum([rows for _, rows in parts])
        for (part, _), piece in zip(parts, np.split(value, ends[:-1]), strict=True):
            experts, rows, cols = (0, 0, *piece.shape)[-3:]
            weights.append(Weight(part, block, code, rows, cols, experts))
            values[part, block] = piece
    return Source(arch, config, weights, values)


@dataclass
class Run:
    """The state of one pass over a whole sequence."""

    values: dict[tuple[str, int | None], F64]
    tokens: NDArray[np.int32]
    kv_element: str = ""
    buffers: dict[str, F64] = field(default_factory=dict)
    kv: dict[int, tuple[F64, F64]] = field(default_factory=dict)

    @property
    def positions(self) -> NDArray[np.int64]:
        """One sequence from its start."""
        return np.arange(len(self.tokens))

    def weight(self, weight: Weight) -> F64:
        """A weight's values."""
        return self.values[weight.role, weight.block]


def logits(
    graph: Graph, values: dict[tuple[str, int | None], F64], tokens: Any, kv_element: str = ""
) -> F64:
    """Logits [tokens, vocab] of every position. kv_element: keys and values are rounded to it."""
    graph.check()
    run = Run(values, np.asarray(tokens, np.int32), kv_element)
    for op in graph.ops():
        OPS[type(op)](op, run)
    return run.buffers["logits"]


def embed(op: Embed, run: Run) -> None:
    run.buffers[op.dst.name] = run.weight(op.table)[run.tokens] * np.float32(op.scale)


def gather(op: Gather, run: Run) -> None:
    run.buffers[op.dst.name] = run.buffers[op.src.name].copy()


def rope_table(op: RopeTable, run: Run) -> None:
    angles = run.positions[:, None] * np.frombuffer(op.frequencies.data, "<f8")
    run.buffers[op.dst.name] = np.concatenate([np.cos(angles), np.sin(angles)], 1) * op.scale


def norm(op: Norm, run: Run) -> None:
    x = run.buffers[op.src.name]
    parts = x.reshape(len(x), -1, op.segment)
    parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + op.eps) * run.weight(op.weight)
    y = parts.reshape(x.shape)
    run.buffers[op.dst.name] = y if op.add is None else y + run.buffers[op.add.name]


def quantize(op: Quantize, run: Run) -> None:
    x = run.buffers[op.src.name]
    padded = np.zeros((len(x), -(-x.shape[1] // GROUP) * GROUP))
    padded[:, : x.shape[1]] = x
    run.buffers[op.dst.name] = rounded_in_groups(padded)[:, : x.shape[1]]


def rounded_in_groups(x: F64, scale_kind: type = np.float64) -> F64:
    """[..., groups * GROUP] as multiples of 1/127 of each group's largest; scale_kind: of which
    scales are kept."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    amax = np.abs(groups).max(-1, keepdims=True)
    scale = np.where(amax == 0, 1, amax) / 127
    rounded: F64 = np.rint(groups / scale) * scale.astype(scale_kind).astype(np.float64)
    return rounded.reshape(x.shape)


def matmul(op: MatMul, run: Run) -> None:
    y = run.buffers[op.src.name] @ run.weight(op.weight).T
    if op.bias is not None:
        y = y + run.weight(op.bias)
    y = y * op.scale
    run.buffers[op.dst.name] = y if op.add is None else y + run.buffers[op.add.name]


def rope(op: Rope, run: Run) -> None:
    x = run.buffers[op.x.name]
    heads = x.reshape(len(x), -1, op.head_dim).copy()
    half = op.num_rotated // 2
    cos, sin = np.split(run.buffers[op.table.name][:, None], 2, axis=2)
    first, second = (
        (slice(0, op.num_rotated, 2), slice(1, op.num_rotated, 2))
        if op.interleaved
        else (slice(0, half), slice(half, op.num_rotated))
    )
    a, b = heads[..., first].copy(), heads[..., second].copy()
    heads[..., first] = a * cos - b * sin
    heads[..., second] = a * sin + b * cos
    if op.position_scale is not None:
        factors = np.frombuffer(op.position_scale.data, "<f4")
        step = np.minimum(run.positions // op.scale_positions, len(factors) - 1)
        heads *= factors[step][:, None, None]
    run.buffers[op.x.name] = heads.reshape(x.shape)


def glu(op: Glu, run: Run) -> None:
    x = run.buffers[op.gate.name]
    u = x if op.activation == "silu" else 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    run.buffers[op.dst.name] = x / (1 + np.exp(-u)) * run.buffers[op.up.name]


def kv_write(op: KvWrite, run: Run) -> None:
    k, v = run.buffers[op.k.name], run.buffers[op.v.name]
    shape = (len(k), op.kv_heads)
    k, v = k.reshape(*shape, op.k_dim), v.reshape(*shape, op.v_dim)
    if run.kv_element == "q8_0":
        k, v = (rounded_in_groups(x, np.float16) for x in (k, v))
    run.kv[op.block] = k, v


def attention(op: Attention, run: Run) -> None:
    k, v = (np.repeat(a, op.heads // op.kv_heads, axis=1) for a in run.kv[op.block])
    q = run.buffers[op.q.name].reshape(-1, op.heads, op.k_dim)
    scores = np.einsum("thd,shd->hts", q, k) * op.scale
    if op.softcap:
        scores = op.softcap * np.tanh(scores / op.softcap)
    behind = run.positions[:, None] - run.positions[None]
    scores[:, (behind < 0) | (behind >= (op.window or len(q)))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    run.buffers[op.dst.name] = np.einsum("hts,shd->thd", weights, v).reshape(len(q), -1)


def route(op: Route, run: Run) -> None:
    x = run.buffers[op.logits.name]
    if op.score == "softmax":
        e = np.exp(x - x.max(-1, keepdims=True))
        scores = e / e.sum(-1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-x))
    choice = scores if op.bias is None else scores + run.weight(op.bias)
    runs = choice.reshape(len(x), op.groups, -1).copy()
    if op.groups > 1:
        best_two = np.sort(runs, axis=-1)[..., -2:].sum(-1)
        for token, order in enumerate(np.argsort(-best_two, axis=-1)):
            runs[token, order[op.groups_used :]] = -np.inf
    ids = np.argsort(-runs.reshape(x.shape), axis=-1)[:, : op.ids.width]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if op.is_normalised:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), LEAST_SUM)
    run.buffers[op.ids.name] = ids
    run.buffers[op.routed.name] = weights * op.scale


def dispatch(op: Dispatch, run: Run) -> None:
    """No order is needed here: only who meets whom."""
    run.buffers[op.table.name] = run.buffers[op.ids.name]


def expert_matmul(op: ExpertMatMul, run: Run) -> None:
    ids = run.buffers[op.table.name]
    x = run.buffers[op.src.name].reshape(len(ids), -1, op.weight.cols)
    x = np.broadcast_to(x, (*ids.shape, op.weight.cols))
    y = np.einsum("tsc,tsrc->tsr", x, run.weight(op.weight)[ids], optimize=True)
    run.buffers[op.dst.name] = y.reshape(len(ids), -1)


def combine(op: Combine, run: Run) -> None:
    routed = run.buffers[op.routed.name]
    y = run.buffers[op.src.name].reshape(*routed.shape, -1)
    y = np.einsum("ts,tsc->tc", routed, y) * op.scale
    run.buffers[op.dst.name] = y if op.add is None else y + run.buffers[op.add.name]


OPS: dict[type, Callable[[Any, Run], None]] = {
    Attention: attention,
    Combine: combine,
    Dispatch: dispatch,
    Embed: embed,
    ExpertMatMul: expert_matmul,
    Gather: gather,
    Glu: glu,
    KvWrite: kv_write,
    MatMul: matmul,
    Norm: norm,
    Quantize: quantize,
    Rope: rope,
    RopeTable: rope_table,
    Route: route,
}
"""Every op that a graph may hold."""
