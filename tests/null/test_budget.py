"""The default budget, on machines laid out below a folder."""

from pathlib import Path

import pytest

from jitllm.memory.budget import HostRoom, available_bytes, probe

GIB = 1 << 30

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "33 30 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def machine(root: Path, files: dict[str, str], available_kib: int = 16 << 20) -> Path:
    files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {available_kib} kB\n"} | files
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_limit_it_is_what_is_available(tmp_path: Path) -> None:
    host = probe(machine(tmp_path, {}))
    assert host == HostRoom(16 * GIB, "available memory")
    assert host.budget_bytes == 16 * GIB * 80 // 100
    assert host.explanation == "12.80 GiB, 80 % of 16.00 GiB (available memory)"


def test_version_2_nested_groups_hold_each_other(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user.slice/app.scope/inner\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/user.slice/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/user.slice/app.scope/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/user.slice/app.scope/inner/memory.max": "max\n",
    }
    host = probe(machine(tmp_path, files))
    assert host.memory_bytes == 4 * GIB
    assert host.source == "limit of the control group, /sys/fs/cgroup/user.slice/memory.max"


def test_version_2_high_counts_as_a_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/a/memory.high": f"{3 * GIB}\n",
    }
    assert probe(machine(tmp_path, files)).memory_bytes == 3 * GIB


def test_version_1_nested(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/box/job\n0::/\n",
        "proc/self/mountinfo": V1_MOUNT,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/box/job/memory.limit_in_bytes": f"{5 * GIB}\n",
    }
    assert probe(machine(tmp_path, files)).memory_bytes == 2 * GIB


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    mount = V1_MOUNT.replace(" / /sys", " /docker/abc /sys")
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n",
        "proc/self/mountinfo": mount,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
    }
    assert probe(machine(tmp_path, files)).memory_bytes == GIB


@pytest.mark.parametrize("group", ["/gone/with/its/folder", "/../../outside", "nonsense"])
def test_a_group_that_is_not_there_is_no_limit(tmp_path: Path, group: str) -> None:
    files = {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": V2_MOUNT}
    assert probe(machine(tmp_path, files)).memory_bytes == 16 * GIB


def test_a_limit_above_what_is_available_does_not_matter(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/memory.max": f"{64 * GIB}\n",
    }
    assert probe(machine(tmp_path, files)).source == "available memory"


@pytest.mark.parametrize("text", ["", "x", "0::", "::\n:::\n", "a b - c\n - \n"])
def test_files_that_make_no_sense_are_no_limit(tmp_path: Path, text: str) -> None:
    files = {"proc/self/cgroup": text, "proc/self/mountinfo": text, "proc/meminfo": text}
    assert probe(machine(tmp_path, files)) == HostRoom(0, "unknown")


def test_this_machine_has_memory() -> None:
    available = available_bytes()
    assert available is not None
    assert 0 < probe().memory_bytes <= available * 2
