"""Gated activations on the CPU: an item is a chunk of columns of one row."""

from __future__ import annotations

import math

from jitllm.jit.emit import LANES, Kernel, Value, f32v
from jitllm.kernels.glu import Glu
from jitllm.kernels.op import Count, Env, KernelSpec, Launch, Rows

GATE, UP, DST, GATE_STRIDE, UP_STRIDE, DST_STRIDE, CHUNKS, COLUMNS = range(8)
"""Argument words: addresses, bytes between rows, chunks of a row, columns of a row with its
padding."""

CHUNK = 512
"""Columns of an item: long enough to pay for taking it, short enough for threads to share a row."""


def launches(op: Glu, env: Env) -> list[Launch]:
    """One launch; the padding is computed too (it stays zero), so every vector is whole."""
    columns = op.gate.stride_bytes // 4
    chunks = -(-columns // CHUNK)
    args = (
        env.buffer(op.gate),
        env.buffer(op.up),
        env.buffer(op.dst),
        op.gate.stride_bytes,
        op.up.stride_bytes,
        op.dst.stride_bytes,
        chunks,
        columns,
    )
    count = Count.OUTPUTS if op.dst.rows is Rows.OUTPUTS else Count.TOKENS
    return [Launch(KernelSpec.of("glu", activation=op.activation), count, chunks, args)]


def emit(k: Kernel, *, activation: str) -> None:
    """The kernel; it serves every width."""
    chunks, columns = k.arg(CHUNKS), k.arg(COLUMNS)
    activate = {"silu": _silu, "gelu": _gelu}[activation]
    with k.items() as item:
        row, first = item.udiv(chunks), item.urem(chunks) * CHUNK
        gate = k.arg(GATE) + row * k.arg(GATE_STRIDE)
        up = k.arg(UP) + row * k.arg(UP_STRIDE)
        dst = k.arg(DST) + row * k.arg(DST_STRIDE)
        with k.loop(first, k.min(first + CHUNK, columns), LANES) as i:
            y = activate(k, k.load(gate + i * 4, f32v)) * k.load(up + i * 4, f32v)
            k.store(y, dst + i * 4)


def _silu(k: Kernel, x: Value) -> Value:
    return x / (k.exp(-x) + 1.0)


def _gelu(k: Kernel, x: Value) -> Value:
    linear = -2 * math.sqrt(2 / math.pi)
    cubic = k.const(0.044715 * linear, x.type)
    return x / (k.exp(x * k.fma(x * x, cubic, k.const(linear, x.type))) + 1.0)
