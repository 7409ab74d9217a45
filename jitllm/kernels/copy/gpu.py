"""How tables of copies are run on a GPU."""

from __future__ import annotations

from jitllm.kernels.gpu import MAX_THREADS, GpuLaunch, Traits
from jitllm.kernels.op import KernelSpec

MAX_GROUPS = 1 << 12
"""More copies than that take turns."""


def kernel(traits: Traits, unit_bytes: int) -> KernelSpec:
    """For copies whose addresses, strides and lengths are multiples of `unit_bytes`, 2 or 4."""
    threads = max(MAX_THREADS // 2, traits.subgroup_size)
    return KernelSpec.of(
        "copy", subgroup=traits.subgroup_size, threads=threads, unit_bytes=unit_bytes
    )


def launch(spec: KernelSpec, table: int, count: int) -> GpuLaunch:
    """`count` copies of the records at address `table`."""
    groups = min(count, MAX_GROUPS)
    return GpuLaunch(spec, (groups, 1, 1), (table, count, groups))
