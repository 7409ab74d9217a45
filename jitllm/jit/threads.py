"""How many threads are ours: physical cores of the CPU mask, and the CPU quota of the cgroups.

Also how they share Python's interpreter.

Knows /sys and /proc of Linux; elsewhere every logical CPU counts as a core.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")

SWITCH_INTERVAL_S = 0.0005
"""How long a Python thread may keep the interpreter from a step that comes back from native code.

Beside one busy thread a native step of 10 ms takes 15 ms at Python's own 5 ms, 10.7 ms at this.
"""


def let_steps_in() -> None:
    """For a process in which steps run beside other Python code: they wait for it hardly at all."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def default_threads(root: Path = ROOT) -> int:
    """The smaller of the physical cores and the CPU quota, at least 1."""
    cores = num_cores(cpu_mask(), root)
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def cpu_mask() -> frozenset[int]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_cores(mask: Iterable[int], root: Path = ROOT) -> int:
    """Physical cores among logical CPUs: siblings of one core count once."""
    cpus = root / "sys/devices/system/cpu"
    siblings = set()
    for cpu in mask:
        topology = cpus / f"cpu{cpu}" / "topology"
        listed = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        siblings.add(listed or f"cpu {cpu}")
    return len(siblings)


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs that the process's cgroups allow, the smallest of all nested ones; None for no limit.

    Versions 1 and 2, also both at once. A group that cannot be read sets no limit: inside a
    container the path names groups of the host.
    """
    quotas = [q for q in _quotas(root) if q is not None and q > 0]
    return min(quotas, default=None)


def _quotas(root: Path) -> Iterator[float | None]:
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            for group in _nested(path):
                for tree in (mount, mount / "unified"):
                    yield _ratio(*[*(_read(tree / group / "cpu.max") or "").split(), "", ""][:2])
        elif "cpu" in controllers.split(","):
            for group in _nested(path):
                for tree in (mount / controllers, mount / "cpu"):
                    yield _ratio(
                        _read(tree / group / "cpu.cfs_quota_us"),
                        _read(tree / group / "cpu.cfs_period_us"),
                    )


def _nested(path: str) -> list[PurePosixPath]:
    """A group and all groups around it, relative to the mount."""
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    return [PurePosixPath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _ratio(quota: str | None, period: str | None) -> float | None:
    """CPUs; None where there is no limit ("max", -1) or no such file."""
    try:
        return int(quota or "") / int(period or "")
    except (ValueError, ZeroDivisionError):
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
