"""Runs one op natively on poisoned memory with guard bytes, for any tier.

Every buffer lies between guards; outputs are poisoned with NaN before the run (their padding is
zero, as in a device), and the guards and paddings are checked after it. What this processor lacks
runs on an emulated one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit import tiers
from jitllm.jit.cache import ObjectCache, default_directory
from jitllm.jit.cpu import Compiler, native
from jitllm.jit.emit import Kernel
from jitllm.jit.tiers import TIERS, Tier, missing
from jitllm.kernels.layout import ACT_RECORD_BYTES, FORMATS
from jitllm.kernels.op import (
    ALL_KEYS,
    PANEL_TOKENS,
    Buffer,
    Const,
    Count,
    Ctx,
    Element,
    KernelSpec,
    Launch,
    Op,
    Weight,
)
from tests.ops.amx_twin import TWIN, TwinCompiler
from tests.ops.arena import ARENA, shared
from tests.ops.emulator import CPUS, Call, Emulator, emulator, lacking

GUARD = 256
_COMPILERS: dict[Tier, Compiler] = {}


def obstacle(tier: Tier) -> str:
    """Why a tier cannot run here, or nothing."""
    if missing(tier) and tier.name in CPUS:
        return lacking()
    return tiers.obstacle(tier)


RUNNABLE = tuple(tier for tier in TIERS if not obstacle(tier))
"""Tiers that run here, on the processor or on an emulated one."""

HERE = [
    pytest.param(
        tier, id=tier.name, marks=pytest.mark.skipif(bool(obstacle(tier)), reason=obstacle(tier))
    )
    for tier in TIERS
]
"""Every tier, to be skipped where it cannot run."""

PRODUCTS_RUNNABLE = (*RUNNABLE, TWIN)
PRODUCTS_HERE = [*HERE, pytest.param(TWIN, id=TWIN.name)]
"""For matrix products, AMX's way with many rows besides."""


def calls(tier: Tier, specs: Iterable[KernelSpec]) -> dict[KernelSpec, Call]:
    """Kernels as functions."""
    if missing(tier):
        return {spec: emulator(tier).kernel(spec) for spec in specs}
    addresses = compiler(tier).build(specs)
    return {spec: native(address) for spec, address in addresses.items()}


def compiler(tier: Tier) -> Compiler:
    """One compiler a tier for the whole test session, with the user's cache."""
    if tier not in _COMPILERS:
        kept = ObjectCache(default_directory())
        _COMPILERS[tier] = TwinCompiler() if tier == TWIN else Compiler(tier, kept)
    return _COMPILERS[tier]


def uncached(tier: Tier) -> Compiler | Emulator:
    """What compiles and keeps nothing, for `piece`."""
    return emulator(tier) if missing(tier) else Compiler(tier, ObjectCache(None))


def piece(
    compiler: Compiler | Emulator, name: str, body: Callable[[Kernel], None]
) -> tuple[KernelSpec, Call]:
    """A kernel that is no op's: its spec in the compiler, and the function."""
    emitter = ModuleType(f"jitllm.kernels.{name}.cpu")
    emitter.emit = body  # type: ignore[attr-defined]
    spec = KernelSpec.of(name)
    sys.modules[emitter.__name__] = emitter
    try:
        if isinstance(compiler, Emulator):
            return spec, compiler.compile(spec)
        return spec, native(compiler.build([spec])[spec])
    finally:
        del sys.modules[emitter.__name__]


class Guarded:
    """Bytes between two guards of 0xA5; 64-byte aligned."""

    def __init__(self, size: int, fill: int = 0) -> None:
        self.size = size
        self.raw = ARENA.take(size + 2 * GUARD + 64)
        self.raw[:] = 0xA5
        self.offset = GUARD + (-(self.raw.ctypes.data + GUARD) % 64)
        self.view[:] = fill

    @property
    def view(self) -> NDArray[np.uint8]:
        """The bytes between the guards."""
        return self.raw[self.offset : self.offset + self.size]

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return int(self.raw.ctypes.data) + self.offset

    def check(self) -> None:
        """The guards are untouched."""
        assert (self.raw[: self.offset] == 0xA5).all(), "wrote before the buffer"
        assert (self.raw[self.offset + self.size :] == 0xA5).all(), "wrote past the buffer"


@dataclass
class Rig:
    """An `Env` for one op.

    arrays: value of every input buffer by name: f32 or i32 [rows, width], or uint8 [rows, stride]
    for Q8. weights: bytes by (role, block): packed matrices or f32 vectors; those of experts one
    after the other here, each in a place of its own in the rig.
    pages: KV pages of the rig, if the op needs them: tables[row] = list of page indices. ranges:
    keys that attention takes of each row; by default all.
    """

    num_tokens: int
    num_outputs: int = 0
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    weights: dict[tuple[str, int | None], bytes] = field(default_factory=dict)
    tokens: NDArray[np.int32] | None = None
    positions: NDArray[np.int32] | None = None
    row_of: NDArray[np.int32] | None = None
    outputs: NDArray[np.int32] | None = None
    sampling: Guarded | None = None
    num_threads: int = 1
    num_blocks: int = 1
    page_tokens: int = 64
    kv_element: str = "f32"
    page_bytes: int = 0
    num_pages: int = 0
    tables: list[list[int]] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory: dict[str, Guarded] = {}
        self.buffers: dict[str, Buffer] = {}
        self.keep: list[Any] = []
        self.pool = [Guarded(self.page_bytes, fill=0xFF) for _ in range(self.num_pages)]

    # --- Env ---------------------------------------------------------------------------------

    def buffer(self, buffer: Buffer) -> int:
        """Address of a buffer; the first use lays it out: inputs filled, outputs poisoned."""
        if buffer.name not in self.memory:
            rows = self.num_outputs if buffer.rows == "outputs" else self.num_tokens
            memory = Guarded(rows * buffer.stride_bytes)
            self.memory[buffer.name] = memory
            self.buffers[buffer.name] = buffer
            values = self.arrays.get(buffer.name)
            if buffer.element is Element.Q8:
                memory.view[:] = 0x7F if values is None else values.reshape(-1)
            elif buffer.element is Element.I32:
                integers = memory.view.view(np.int32).reshape(rows, -1)
                integers[:, : buffer.width] = -1 if values is None else values
            else:
                table = memory.view.view(np.float32).reshape(rows, buffer.stride_bytes // 4)
                table[:, : buffer.width] = np.nan if values is None else values
        return self.memory[buffer.name].address

    def weight(self, weight: Weight) -> int:
        """Address of a weight's bytes."""
        assert not weight.experts, "only the matrix of one expert has an address"
        key = f"weight {weight.role} {weight.block} {weight.expert}"
        if key not in self.memory:
            data = self.weights[weight.role, weight.block]
            if weight.expert is not None:
                num_bytes = FORMATS[weight.format].matrix_bytes(weight.rows, weight.cols)
                data = data[weight.expert * num_bytes : (weight.expert + 1) * num_bytes]
            self.memory[key] = Guarded(len(data))
            self.memory[key].view[:] = np.frombuffer(data, np.uint8)
        return self.memory[key].address

    def const(self, const: Const) -> int:
        """Address of a constant."""
        memory = Guarded(len(const.data))
        memory.view[:] = np.frombuffer(const.data, np.uint8)
        self.keep.append(memory)
        return memory.address

    def block_slot(self, block: int) -> int:
        """Blocks are numbered as they are."""
        return block

    # --- running -----------------------------------------------------------------------------

    def context(self) -> NDArray[np.int64]:
        """The step context of this rig."""
        ctx = shared(np.zeros(Ctx.WORDS, np.int64))
        ctx[Count.ONE] = 1
        ctx[Count.TOKENS] = self.num_tokens
        ctx[Count.OUTPUTS] = self.num_outputs
        ctx[Count.TOKEN_PANELS] = -(-self.num_tokens // PANEL_TOKENS)
        ctx[Count.OUTPUT_PANELS] = -(-self.num_outputs // PANEL_TOKENS)
        ctx[Ctx.NUM_THREADS] = self.num_threads
        for word, values in (
            (Ctx.TOKENS, self.tokens),
            (Ctx.POSITIONS, self.positions),
            (Ctx.ROW_OF, self.row_of),
            (Ctx.OUTPUTS, self.outputs),
        ):
            if values is not None:
                array = shared(np.ascontiguousarray(values, np.int32))
                self.keep.append(array)
                ctx[word] = array.ctypes.data
        if self.tables:
            rows = [
                shared(np.array([self.pool[p].address for p in row], np.int64))
                for row in self.tables
            ]
            self.keep.extend(rows)
            heads = shared(np.array([r.ctypes.data for r in rows], np.int64))
            self.keep.append(heads)
            ctx[Ctx.TABLES] = heads.ctypes.data
            ranges = self.ranges or [ALL_KEYS] * len(rows)
            self.keep.append(shared(np.array(ranges, np.int64)))
            ctx[Ctx.RANGES] = self.keep[-1].ctypes.data
        if self.sampling is not None:
            ctx[Ctx.SAMPLING] = self.sampling.address
        return ctx

    def run(self, op: Op, tier: Tier, pieces: int = 1) -> None:
        """Launch the op; its items are cut into `pieces` calls, as threads would. What is no tier
        of the CPU runs the rig itself."""
        if not isinstance(tier, Tier):
            tier.run(self, op)
            self.check()
            return
        emitter = importlib.import_module(type(op).__module__ + ".cpu")
        launches: list[Launch] = emitter.launches(op, self)
        ctx = self.context()
        functions = calls(tier, (launch.kernel for launch in launches))
        for launch in launches:
            args = shared(np.array([*launch.args, *[0] * 12][:12], np.int64))
            items = launch.factor * int(ctx[launch.count])
            call = functions[launch.kernel]
            cuts = [items * i // pieces for i in range(pieces + 1)]
            for start, stop in zip(cuts, cuts[1:], strict=False):
                if start < stop:
                    call(ctx.ctypes.data, args.ctypes.data, start, stop)
        self.check()

    def check(self) -> None:
        """Guards are whole and f32 paddings are still zero."""
        for name, memory in self.memory.items():
            memory.check()
            buffer = self.buffers.get(name)
            if buffer is not None and buffer.element is Element.F32:
                table = memory.view.view(np.float32).reshape(-1, buffer.stride_bytes // 4)
                assert (table[:, buffer.width :] == 0).all(), f"padding of {name} was written"
        for memory in [*self.pool, *self.keep]:
            if isinstance(memory, Guarded):
                memory.check()

    def value(self, name: str) -> NDArray[Any]:
        """A buffer's rows: f32 or i32 [rows, width], or uint8 records [rows, groups, 64]."""
        buffer, memory = self.buffers[name], self.memory[name]
        if buffer.element is Element.Q8:
            return memory.view.reshape(-1, buffer.stride_bytes // ACT_RECORD_BYTES, 64).copy()
        kind = np.int32 if buffer.element is Element.I32 else np.float32
        table = memory.view.view(kind).reshape(-1, buffer.stride_bytes // 4)
        return table[:, : buffer.width].copy()
