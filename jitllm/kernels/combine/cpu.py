"""Adding up experts on the CPU: an item is a chunk of columns of one token."""

from __future__ import annotations

from jitllm.jit.emit import LANES, Kernel, f32, f32v, i32
from jitllm.kernels.combine import Combine
from jitllm.kernels.op import Count, Env, KernelSpec, Launch, f32_bits

SRC, ROUTED, DST, ADD, SRC_STRIDE, ROUTED_STRIDE, DST_STRIDE = range(7)
USED, COLUMNS, CHUNKS, SCALE = range(7, 11)
"""Argument words: addresses (ADD may be 0), bytes between rows (ADD's are DST's), slots, columns of
a segment, chunks of a row, and the bits of the scale."""

CHUNK = 512
"""Columns of an item: long enough to pay for taking it, short enough for threads to share a row."""


def launches(op: Combine, env: Env) -> list[Launch]:
    """One launch."""
    chunks = -(-op.dst.width // CHUNK)
    args = (
        env.buffer(op.src),
        env.buffer(op.routed),
        env.buffer(op.dst),
        env.buffer(op.add) if op.add else 0,
        op.src.stride_bytes,
        op.routed.stride_bytes,
        op.dst.stride_bytes,
        op.src.width // op.dst.width,
        op.dst.width,
        chunks,
        f32_bits(op.scale),
    )
    return [Launch(KernelSpec.of("combine", add=op.add is not None), Count.TOKENS, chunks, args)]


def emit(k: Kernel, *, add: bool) -> None:
    """The kernel; it serves every width."""
    chunks, columns = k.arg(CHUNKS), k.arg(COLUMNS)
    scale = k.arg(SCALE).trunc(i32).as_f32()
    with k.items() as item:
        token, first = item.udiv(chunks), item.urem(chunks) * CHUNK
        src = k.arg(SRC) + token * k.arg(SRC_STRIDE)
        routed = k.arg(ROUTED) + token * k.arg(ROUTED_STRIDE)
        dst = k.arg(DST) + token * k.arg(DST_STRIDE)
        residual = k.arg(ADD) + token * k.arg(DST_STRIDE)
        with k.loop(first, k.min(first + CHUNK, columns), LANES) as i:
            acc = k.var(k.const(0.0, f32v))
            with k.loop(0, k.arg(USED)) as slot:
                y = k.load(src + (slot * columns + i) * 4, f32v)
                acc.set(k.fma(k.load(routed + slot * 4, f32), y, acc.get()))
            y = acc.get() * scale
            if add:
                y = y + k.load(residual + i * 4, f32v)
            k.store(y, dst + i * 4)
