"""A tier whose kernels are those of AMX, on any processor: the instructions of the matrix unit are
calls of functions here, which do what Intel's manual says of them.

The unit's state is in memory that tests can look at; a kernel of this tier runs in one thread at a
time. What would raise an exception on a processor is counted instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
from llvmlite import ir

from jitllm.jit.cache import ObjectCache
from jitllm.jit.cpu import Compiler, Emitter
from jitllm.jit.emit import Kernel, Value, i8, i16, i32, i32v, i64
from jitllm.jit.tiers import PLAIN, available
from tests.ops.arena import shared

TWIN = replace(
    [tier for tier in available() if not tier.has_amx][-1], name="amx-twin", has_amx=True
)

_CONFIG_BYTES, _TILE_BYTES, _NUM_TILES, _ROW_BYTES = 64, 1024, 8, 64
_IS_ON, _FAULTS, _PRODUCTS, _TILES = 64, 72, 80, 128
_STATE = shared(np.zeros(_TILES + _NUM_TILES * _TILE_BYTES, np.uint8))
"""The configuration, whether there is one, exceptions, products, registers."""

_POINTER = ir.PointerType()


def is_on() -> bool:
    """A configuration is loaded: somebody has not given the registers back."""
    return bool(_word(_IS_ON))


def num_faults() -> int:
    """Exceptions so far."""
    return _word(_FAULTS)


def num_products() -> int:
    """TDPBSSD so far."""
    return _word(_PRODUCTS)


def _word(at: int) -> int:
    return int(_STATE[at : at + 8].view(np.int64)[0])


class TwinCompiler(Compiler):
    """Compiles for the twin and keeps nothing. mistake: added to every product."""

    def __init__(self, mistake: int = 0) -> None:
        super().__init__(TWIN, ObjectCache(None))
        self._emitter = _TwinEmitter(mistake)


class _TwinEmitter(Emitter):
    def __init__(self, mistake: int) -> None:
        super().__init__(TWIN)
        self.mistake = mistake

    def compile(self, text: str) -> bytes:
        """Object code in which the unit's instructions are calls."""
        names = "|".join(_FUNCTIONS)
        text = re.sub(rf'^declare void @"llvm\.x86\.({names})".*$', "", text, flags=re.MULTILINE)
        text, num_calls = re.subn(rf'@"llvm\.x86\.({names})"', r'@"twin.\1"', text)
        return super().compile(text + definitions(self.mistake) if num_calls else text)


@cache
def definitions(mistake: int) -> str:
    """The functions, as LLVM IR."""
    module = ir.Module("twin")
    for name, (kinds, body) in _FUNCTIONS.items():
        k = Kernel(f"twin.{name}", PLAIN, module, kinds)
        k.function.linkage = "internal"
        args = [Value(k, k.b.ptrtoint(p.ir, i64)) if p.type == _POINTER else p for p in k.params]
        body(k, *args)
        if name == "tdpbssd" and mistake:
            row = _tile(k, args[0])
            k.store(k.load(row, i32) + mistake, row)
        k.finish()
    return "\n".join(str(function) for function in module.functions)


# --- state ----------------------------------------------------------------------------------------


def _state(k: Kernel, at: int) -> Value:
    return k.const(_STATE.ctypes.data + at)


def _count(k: Kernel, at: int) -> None:
    k.store(k.load(_state(k, at), i64) + 1, _state(k, at))


def _must(k: Kernel, condition: Value) -> None:
    with k.if_(condition.zext(i64).eq(0)):
        _count(k, _FAULTS)


def _tile(k: Kernel, tile: Value) -> Value:
    return _state(k, _TILES) + tile.zext(i64) * _TILE_BYTES


def _shape(k: Kernel, tile: Value) -> tuple[Value, Value]:
    """Rows of a register, and bytes of a row."""
    n = tile.zext(i64)
    rows = k.load(_state(k, 48) + n, i8).zext(i64)
    return rows, k.load(_state(k, 16) + n * 2, i16).zext(i64)


def _must_be_configured(k: Kernel, tile: Value) -> None:
    rows, row_bytes = _shape(k, tile)
    _must(k, k.load(_state(k, _IS_ON), i64).ne(0) & rows.ne(0) & row_bytes.ne(0))


def _clear(k: Kernel, at: Value, num_bytes: int) -> None:
    with k.loop(0, num_bytes, 64) as offset:
        k.store(k.const(0, i32v), at + offset)


# --- instructions ---------------------------------------------------------------------------------


def _ldtilecfg(k: Kernel, source: Value) -> None:
    """Palette 1 has 8 registers of 16 rows of 64 bytes; all that is reserved must be 0."""
    with k.loop(0, _CONFIG_BYTES) as at:
        k.store(k.load(source + at, i8), _state(k, 0) + at)
    _must(k, k.load(source, i8).eq(1))
    with k.loop(1, 16) as at:
        _must(k, k.load(source + at, i8).eq(0))
    with k.loop(0, 16) as n:
        rows, row_bytes = k.load(source + 48 + n, i8), k.load(source + 16 + n * 2, i16)
        _must(k, (rows >= 0) & (rows <= 16) & (row_bytes >= 0) & (row_bytes <= _ROW_BYTES))
        _must(k, rows.eq(0).zext(i8).eq(row_bytes.eq(0).zext(i8)))
        with k.if_(n >= _NUM_TILES):
            _must(k, rows.eq(0))
    _clear(k, _state(k, _TILES), _NUM_TILES * _TILE_BYTES)
    k.store(k.const(1), _state(k, _IS_ON))


def _tilerelease(k: Kernel) -> None:
    _clear(k, _state(k, 0), _CONFIG_BYTES)
    _clear(k, _state(k, _TILES), _NUM_TILES * _TILE_BYTES)
    k.store(k.const(0), _state(k, _IS_ON))


def _tilezero(k: Kernel, tile: Value) -> None:
    _must_be_configured(k, tile)
    _clear(k, _tile(k, tile), _TILE_BYTES)


def _tileloadd(k: Kernel, tile: Value, base: Value, stride: Value) -> None:
    """What is beyond the configured shape becomes 0."""
    _must_be_configured(k, tile)
    rows, row_bytes = _shape(k, tile)
    _clear(k, _tile(k, tile), _TILE_BYTES)
    with k.loop(0, rows) as row, k.loop(0, row_bytes) as at:
        byte = k.load(base + row * stride + at, i8)
        k.store(byte, _tile(k, tile) + row * _ROW_BYTES + at)


def _tilestored(k: Kernel, tile: Value, base: Value, stride: Value) -> None:
    _must_be_configured(k, tile)
    rows, row_bytes = _shape(k, tile)
    with k.loop(0, rows) as row, k.loop(0, row_bytes) as at:
        byte = k.load(_tile(k, tile) + row * _ROW_BYTES + at, i8)
        k.store(byte, base + row * stride + at)


def _tdpbssd(k: Kernel, product: Value, left: Value, right: Value) -> None:
    """Signed by signed; four bytes of a row of left meet a row of right."""
    for tile in (product, left, right):
        _must_be_configured(k, tile)
    (rows, row_bytes), (left_rows, depth), (right_rows, right_bytes) = (
        _shape(k, tile) for tile in (product, left, right)
    )
    _must(k, rows.eq(left_rows) & row_bytes.eq(right_bytes) & depth.eq(right_rows * 4))
    _count(k, _PRODUCTS)
    with k.loop(0, rows) as m, k.loop(0, right_rows) as p:
        at = _tile(k, product) + m * _ROW_BYTES
        total = k.load(at, i32v)
        a = k.splat(k.load(_tile(k, left) + m * _ROW_BYTES + p * 4, i32))
        b = k.load(_tile(k, right) + p * _ROW_BYTES, i32v)
        for i in range(4):
            total = total + (a << (24 - 8 * i)).sar(24) * (b << (24 - 8 * i)).sar(24)
        k.store(total, at)


_FUNCTIONS: dict[str, tuple[tuple[ir.Type, ...], Callable[..., None]]] = {
    "ldtilecfg": ((_POINTER,), _ldtilecfg),
    "tilerelease": ((), _tilerelease),
    "tilezero": ((i8,), _tilezero),
    "tileloadd64": ((i8, _POINTER, i64), _tileloadd),
    "tilestored64": ((i8, _POINTER, i64), _tilestored),
    "tdpbssd": ((i8, i8, i8), _tdpbssd),
}
