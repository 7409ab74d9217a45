"""Threads that are ours, on made-up machines."""

from pathlib import Path

import pytest

from jitllm.jit import threads


def machine(root: Path, files: dict[str, str]) -> Path:
    """A root folder with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def topology(cores: list[list[int]], file: str = "core_cpus_list") -> dict[str, str]:
    """Files of a machine whose cores have these logical CPUs."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{file}": ",".join(map(str, core))
        for core in cores
        for cpu in core
    }


@pytest.mark.parametrize("file", ["core_cpus_list", "thread_siblings_list"])
@pytest.mark.parametrize(
    ("mask", "cores"), [([0, 1, 2, 3], 2), ([0, 2], 1), ([0, 1], 2), ([3], 1), ([0, 9], 2)]
)
def test_siblings_count_once(tmp_path: Path, file: str, mask: list[int], cores: int) -> None:
    root = machine(tmp_path, topology([[0, 2], [1, 3]], file))
    assert threads.num_cores(mask, root) == cores


def test_without_topology_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert threads.num_cores([0, 1, 2], tmp_path) == 3


V2 = "proc/self/cgroup"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({V2: "0::/"}, None),
        ({V2: "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ({V2: "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1.5),
        (
            {
                V2: "0::/a/b",
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000",
                "sys/fs/cgroup/a/cpu.max": "300000 100000",
            },
            3.0,
        ),
        ({V2: "0::/of/the/host", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        ({V2: "0::/../../up", "sys/fs/cgroup/up/cpu.max": "50000 100000"}, 0.5),
        (
            {
                V2: "7:memory:/m\n4:cpu,cpuacct:/x/y",
                "sys/fs/cgroup/cpu,cpuacct/x/y/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/x/y/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        (
            {
                V2: "1:cpu:/\n0::/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000",
                "sys/fs/cgroup/unified/cpu.max": "400000 100000",
            },
            2.0,
        ),
        ({V2: "nonsense\n::\n0::/", "sys/fs/cgroup/cpu.max": "what is this"}, None),
        ({V2: "0::/", "sys/fs/cgroup/cpu.max": "100000 0"}, None),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert threads.cpu_quota(machine(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("limit", "expected"), [("max 100000", 4), ("250000 100000", 3), ("10000 100000", 1)]
)
def test_the_smaller_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int
) -> None:
    monkeypatch.setattr(threads, "cpu_mask", lambda: frozenset(range(8)))
    files = topology([[n, n + 4] for n in range(4)])
    root = machine(tmp_path, {**files, V2: "0::/", "sys/fs/cgroup/cpu.max": limit})
    assert threads.default_threads(root) == expected


def test_this_machine_has_a_thread_for_us() -> None:
    assert 1 <= threads.default_threads() <= len(threads.cpu_mask())
