"""Copying the output rows on the CPU: an item is one row."""

from __future__ import annotations

from jitllm.jit.emit import LANES, Kernel, f32v, i32, i64
from jitllm.kernels.gather import Gather
from jitllm.kernels.op import Count, Ctx, Env, KernelSpec, Launch

SRC, DST, STRIDE = range(3)
"""Argument words: addresses, bytes between rows."""


def launches(op: Gather, env: Env) -> list[Launch]:
    """One launch; rows are copied with their padding, so every vector is whole."""
    args = (env.buffer(op.src), env.buffer(op.dst), op.dst.stride_bytes)
    return [Launch(KernelSpec.of("gather"), Count.OUTPUTS, 1, args)]


def emit(k: Kernel) -> None:
    """The kernel; it serves every width."""
    stride = k.arg(STRIDE)
    with k.items() as item:
        token = k.load(k.ctx(Ctx.OUTPUTS) + item * 4, i32).sext(i64)
        src, dst = k.arg(SRC) + token * stride, k.arg(DST) + item * stride
        with k.loop(0, stride, LANES * 4) as i:
            k.store(k.load(src + i, f32v), dst + i)
