"""How much memory a model may take on this host when nobody says.

Knows /proc and control groups, versions 1 and 2. Knows no model. The files of the kernel are read
below a `root`, so that a test can lay out a machine of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jitllm.units import format_size

SHARE_PERCENT = 80
"""What of the memory in reach is taken: the rest is for the process and its neighbours."""

_UNLIMITED_BYTES = 1 << 60  # version 1 writes "no limit" as a number of about 2**63
_LIMIT_FILES = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}


@dataclass(frozen=True, slots=True)
class HostRoom:
    """What the host can give, and where the number comes from."""

    memory_bytes: int
    """The smaller of the limit of the control group and the memory that is available."""
    source: str
    """What set it, in a few words."""

    @property
    def budget_bytes(self) -> int:
        """The default of `-maxmem`."""
        return self.memory_bytes * SHARE_PERCENT // 100

    @property
    def explanation(self) -> str:
        """One line for people."""
        budget, memory = format_size(self.budget_bytes), format_size(self.memory_bytes)
        return f"{budget}, {SHARE_PERCENT} % of {memory} ({self.source})"


def probe(root: Path = Path("/")) -> HostRoom:
    """What this process may use of the machine whose files lie below `root`."""
    found = [
        HostRoom(limit, f"limit of the control group, {path}") for limit, path in _limits(root)
    ]
    available = available_bytes(root)
    if available is not None:
        found.append(HostRoom(available, "available memory"))
    return min(found, key=lambda host: host.memory_bytes, default=HostRoom(0, "unknown"))


def available_bytes(root: Path = Path("/")) -> int | None:
    """MemAvailable, or None where the kernel does not tell."""
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if name == "MemAvailable" and number and number[0].isdecimal():
            return int(number[0]) * 1024
    return None


def _limits(root: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """Every limit in force, with the file that sets it: a group is held by all those above it."""
    for version, mount, group in _memory_groups(root):
        for folder in (group, *group.parents):
            for name in _LIMIT_FILES[version]:
                path = mount / folder.relative_to("/") / name
                text = _read(root / path.relative_to("/")).strip()
                if text.isdecimal() and int(text) < _UNLIMITED_BYTES:
                    yield int(text), path


def _memory_groups(root: Path) -> Iterator[tuple[int, PurePosixPath, PurePosixPath]]:
    """(version, mount point, group below it) for each hierarchy that limits memory."""
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, group = (*line.split(":", 2), "", "")[:3]
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for mounted, below, mount in mounts:
            if mounted == version and group.startswith("/"):
                yield version, mount, _inside(PurePosixPath(group), below)


def _mounts(root: Path) -> Iterator[tuple[int, PurePosixPath, PurePosixPath]]:
    """(version, group that is mounted, where) for each mounted hierarchy that may limit memory."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        fields, _, filesystem = line.partition(" - ")
        below, mount = (*fields.split(), "", "", "", "", "")[3:5]
        kind, _, options = (*filesystem.split(), "", "", "")[:3]
        if not mount.startswith("/"):
            continue
        if kind == "cgroup2":
            yield 2, PurePosixPath(below), PurePosixPath(mount)
        elif kind == "cgroup" and "memory" in options.split(","):
            yield 1, PurePosixPath(below), PurePosixPath(mount)


def _inside(group: PurePosixPath, below: PurePosixPath) -> PurePosixPath:
    """`group` as seen from a mount of `below`; a container may see its own as the root."""
    if ".." in group.parts:
        return PurePosixPath("/")
    return PurePosixPath("/") / (group.relative_to(below) if group.is_relative_to(below) else "")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
