"""What this host offers to compute on: its CPU devices, and the memory next to each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from jitllm.devices.choose import AvailableDevice
from jitllm.devices.cpus import ROOT, NumaNode, cpu_devices, numa_nodes
from jitllm.jit import tiers
from jitllm.jit.threads import cpu_mask, default_threads
from jitllm.memory import budget


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a host says of itself to others. threads: all that are ours there."""

    threads: int
    numa: tuple[NumaNode, ...]
    devices: tuple[AvailableDevice, ...]
    processor: str = ""
    tier: str = ""
    """Of instruction sets, the best."""


def report_host() -> HostReport:
    """What this host offers when nobody chooses, at this moment."""
    threads = default_threads()
    return HostReport(
        threads,
        numa_nodes(cpu_mask()),
        host_devices(threads),
        processor=tiers.cpu_name(),
        tier=tiers.choose().name,
    )


def host_devices(
    num_threads: int, root: Path = ROOT, *, node: str = ""
) -> tuple[AvailableDevice, ...]:
    """The CPU devices of the machine whose files lie below `root`.

    num_threads: of all of them together. node: the machine's name in a cluster.
    """
    return cpu_devices(
        num_threads,
        numa_nodes(cpu_mask(), root),
        free_bytes=budget.probe(root).memory_bytes,
        total_bytes=total_bytes(),
        node=node,
    )


def total_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
