"""Compiling kernels for this processor: LLVM module -> object code -> addresses.

Object code is cached on disk (`cache.py`), so a warm start hands bytes to LLVM's linker and
compiles nothing. Knows LLVM; knows no op beyond "a folder under `kernels` with an `emit`".
"""

from __future__ import annotations

import ctypes
import importlib
import platform
from collections.abc import Callable, Iterable
from typing import Any

import llvmlite.binding as llvm

from jitllm.errors import UsageError
from jitllm.jit.cache import ObjectCache
from jitllm.jit.tiers import Tier
from jitllm.kernels.op import KernelSpec

Progress = Callable[[int, int], None]
"""Called with (kernels compiled, kernels to compile) during a cold start."""


class Compiler:
    """Turns kernel specs into addresses of native functions for one tier.

    The code lives as long as the compiler. `compiled` counts kernels that the cache lacked.
    Raises UsageError for a tier of another machine.
    """

    def __init__(self, tier: Tier, cache: ObjectCache) -> None:
        if tier.machine not in ("", platform.machine()):
            raise UsageError(f"tier {tier.name} is for {tier.machine}", "choose auto")
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.tier = tier
        self.compiled = 0
        self._cache = cache
        self._emitter = Emitter(tier)
        self._jit = llvm.create_lljit_compiler()
        self._libraries: list[Any] = []
        self._addresses: dict[KernelSpec, int] = {}

    def build(
        self, specs: Iterable[KernelSpec], progress: Progress | None = None
    ) -> dict[KernelSpec, int]:
        """Addresses of all specs; compiles what neither this compiler nor the cache holds."""
        wanted = [s for s in dict.fromkeys(specs) if s not in self._addresses]
        cached = {s: self._cache.load(self.tier, s) for s in wanted}
        objects = {s: code for s, code in cached.items() if code is not None}
        cold = [s for s in wanted if s not in objects]
        for done, spec in enumerate(cold):
            if progress:
                progress(done, len(cold))
            objects[spec] = code = self._emitter.object_code(spec)
            self._cache.store(self.tier, spec, code)
            self.compiled += 1
        if cold and progress:
            progress(len(cold), len(cold))
        for spec in wanted:
            self._addresses[spec] = self._link(spec, objects[spec])
        return self._addresses

    def _link(self, spec: KernelSpec, code: bytes) -> int:
        name = f"{spec.symbol}.{len(self._libraries)}"
        builder = llvm.JITLibraryBuilder().add_object_img(code).export_symbol(spec.symbol)
        library = builder.add_current_process().link(self._jit, name)
        self._libraries.append(library)
        return int(library[spec.symbol])


class Emitter:
    """Machine code of kernels for one tier, also of a machine that is not this one."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._machine: Any = None

    def object_code(self, spec: KernelSpec) -> bytes:
        """A relocatable object file; what it calls besides is the C library's."""
        return self.compile(emit_ir(self.tier, spec))

    def assembly(self, spec: KernelSpec) -> str:
        """The same as text."""
        module = self._optimised(emit_ir(self.tier, spec))
        return str(self._target_machine().emit_assembly(module))

    def compile(self, text: str) -> bytes:
        """Object code of a module of LLVM IR."""
        return bytes(self._target_machine().emit_object(self._optimised(text)))

    def _target_machine(self) -> Any:
        if self._machine is None:
            self._machine = _target(self.tier).create_target_machine(
                features=",".join(f"+{f}" for f in self.tier.features),
                opt=3,
                reloc="pic",
                codemodel="small",
            )
        return self._machine

    def _optimised(self, text: str) -> Any:
        machine = self._target_machine()
        module = llvm.parse_assembly(text)
        module.triple = machine.triple
        module.data_layout = str(machine.target_data)
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_unrolling = False
        options.loop_vectorization = False
        options.slp_vectorization = False
        passes = llvm.create_pass_builder(machine, options)
        passes.getModulePassManager().run(module, passes)
        return module


def _target(tier: Tier) -> Any:
    if tier.machine in ("", platform.machine()):
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        return llvm.Target.from_default_triple()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(f"{tier.machine}-unknown-linux-gnu")


def emit_ir(tier: Tier, spec: KernelSpec) -> str:
    """LLVM IR of one kernel: `jitllm.kernels.<op>.cpu.emit(Kernel, **params)`.

    A function that is no launch has `signature(**params)` beside `emit`: the parameter and result
    types for `Kernel`. Its `emit` returns the result.
    """
    from jitllm.jit.emit import Kernel

    emitter = importlib.import_module(f"jitllm.kernels.{spec.op}.cpu")
    params = dict(spec.params)
    signature = emitter.signature(**params) if hasattr(emitter, "signature") else {}
    kernel = Kernel(spec.symbol, tier, **signature)
    return str(kernel.finish(emitter.emit(kernel, **params)))


def native(address: int) -> Callable[[int, int, int, int], None]:
    """A kernel as a Python callable (ctx, args, start, stop); releases the GIL. For tests."""
    kind = ctypes.CFUNCTYPE(None, *([ctypes.c_int64] * 4))
    return kind(address)
