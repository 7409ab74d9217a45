"""The plain read loop: it leaves nothing out."""

from __future__ import annotations

import numpy as np
import pytest

from jitllm.devices import bandwidth
from jitllm.jit.cache import ObjectCache, default_directory
from jitllm.jit.cpu import Compiler
from jitllm.jit.tiers import PLAIN, Tier
from jitllm.kernels.read import CHUNK_BYTES, SUM_BYTES
from jitllm.kernels.read.cpu import launch
from tests.ops.arena import shared
from tests.ops.harness import HERE, Guarded, calls


@pytest.mark.parametrize("tier", HERE)
def test_every_byte_of_every_chunk_is_read(tier: Tier) -> None:
    num_chunks = 3
    data = np.random.default_rng(1).integers(0, 2**32, num_chunks * CHUNK_BYTES // 4, np.uint32)
    memory, sums = Guarded(data.nbytes), Guarded(num_chunks * SUM_BYTES)
    memory.view.view(np.uint32)[:] = data
    read = launch(memory.address, num_chunks, sums.address)
    args = shared(np.array(read.args, np.int64))
    for start, stop in ((0, 1), (1, num_chunks)):
        calls(tier, [read.kernel])[read.kernel](0, args.ctypes.data, start, stop)
    sums.check()
    expected = np.bitwise_xor.reduce(data.reshape(num_chunks, -1, SUM_BYTES // 4), axis=1)
    assert (sums.view.view(np.uint32).reshape(num_chunks, -1) == expected).all()


@pytest.mark.parametrize(
    ("asked", "read", "rounds"),
    [(1, CHUNK_BYTES, 256), (7 << 20, 7 << 20, 10), ((7 << 20) + 1, (7 << 20) + CHUNK_BYTES, 9)],
)
def test_a_repetition_reads_all_of_it_for_some_milliseconds(
    asked: int, read: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes as the rate is computed from: a clock that ticks once a look says so."""
    ticks = iter(range(100))
    monkeypatch.setattr(bandwidth, "perf_counter", lambda: float(next(ticks)))
    compiler = Compiler(PLAIN, ObjectCache(default_directory()))
    rates = bandwidth.read_rates(asked, 2, compiler, repetitions=3)
    assert rates == [float(read * rounds)] * 3
    assert read * rounds >= bandwidth.LEAST_READ_BYTES
