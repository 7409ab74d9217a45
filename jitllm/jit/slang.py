"""Compiling kernels for GPUs: a `gpu.slang` and its definitions -> SPIR-V or CUDA C++.

The compiler is the one in the `slangpy` wheel. It runs in a child process that is started when
something is missing from the cache and ends with the build. Knows no device.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from jitllm.errors import JitllmError
from jitllm.jit.cache import ObjectCache
from jitllm.jit.cpu import Progress
from jitllm.kernels.op import KernelSpec

_KERNELS = Path(__file__).resolve().parent.parent / "kernels"
_SPIRV_HEADER_WORDS = 5
_SPIRV_DEBUG = (3, 5, 6)  # OpSource, OpName, OpMemberName
_CHILD = Path(__file__).with_name("slang_child.py")


class Target(IntEnum):
    """What to compile to; the values are the compiler's."""

    SPIRV = 6
    CUDA = 17


class SlangCompiler:
    """Turns kernel specs into code for one target. `compiled` counts what the cache lacked."""

    def __init__(self, target: Target, object_cache: ObjectCache) -> None:
        self.target = target
        self.compiled = 0
        self._cache = object_cache
        self._code: dict[KernelSpec, bytes] = {}

    def build(
        self, specs: Iterable[KernelSpec], progress: Progress | None = None
    ) -> dict[KernelSpec, bytes]:
        """Code of all specs; compiles what neither this compiler nor the cache holds.

        Raises `JitllmError` with the compiler's message, file and line, where a kernel is wrong.
        """
        wanted = [s for s in dict.fromkeys(specs) if s not in self._code]
        cold = []
        for spec in wanted:
            if (packed := self._cache.read(spec.op, self._key(spec))) is None:
                cold.append(spec)
            else:
                self._code[spec] = zlib.decompress(packed)
        if cold:
            self._compile(cold, progress)
        return self._code

    def _key(self, spec: KernelSpec) -> str:
        return f"{sources_fingerprint(spec.op)} {self.target.name} {spec}"

    def _compile(self, specs: Sequence[KernelSpec], progress: Progress | None) -> None:
        with _Child() as child:
            for done, spec in enumerate(specs):
                if progress:
                    progress(done, len(specs))
                self._code[spec] = code = child.compile(spec, self.target)
                self._cache.write(spec.op, self._key(spec), zlib.compress(code))
                self.compiled += 1
        if progress:
            progress(len(specs), len(specs))


@cache
def sources_fingerprint(op: str) -> str:
    """Hash of everything that an op's code depends on besides its definitions."""
    digest = xxhash.xxh3_128()
    for path in sorted([*_KERNELS.glob("*.slang"), _source(op), _CHILD, Path(__file__)]):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    digest.update(compiler_version().encode())
    return digest.hexdigest()


def _source(op: str) -> Path:
    return _KERNELS / op / "gpu.slang"


def definitions(spec: KernelSpec) -> dict[str, str]:
    """Preprocessor definitions of a spec's parameters: their names in capitals."""
    return {name.upper(): _literal(value) for name, value in spec.params}


def _literal(value: int | float | str | bool) -> str:
    if isinstance(value, bool | int):
        return str(int(value))
    return f"{value!r}f" if isinstance(value, float) else value


def mistakes(diagnostics: str) -> str:
    """The compiler's errors on one line, as `mine/gpu.slang:6: undefined identifier 'x'`."""
    parts = re.split(r"^(?=(?:error|warning|note)\b)", diagnostics, flags=re.MULTILINE)
    found = []
    for part in parts:
        if part.startswith("error"):
            first, *others = part.splitlines()
            where = next((o.split("--> ")[1] for o in others if "--> " in o), "")
            details = [o.split("^ ")[-1].rstrip(".") for o in others if "^ " in o]
            what = details[0] if details else first.split(": ", 1)[-1]
            place = where.removeprefix(f"{_KERNELS}/").rsplit(":", 1)[0]
            found.append(f"{place}: {what}" if place else what)
    return "; ".join(found) or diagnostics.strip()


def without_debug_info(spirv: bytes) -> bytes:
    """SPIR-V without names, and without naming its language, which older validators do not know."""
    words = array("I", spirv)
    kept, at = words[:_SPIRV_HEADER_WORDS], _SPIRV_HEADER_WORDS
    while at < len(words):
        length, opcode = words[at] >> 16, words[at] & 0xFFFF
        if opcode not in _SPIRV_DEBUG:
            kept += words[at : at + length]
        at += length
    return kept.tobytes()


@cache
def compiler_version() -> str:
    """Of the wheel that brings the compiler. Raises `JitllmError` where it is not installed."""
    try:
        return metadata.version("slangpy")
    except metadata.PackageNotFoundError as error:
        remedy = "pip install 'jitllm[vulkan]'"
        raise JitllmError("the Slang compiler is not installed", remedy) from error


def _libraries() -> Path:
    """The folder of the compiler, without importing the package around it."""
    compiler_version()
    found = importlib.util.find_spec("slangpy")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0])


class _Child:
    """The compiler's process; `with` starts and ends it."""

    def __enter__(self) -> _Child:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CHILD), str(_libraries())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self

    def compile(self, spec: KernelSpec, target: Target) -> bytes:
        """Code of one kernel."""
        job = {
            "path": str(_source(spec.op)),
            "include": str(_KERNELS),
            "defines": definitions(spec),
            "target": int(target),
        }
        answer = self._ask(job)
        if answer is None:
            raise JitllmError(f"the Slang compiler died of {spec.symbol}: {self._last_words()}")
        if not answer["ok"]:
            raise JitllmError(f"{spec.symbol} does not compile: {mistakes(answer['text'])}")
        code = base64.b64decode(answer["code"])
        return without_debug_info(code) if target is Target.SPIRV else code

    def _ask(self, job: dict[str, Any]) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._process.stdout.readline()
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer

    def _last_words(self) -> str:
        """How it ended, and the last line that it said."""
        assert self._process.stderr is not None
        said = self._process.stderr.read().strip().splitlines()
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}: {said[-1]}" if said else how

    def __exit__(self, *error: object) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.wait()
