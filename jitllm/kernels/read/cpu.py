"""Reading on the CPU: an item is a chunk of bytes."""

from __future__ import annotations

from jitllm.jit.emit import LANES, Kernel, i32v
from jitllm.kernels.op import Count, KernelSpec, Launch
from jitllm.kernels.read import CHUNK_BYTES, SUM_BYTES

ADDRESS, SUMS = range(2)
"""Argument words: where the bytes and the sums are, at multiples of 64."""

_VECTORS = 4
"""Vectors under way: more loads than the longest wait for one of them would hide no more."""


def launch(address: int, num_chunks: int, sums: int) -> Launch:
    """Read `num_chunks` chunks."""
    return Launch(KernelSpec.of("read"), Count.ONE, num_chunks, (address, sums))


def emit(k: Kernel) -> None:
    """The kernel."""
    step = 4 * LANES
    with k.items() as item:
        start = k.arg(ADDRESS) + item * CHUNK_BYTES
        sums = [k.var(k.const(0, i32v)) for _ in range(_VECTORS)]
        with k.loop(start, start + CHUNK_BYTES, _VECTORS * step) as at:
            for n, var in enumerate(sums):
                var.set(var.get() ^ k.load(at + n * step, i32v, align=step))
        total = sums[0].get()
        for var in sums[1:]:
            total = total ^ var.get()
        k.store(total, k.arg(SUMS) + item * SUM_BYTES, align=step)
