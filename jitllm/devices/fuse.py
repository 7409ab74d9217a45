"""Ops that the CPU computes in one pass: what one gives is quantised by the thread that has it.

A row is then written and read once less, and threads wait for each other once less. Knows norms and
gated activations; knows no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from jitllm.kernels.glu import Glu
from jitllm.kernels.norm import Norm
from jitllm.kernels.op import Buffer, Op
from jitllm.kernels.quantize import Quantize


def fused(ops: Sequence[Op]) -> list[Op]:
    """The ops of a part that runs again and again, with each quantisation in the op before it
    where that gives what is quantised."""
    found: list[Op] = []
    for index, op in enumerate(ops):
        last = found[-1] if found else None
        if isinstance(op, Quantize) and _quantizes(last) and last.dst == op.src:
            is_read = _is_read(op.src, [*ops[index + 1 :], *ops])
            found[-1] = replace(last, quantized=op.dst, drops=not is_read)
        else:
            found.append(op)
    return found


def _quantizes(op: Op | None) -> TypeGuard[Norm | Glu]:
    return isinstance(op, Glu) or (isinstance(op, Norm) and op.segment == op.dst.width)


def _is_read(buffer: Buffer, ops: Sequence[Op]) -> bool:
    """Whether any of the ops reads a buffer before one writes it."""
    for op in ops:
        if buffer in op.reads:
            return True
        if buffer in op.writes:
            return False
    return True
