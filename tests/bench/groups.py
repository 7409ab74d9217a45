"""A control group of its own for a child process, so that it cannot have more memory than that.

The group is made below the one that this process is in, which is not changed, nor is any other.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

_ENTER = 'echo $$ > "$0" && exec "$@"'


class Group:
    """A control group for memory."""

    def __init__(self, folder: Path, limit_file: str) -> None:
        self._folder = folder
        self._limit_file = limit_file

    def limit(self, num_bytes: int) -> None:
        """What its processes may have together, their page cache included."""
        (self._folder / self._limit_file).write_text(str(num_bytes))

    def run(self, command: Sequence[str | Path], **choices: str) -> str:
        """What a command prints that runs in it. Raises `CalledProcessError` when it fails; one
        that was killed for want of memory does."""
        entering = ["sh", "-c", _ENTER, str(self._folder / "cgroup.procs")]
        done = subprocess.run(
            [*entering, *map(str, command)],
            check=False,
            capture_output=True,
            text=True,
            timeout=3600,
            input=choices.get("input"),
            cwd=choices.get("cwd"),
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout


@contextmanager
def memory_group(num_bytes: int) -> Iterator[Group]:
    """A group with this limit; skips the test where none can be made."""
    try:
        group, folder = _made()
    except OSError as error:
        pytest.skip(f"no child of the memory control group can be made: {error}")
    try:
        group.limit(num_bytes)
        yield group
    finally:
        for _ in range(50):  # the kernel lets go of the dead a moment later
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def _made() -> tuple[Group, Path]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            folder = Path("/sys/fs/cgroup/memory") / name[1:] / f"jitllm-bench-{os.getpid()}"
            folder.mkdir()
            return Group(folder, "memory.limit_in_bytes"), folder
    own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
    folder = Path("/sys/fs/cgroup") / own[1:] / f"jitllm-bench-{os.getpid()}"
    folder.mkdir()
    if not (folder / "memory.max").exists():
        folder.rmdir()
        raise OSError("groups there do not limit memory")
    return Group(folder, "memory.max"), folder
