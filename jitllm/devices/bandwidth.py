"""How fast this machine reads memory: the wall that decoding runs into.

A plain loop over memory that was written before, in huge pages as weights are. Knows the thread
team; knows no model.
"""

from __future__ import annotations

import ctypes
from array import array
from time import perf_counter

from jitllm.devices.memory import HostMemory, round_up
from jitllm.jit.cpu import Compiler
from jitllm.jit.team import Team
from jitllm.kernels.op import Ctx
from jitllm.kernels.read import CHUNK_BYTES, SUM_BYTES
from jitllm.kernels.read.cpu import launch
from jitllm.kernels.team import table

MAX_BYTES = 1 << 30
"""More memory is read no slower, and might not be there."""

LEAST_READ_BYTES = 64 << 20
"""A repetition goes over less memory again and again: some milliseconds, which a clock can see."""


def read_rates(num_bytes: int, threads: int, compiler: Compiler, repetitions: int) -> list[float]:
    """Bytes a second of reading so much memory with so many threads, one for each repetition.

    Rounded up to whole chunks, and down to MAX_BYTES. A first repetition is not counted.
    """
    size = round_up(max(min(num_bytes, MAX_BYTES), 1), CHUNK_BYTES)
    num_chunks, rounds = size // CHUNK_BYTES, -(-LEAST_READ_BYTES // size)
    ctx = array("q", bytes(8 * Ctx.WORDS))
    ctx[Ctx.ONE] = 1
    with (
        HostMemory().reserve(size + num_chunks * SUM_BYTES) as span,
        Team(threads, compiler) as team,
    ):
        # Memory that was never written is one page of zeros, over and over.
        ctypes.memset(span.address, 1, size)
        read = launch(span.address, num_chunks, span.address + size)
        records = array("Q", table([read] * rounds, compiler.build([read.kernel])))

        def rate() -> float:
            began_s = perf_counter()
            team.run(records.buffer_info()[0], rounds, ctx.buffer_info()[0])
            return rounds * size / (perf_counter() - began_s)

        rate()
        return [rate() for _ in range(repetitions)]
