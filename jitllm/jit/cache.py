"""Compiled kernels on disk, per user.

An entry is named by everything that its code depends on: the emitters' source, the LLVM version,
the tier's features, the kernel's constants (a GPU's: see `slang.py`). It is written by rename and
carries its own hash, so a damaged, truncated or foreign entry reads as absent and is compiled
again. What nobody has loaded for a month goes when something is stored.
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
import time
from functools import cache
from pathlib import Path

import xxhash

from jitllm.jit.tiers import Tier
from jitllm.kernels.op import KernelSpec

_PACKAGE = Path(__file__).resolve().parent.parent

_NOT_EMITTERS = ("reference.py", "gpu.py", "slang.py", "slang_child.py", "table.py")

UNUSED_S = 30 * 24 * 3600
"""Seconds after its last load that an entry is kept."""


def default_directory() -> Path | None:
    """`$XDG_CACHE_HOME/jitllm` or `~/.cache/jitllm`; None for a user without a home.

    Nothing else will do: code from a folder that others may write to is not ours to run.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "jitllm"
    except RuntimeError:
        return None


@cache
def emitters_fingerprint() -> str:
    """Hash of every source file that can change emitted code, and of the compiler's version."""
    import llvmlite

    digest = xxhash.xxh3_128()
    files = [*_PACKAGE.glob("kernels/**/*.py"), *_PACKAGE.glob("jit/*.py")]
    for path in sorted(p for p in files if p.name not in _NOT_EMITTERS):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    digest.update(f"{llvmlite.__version__} {platform.machine()} {platform.system()}".encode())
    return digest.hexdigest()


def _key(tier: Tier, spec: KernelSpec) -> str:
    return f"{emitters_fingerprint()} {tier} {spec}"


class ObjectCache:
    """A directory of object files. `None` as directory: nothing is kept."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._is_swept = False

    def _path(self, op: str, key: str) -> Path | None:
        if self.directory is None:
            return None
        name = xxhash.xxh3_128_hexdigest(key.encode())
        return self.directory / "objects" / f"{op}-{name}.o"

    def load(self, tier: Tier, spec: KernelSpec) -> bytes | None:
        """The object code of a tier's kernel, or None when it is absent or damaged."""
        return self.read(spec.op, _key(tier, spec))

    def store(self, tier: Tier, spec: KernelSpec, code: bytes) -> None:
        """Keep object code. A full or read-only disk only costs the next start time."""
        self.write(spec.op, _key(tier, spec), code)

    def read(self, op: str, key: str) -> bytes | None:
        """What was written under a key that names all that it depends on, or None."""
        path = self._path(op, key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a cache that we may only read is as good
            os.utime(path)
        digest, code = data[:16], data[16:]
        return code if code and xxhash.xxh3_128_digest(code) == digest else None

    def write(self, op: str, key: str, code: bytes) -> None:
        """Keep code under such a key, by rename; errors of the disk are passed over."""
        path = self._path(op, key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                try:
                    file.write(xxhash.xxh3_128_digest(code) + code)
                    file.flush()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
            self._sweep()
        except OSError:
            return

    def _sweep(self) -> None:
        """Drop what has not been loaded for long, once in this cache's life."""
        if self._is_swept:
            return
        self._is_swept = True
        oldest_s = time.time() - UNUSED_S
        for path in self.entries():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest_s:
                    path.unlink()

    def entries(self) -> list[Path]:
        """Files of the cache."""
        if self.directory is None:
            return []
        return sorted((self.directory / "objects").glob("*"))

    def size_bytes(self) -> int:
        """Bytes on disk."""
        total = 0
        for path in self.entries():
            with contextlib.suppress(FileNotFoundError):  # another process may be clearing
                total += path.stat().st_size
        return total

    def clear(self) -> int:
        """Remove every entry; returns how many there were."""
        entries = self.entries()
        for path in entries:
            path.unlink(missing_ok=True)
        return len(entries)
