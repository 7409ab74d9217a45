"""Gated activations on the CPU: an item is a chunk of columns of one row."""

from __future__ import annotations

import math

from jitllm.jit.emit import LANES, Kernel, Value, f32, f32v
from jitllm.kernels.glu import Glu
from jitllm.kernels.layout import GROUP
from jitllm.kernels.op import Count, Env, KernelSpec, Launch, Rows
from jitllm.kernels.quantize.cpu import GROUP_BYTES, fours, halves_at, records_at, store_records

GATE, UP, DST, GATE_STRIDE, UP_STRIDE, DST_STRIDE, CHUNKS, COLUMNS = range(8)
RECORDS, RECORDS_STRIDE = 8, 9
"""Argument words: addresses, bytes between rows, chunks of a row, columns of a row with its
padding; the address of records, and bytes between rows of them."""

CHUNK = 512
"""Columns of an item: long enough to pay for taking it, short enough for threads to share a row."""


def launches(op: Glu, env: Env) -> list[Launch]:
    """One launch; the padding is computed too (it stays zero), so every vector is whole."""
    columns = op.gate.stride_bytes // 4
    chunks = -(-columns // CHUNK)
    args = (
        env.buffer(op.gate),
        env.buffer(op.up),
        0 if op.drops else env.buffer(op.dst),
        op.gate.stride_bytes,
        op.up.stride_bytes,
        op.dst.stride_bytes,
        chunks,
        columns,
        *records_at(op.quantized, env),
    )
    count = Count.OUTPUTS if op.dst.rows is Rows.OUTPUTS else Count.TOKENS
    quantizes = op.quantized is not None
    spec = KernelSpec.of("glu", activation=op.activation, quantizes=quantizes, drops=op.drops)
    return [Launch(spec, count, chunks, args)]


def emit(k: Kernel, *, activation: str, quantizes: bool = False, drops: bool = False) -> None:
    """The kernel; it serves every width."""
    chunks, columns = k.arg(CHUNKS), k.arg(COLUMNS)
    activate = {"silu": _silu, "gelu": _gelu}[activation]
    passing = k.stack(f32, CHUNK) if drops else None
    with k.items() as item:
        row, first = item.udiv(chunks), item.urem(chunks) * CHUNK
        stop = k.min(first + CHUNK, columns)
        gate = k.arg(GATE) + row * k.arg(GATE_STRIDE)
        up = k.arg(UP) + row * k.arg(UP_STRIDE)
        dst = k.arg(DST) + row * k.arg(DST_STRIDE) if passing is None else passing - first * 4
        with k.loop(first, stop, LANES) as i:
            y = activate(k, k.load(gate + i * 4, f32v)) * k.load(up + i * 4, f32v)
            k.store(y, dst + i * 4)
        if quantizes:
            # In a loop of its own: either one is a long chain, and a processor sees so far ahead
            # only as to have several of the same in its view, not of both in a row.
            records = k.arg(RECORDS) + row * k.arg(RECORDS_STRIDE)
            with fours(k, first.udiv(GROUP), stop.udiv(GROUP)) as four:
                found = [halves_at(k, dst + g * GROUP_BYTES) for g in four]
                store_records(k, found, records, four)


def _silu(k: Kernel, x: Value) -> Value:
    return x / (k.exp(-x) + 1.0)


def _gelu(k: Kernel, x: Value) -> Value:
    linear = -2 * math.sqrt(2 / math.pi)
    cubic = k.const(0.044715 * linear, x.type)
    return x / (k.exp(x * k.fma(x * x, cubic, k.const(linear, x.type))) + 1.0)
