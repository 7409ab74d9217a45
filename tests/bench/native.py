"""Ops alone, on a thread team, as samples for `paired.compare`.

Knows launch tables, tiers and memory. Knows no engine.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from jitllm.devices.bandwidth import read_rates
from jitllm.devices.memory import HostMemory, Span, round_up
from jitllm.jit.team import Team
from jitllm.jit.tiers import Tier
from jitllm.kernels.layout import FORMATS, FormatCode
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.matmul.reference import random_tiles
from jitllm.kernels.op import Buffer, Const, Ctx, Element, Launch, Op, Weight
from jitllm.kernels.team import table
from tests.bench.paired import Sample
from tests.ops.harness import Rig, compiler

LEAST_S = 0.02
"""A sample runs at least so long."""


def launches(op: Op, env: object) -> list[Launch]:
    """What a device would run for an op."""
    emitter = importlib.import_module(type(op).__module__ + ".cpu")
    found: list[Launch] = emitter.launches(op, env)
    return found


class Timed:
    """A table of launches that is run until some time is over. `close` it."""

    def __init__(self, steps: Sequence[Launch], ctx: int, tier: Tier, threads: int) -> None:
        addresses = compiler(tier).build(step.kernel for step in steps)
        self._records = array("Q", table(steps, addresses))
        self._num, self._ctx = len(steps), ctx
        self._team = Team(threads, compiler(tier))
        self.close: Callable[[], None] = self._team.close

    def runs_a_second(self) -> float:
        """Runs of the whole table."""
        began_s, runs = perf_counter(), 0
        while not runs or perf_counter() - began_s < LEAST_S:
            assert self._team.run(self._records.buffer_info()[0], self._num, self._ctx)
            runs += 1
        return runs / (perf_counter() - began_s)


def of_op(op: Op, rig: Rig, tier: Tier, threads: int) -> tuple[Sample, Callable[[], None]]:
    """Runs of an op a second, and what ends its threads. The rig must outlive both."""
    steps = launches(op, rig)
    ctx = rig.context()
    rig.keep.append(ctx)
    timed = Timed(steps, ctx.ctypes.data, tier, threads)
    return lambda: {"runs": timed.runs_a_second()}, timed.close


class Products:
    """One activation row times matrices of one format, one after the other, out of memory.

    rows, cols: of a matrix. So many matrices lie side by side in huge pages, as blocks do, that
    they take at least `least_bytes`; each is a launch behind a barrier. An `Env` of its ops.
    """

    num_blocks, page_tokens, kv_element = 1, 64, "f16"

    def __init__(
        self, format: FormatCode, rows: int, cols: int, least_bytes: int, tier: Tier, threads: int
    ) -> None:
        size = FORMATS[format].matrix_bytes(rows, cols)
        count = -(-least_bytes // size)
        self.num_bytes = count * size
        self._tier, self._threads = tier, threads
        self._spans: dict[str, Span] = {}
        self._weights = HostMemory().reserve(count * round_up(size, 64))
        data = random_tiles(FORMATS[format], rows, cols, np.random.default_rng(1))
        for n in range(count):
            self._weights.view(n * round_up(size, 64), size)[:] = data
        self._stride = round_up(size, 64)

        is_quantized = FORMATS[format].is_quantized
        source = Buffer("src", cols, element=Element.Q8 if is_quantized else Element.F32)
        target = Buffer("dst", rows)
        steps = [
            step
            for n in range(count)
            for step in launches(
                MatMul(source, target, Weight(str(n), 0, format, rows, cols)), self
            )
        ]
        self._ctx = array("q", bytes(8 * Ctx.WORDS))
        for word in (Ctx.ONE, Ctx.NUM_TOKENS, Ctx.TOKEN_PANELS, Ctx.NUM_THREADS):
            self._ctx[word] = 1
        self._ctx[Ctx.NUM_THREADS] = threads
        self._timed = Timed(steps, self._ctx.buffer_info()[0], tier, threads)

    def buffer(self, buffer: Buffer) -> int:
        """Address of the one row."""
        if buffer.name not in self._spans:
            self._spans[buffer.name] = HostMemory().reserve(buffer.stride_bytes)
        return self._spans[buffer.name].address

    def weight(self, weight: Weight) -> int:
        """Address of a matrix."""
        return self._weights.address + int(weight.role) * self._stride

    def const(self, const: Const) -> int:
        """There are none."""
        raise NotImplementedError

    def block_slot(self, block: int) -> int:
        """Blocks are numbered as they are."""
        return block

    def sample(self) -> dict[str, float]:
        """GB of weights a second."""
        return {"GB": self._timed.runs_a_second() * self.num_bytes / 1e9}

    def wall(self) -> dict[str, float]:
        """GB a second of a plain read loop over as many bytes, with as many threads."""
        rates = read_rates(self.num_bytes, self._threads, compiler(self._tier), 1)
        return {"GB": rates[0] / 1e9}

    def close(self) -> None:
        """End the threads and give the memory back."""
        self._timed.close()
        for span in (self._weights, *self._spans.values()):
            span.close()
