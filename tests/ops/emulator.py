"""Kernels of another machine's tiers, on user-mode emulation.

A process of QEMU has the arena at the address that it has here. It is told in frames of words what
to call; its program is LLVM IR below, compiled as kernels are. Needs Debian's `qemu-user`,
`binutils-aarch64-linux-gnu` and `libc6-arm64-cross`, or what is called so elsewhere.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jitllm.jit.cache import ObjectCache, default_directory
from jitllm.jit.cpu import Emitter
from jitllm.jit.tiers import NEON, Tier
from jitllm.kernels.op import KernelSpec
from tests.ops.arena import ADDRESS, ARENA, FIXED_NOREPLACE, SIZE_BYTES, shared

QEMU, LINKER = "qemu-aarch64", "aarch64-linux-gnu-ld"
SYSTEM = Path("/usr/aarch64-linux-gnu")
LIBC = SYSTEM / "lib" / "libc.so.6"
PACKAGES = {QEMU: "qemu-user", LINKER: "binutils-aarch64-linux-gnu", LIBC: "libc6-arm64-cross"}

CPUS = {"neon": "cortex-a53", "neon-dotprod": "max"}
"""What each tier is emulated on: the first has nothing beyond NEON."""

Call = Callable[[int, int, int, int], None]
"""A kernel: (ctx, args, start, stop)."""

NUM_ARGS = 7
_READ_WRITE_EXECUTE, _SHARED, _NOW, _DIED_WITHIN_S = 7, 1, 2, 10

_LOADS = "\n  ".join(
    f"%p{n} = getelementptr i64, ptr %frame, i64 {n}\n  %a{n} = load i64, ptr %p{n}"
    for n in range(1, NUM_ARGS + 1)
)
_WORDS = ", ".join(f"i64 %a{n}" for n in range(1, NUM_ARGS + 1))
_PROGRAM = f"""
declare i64 @mmap(i64, i64, i32, i32, i32, i64)
declare i64 @read(i32, ptr, i64)
declare i64 @write(i32, ptr, i64)
declare void @_exit(i32) noreturn
declare ptr @dlopen(ptr, i32)
declare ptr @dlsym(ptr, ptr)

; Say where dlopen and dlsym are; then call what a frame names, and answer what it returned.
define void @_start() {{
  %frame = alloca [8 x i64]
  %second = getelementptr i64, ptr %frame, i64 1
  %at = call i64 @mmap(i64 {ADDRESS}, i64 {SIZE_BYTES}, i32 {_READ_WRITE_EXECUTE},
                       i32 {_SHARED | FIXED_NOREPLACE}, i32 {ARENA.fd}, i64 0)
  %mapped = icmp eq i64 %at, {ADDRESS}
  br i1 %mapped, label %greet, label %end
greet:
  store ptr @dlopen, ptr %frame
  store ptr @dlsym, ptr %second
  call i64 @write(i32 1, ptr %frame, i64 16)
  br label %next
next:
  %size = call i64 @read(i32 0, ptr %frame, i64 64)
  %whole = icmp eq i64 %size, 64
  br i1 %whole, label %do, label %end
do:
  %f = load ptr, ptr %frame
  {_LOADS}
  %r = call i64 %f({_WORDS})
  store i64 %r, ptr %frame
  call i64 @write(i32 1, ptr %frame, i64 8)
  br label %next
end:
  call void @_exit(i32 0)
  unreachable
}}
"""


def lacking() -> str:
    """What stands in the way of emulation, or nothing."""
    packages = [
        package
        for need, package in PACKAGES.items()
        if not (need.exists() if isinstance(need, Path) else shutil.which(need))
    ]
    return f"needs {', '.join(packages)}" if packages else ""


class Emulator:
    """A process on an emulated CPU, and the kernels of a tier in it."""

    def __init__(self, tier: Tier, cpu: str) -> None:
        self.tier = tier
        self._emitter = Emitter(tier)
        self._cache = ObjectCache(default_directory())
        self._kernels: dict[KernelSpec, int] = {}
        self._num_libraries = 0
        self._texts: list[NDArray[np.uint8]] = []
        self._folder = Path(tempfile.mkdtemp())
        program = self._link(
            "program",
            Emitter(NEON).compile(_PROGRAM),
            "-dynamic-linker",
            "/lib/ld-linux-aarch64.so.1",
        )
        self._process = subprocess.Popen(
            [QEMU, "-cpu", cpu, "-L", SYSTEM, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[ARENA.fd],
            cwd=self._folder,
        )
        self.close = weakref.finalize(self, _end, self._process, self._folder)
        self._dlopen, self._dlsym = struct.unpack("<2q", self._answer(16))

    def _link(self, name: str, code: bytes, *flags: str) -> Path:
        path = self._folder / name
        path.with_suffix(".o").write_bytes(code)
        command = [LINKER, "-o", path, path.with_suffix(".o"), LIBC, *flags]
        subprocess.run(command, check=True)
        return path

    def kernel(self, spec: KernelSpec) -> Call:
        """A kernel as a function (ctx, args, start, stop) on addresses of the arena."""
        address = self.address(spec)
        return lambda *words: self.call(address, *words) and None

    def address(self, spec: KernelSpec) -> int:
        """Where a kernel is in the process."""
        if spec not in self._kernels:
            self._kernels[spec] = self._load(spec, self._object_code(spec))
        return self._kernels[spec]

    def compile(self, spec: KernelSpec) -> Call:
        """As `kernel`, always compiled, and what `address` says from now on."""
        self._kernels[spec] = self._load(spec, self._emitter.object_code(spec))
        return self.kernel(spec)

    def _object_code(self, spec: KernelSpec) -> bytes:
        code = self._cache.load(self.tier, spec)
        if code is None:
            code = self._emitter.object_code(spec)
            self._cache.store(self.tier, spec, code)
        return code

    def _load(self, spec: KernelSpec, code: bytes) -> int:
        """Where a kernel is in the process."""
        self._num_libraries += 1
        path = self._link(f"{self._num_libraries}.so", code, "-shared")
        library = self.call(self._dlopen, self._text(str(path)), _NOW)
        assert library, f"{path} cannot be loaded"
        return self.function(spec.symbol, library)

    def function(self, name: str, library: int = 0) -> int:
        """Address of a function of a library, by default of the C library."""
        found = self.call(self._dlsym, library, self._text(name))
        assert found, f"there is no {name}"
        return found

    def call(self, function: int, *args: int) -> int:
        """What a function of integers returns. Raises ChildProcessError when it dies."""
        words = [function, *args, *[0] * (NUM_ARGS - len(args))]
        stdin = self._process.stdin
        assert stdin
        stdin.write(struct.pack("<8q", *words))
        stdin.flush()
        return int(struct.unpack("<q", self._answer(8))[0])

    def _text(self, text: str) -> int:
        """A C string that stays in the arena."""
        self._texts.append(shared(np.frombuffer(text.encode() + b"\0", np.uint8)))
        return int(self._texts[-1].ctypes.data)

    def _answer(self, size: int) -> bytes:
        stdout = self._process.stdout
        assert stdout
        data = stdout.read(size)
        if len(data) < size:
            code = self._process.wait(_DIED_WITHIN_S)
            raise ChildProcessError(f"the emulated {self.tier.name} process died: {code}")
        return data


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    process.kill()
    process.communicate()
    shutil.rmtree(folder)


@cache
def emulator(tier: Tier) -> Emulator:
    """One process a tier for the whole test session."""
    return Emulator(tier, CPUS[tier.name])
