"""CPU devices of a host: one for each NUMA node, or shares of the cores where there is one node.

Knows /sys of Linux; elsewhere a host has one node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jitllm.devices.choose import AvailableDevice
from jitllm.devices.grammar import FLAG
from jitllm.errors import UsageError
from jitllm.jit.threads import num_cores

ROOT = Path("/")

_FIELD = re.compile(r"(MemTotal|MemFree|FilePages|Shmem):\s+([0-9]+) kB")


@dataclass(frozen=True, slots=True)
class NumaNode:
    """Memory and the logical CPUs next to it, as far as we may use them."""

    number: int
    cpus: frozenset[int]
    num_cores: int
    """Physical ones among `cpus`."""
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class CpuShare:
    """What a CPU device computes with. cpus: logical ones to keep to; None: any of ours."""

    num_threads: int
    cpus: frozenset[int] | None = None


def numa_nodes(mask: Iterable[int], root: Path = ROOT) -> tuple[NumaNode, ...]:
    """NUMA nodes with CPUs of `mask` and memory, by number; none where the kernel shows none."""
    ours = frozenset(mask)
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = ours & _cpu_list(_read(folder / "cpulist"))
        memory = {name: int(kib) << 10 for name, kib in _FIELD.findall(_read(folder / "meminfo"))}
        if cpus and memory.get("MemTotal"):
            cached = memory.get("FilePages", 0) - memory.get("Shmem", 0)
            nodes.append(
                NumaNode(
                    number=int(folder.name[4:]),
                    cpus=cpus,
                    num_cores=num_cores(cpus, root),
                    free_bytes=memory.get("MemFree", 0) + max(cached, 0),
                    total_bytes=memory["MemTotal"],
                )
            )
    return tuple(sorted(nodes, key=lambda node: node.number))


def cpu_devices(
    num_threads: int,
    nodes: Sequence[NumaNode],
    free_bytes: int,
    total_bytes: int,
    *,
    node: str = "",
) -> tuple[AvailableDevice, ...]:
    """The CPU devices that a host offers.

    With several NUMA nodes one for each of them. Otherwise cpu:0 to one less than there are
    threads: whichever are named share the threads and the host's memory. node: the host's name
    in a cluster.
    """
    if len(nodes) > 1:
        return tuple(
            AvailableDevice(
                "cpu",
                ordinal,
                f"NUMA node {numa.number}",
                num_cores=numa.num_cores,
                free_bytes=min(numa.free_bytes, free_bytes),
                total_bytes=numa.total_bytes,
                node=node,
            )
            for ordinal, numa in enumerate(nodes)
        )
    return tuple(
        AvailableDevice(
            "cpu",
            ordinal,
            "a share of the host" if ordinal else "the host",
            on_request=ordinal > 0,
            num_cores=num_threads,
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            node=node,
        )
        for ordinal in range(num_threads)
    )


def cpu_shares(
    ordinals: Sequence[int], num_threads: int, nodes: Sequence[NumaNode]
) -> tuple[CpuShare, ...]:
    """Threads of each CPU device that was named, by ordinal in the same order.

    On several NUMA nodes a device keeps to its node's CPUs. Raises UsageError if there are more
    devices than threads.
    """
    threads = divide_cores(num_threads, len(ordinals))
    if len(nodes) < 2:
        return tuple(CpuShare(num) for num in threads)
    return tuple(
        CpuShare(min(num, nodes[ordinal].num_cores), nodes[ordinal].cpus)
        for num, ordinal in zip(threads, ordinals, strict=True)
    )


def divide_cores(num_threads: int, num_devices: int) -> tuple[int, ...]:
    """Threads for each of several CPU devices: at least one, as equal as can be, first ones first.

    Raises UsageError if there are more devices than threads.
    """
    if num_devices > num_threads:
        raise UsageError(
            f"{FLAG} names {num_devices} CPU devices and there are {num_threads} threads for them",
            "name fewer, or raise -threads",
        )
    return tuple(
        num_threads // num_devices + (i < num_threads % num_devices) for i in range(num_devices)
    )


def _cpu_list(text: str) -> frozenset[int]:
    """Numbers of a kernel's list like "0-3,8"."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
