"""Engines in processes of their own, and what the kernel says that they cost."""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitllm.engine import Engine, Request
from tests.models.native import opened

ROOT = Path(__file__).parents[2]
PAGE_BYTES = mmap.PAGESIZE

# --- what the kernel counts -------------------------------------------------------------------


def read_bytes() -> int:
    """Bytes that this process took from disks."""
    return _field(Path("/proc/self/io"), "read_bytes")


def peak_bytes() -> int:
    """The most memory that was resident in this process since `reset_peak`."""
    return _field(Path("/proc/self/status"), "VmHWM") * 1024


def reset_peak() -> None:
    """Start `peak_bytes` afresh."""
    Path("/proc/self/clear_refs").write_text("5")


def _field(path: Path, name: str) -> int:
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def counts_direct_reads(folder: Path) -> bool:
    """Whether the filesystem of `folder` has direct reads, and the kernel counts them."""
    path = folder / "probe"
    path.write_bytes(bytes(PAGE_BYTES))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        os.fsync(fd)
        before = read_bytes()
        os.preadv(fd, [mmap.mmap(-1, PAGE_BYTES)], 0)
        return read_bytes() == before + PAGE_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink()


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    with path.open("rb") as file:
        flags, protection = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=protection)
        there = (ctypes.c_ubyte * -(-len(mapped) // PAGE_BYTES))()
        start = ctypes.c_char.from_buffer(mapped)
        error = mincore(ctypes.addressof(start), len(mapped), there)
        del start
        mapped.close()
    assert not error, os.strerror(ctypes.get_errno())
    return PAGE_BYTES * sum(flag & 1 for flag in there)


# --- engines ----------------------------------------------------------------------------------


async def take_steps(engine: Engine, num_steps: int) -> list[int]:
    """Tokens of exactly so many steps, each of which computes one token."""
    tokens: list[int] = []
    async for delta in engine.generate(Request((1,), max_tokens=num_steps)):
        assert delta.error is None, delta.error
        tokens += delta.tokens
    assert len(tokens) == num_steps
    return tokens


@dataclass(frozen=True)
class Reading:
    """What an engine says that it read, and what the kernel says."""

    page_ins: int
    bytes_read: int
    kernel_bytes: int

    def since(self, earlier: Reading) -> Reading:
        """What was read between the two."""
        return Reading(
            self.page_ins - earlier.page_ins,
            self.bytes_read - earlier.bytes_read,
            self.kernel_bytes - earlier.kernel_bytes,
        )


async def settled(engine: Engine) -> Reading:
    """What was read so far, once nothing is on its way any more."""
    latest = await _reading(engine)
    while True:
        await asyncio.sleep(0.02)  # a block may be read ahead
        before, latest = latest, await _reading(engine)
        if before == latest:
            return latest


async def _reading(engine: Engine) -> Reading:
    pages = (await engine.stats()).pages
    return Reading(pages.page_ins, pages.bytes_read, read_bytes())


def fixed_bytes(path: str, num_steps: int, **config: Any) -> int:
    """What a model takes besides its blocks while `take_steps` runs."""

    async def ask() -> int:
        async with opened(Path(path), **config) as loaded:
            async for _ in loaded.engine.generate(Request((1,), max_tokens=num_steps)):
                return (await loaded.engine.stats()).pages.fixed_bytes
        raise AssertionError("no token came")

    return asyncio.run(ask())


# --- processes --------------------------------------------------------------------------------

_MAIN = """
import importlib, json, sys
module, name, arguments = json.load(sys.stdin)
result = getattr(importlib.import_module(module), name)(**arguments)
print(json.dumps(result))
"""


def in_child(function: Callable[..., Any], **arguments: Any) -> Any:
    """What `function`, of a module and not of a test, returns in a process of its own.

    Arguments and result travel as JSON.
    """
    child = subprocess.run(
        [sys.executable, "-c", _MAIN],
        input=json.dumps([function.__module__, function.__name__, arguments], default=str),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])
