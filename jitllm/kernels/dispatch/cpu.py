"""Sorting pairs on the CPU: a single item, which counts experts and deals the pairs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jitllm.jit.emit import Kernel, Value, i32, i64
from jitllm.kernels.dispatch import HEAD_BYTES, RECORD_BYTES, Dispatch
from jitllm.kernels.op import PANEL_TOKENS, Count, Ctx, Env, KernelSpec, Launch
from jitllm.kernels.route import MAX_EXPERTS

IDS, TABLE, IDS_STRIDE, USED, EXPERTS = range(5)
"""Argument words: addresses, bytes between rows, numbers."""


def launches(op: Dispatch, env: Env) -> list[Launch]:
    """One launch of one item."""
    args = (
        env.buffer(op.ids),
        env.buffer(op.table),
        op.ids.stride_bytes,
        op.ids.width,
        op.experts,
    )
    return [Launch(KernelSpec.of("dispatch"), Count.ONE, 1, args)]


def emit(k: Kernel) -> None:
    """The kernel; it serves every number of experts."""
    experts, table = k.arg(EXPERTS), k.arg(TABLE)
    next_of = k.stack(i64, MAX_EXPERTS)  # pairs of an expert, then where its next one goes
    with k.items():
        with k.loop(0, experts) as e:
            k.store(k.const(0), next_of + e * 8)
        with _pairs(k) as (_, expert):
            at = next_of + expert * 8
            k.store(k.load(at, i64) + 1, at)

        start, panels = k.var(0, i64), k.var(0, i64)
        with k.loop(0, experts) as e:
            stop = start.get() + k.load(next_of + e * 8, i64)
            k.store(start.get(), next_of + e * 8)
            with k.loop(start.get(), stop, PANEL_TOKENS) as first:
                last = k.min(first + PANEL_TOKENS, stop)
                record = table + HEAD_BYTES + panels.get() * RECORD_BYTES
                for word, value in enumerate((e, first, last), 1):
                    k.store(value.trunc(i32), record + word * 4)
                panels.set(panels.get() + 1)
            start.set(stop)
        k.store(panels.get().trunc(i32), table)

        with _pairs(k) as (pair, expert):
            at = next_of + expert * 8
            place = k.load(at, i64)
            k.store(pair.trunc(i32), table + HEAD_BYTES + place * RECORD_BYTES)
            k.store(place + 1, at)


@contextmanager
def _pairs(k: Kernel) -> Iterator[tuple[Value, Value]]:
    """Loop over the step's pairs: (number, expert)."""
    used = k.arg(USED)
    with (
        k.loop(0, k.ctx(Ctx.NUM_TOKENS)) as token,
        k.loop(0, used) as slot,
    ):
        at = k.arg(IDS) + token * k.arg(IDS_STRIDE) + slot * 4
        yield token * used + slot, k.load(at, i32).sext(i64)
