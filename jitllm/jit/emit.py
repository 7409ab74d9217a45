"""The expression layer that kernels are written in: values with operators, loops with `with`.

A `Kernel` is one native function under construction. A `Value` is a scalar or a vector with the
usual operators; `Var` is a mutable local. Vectors have 16 lanes unless an algorithm says
otherwise; LLVM splits them into whatever registers the tier has, and since no operation may be
reordered (no fast-math; fused only where `fma` is written), every tier computes the same bits.

Knows LLVM IR. Knows no op, no model, no cache.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from jitllm.jit.tiers import Tier

if TYPE_CHECKING:
    from jitllm.jit.dots import Dot

LANES = 16

i1, i8, i16, i32, i64, i128 = (ir.IntType(n) for n in (1, 8, 16, 32, 64, 128))
f16, f32, f64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_POINTER = ir.PointerType()


def vec(element: Any, lanes: int = LANES) -> Any:
    """A vector type."""
    return ir.VectorType(element, lanes)


f32v, i32v = vec(f32), vec(i32)


def lanes_of(element: Any, lanes: int) -> Any:
    """A vector type, or the scalar itself for one lane."""
    return vec(element, lanes) if lanes > 1 else element


def spans(count: int, lanes: int = LANES) -> list[tuple[int, int]]:
    """(offset, lanes) of the pieces that cover `count` elements: full vectors, then ever narrower
    ones, so that a ragged end is neither read nor written past."""
    pieces, offset = [], 0
    while offset < count:
        while lanes > count - offset:
            lanes //= 2
        pieces.append((offset, lanes))
        offset += lanes
    return pieces


def _element(kind: Any) -> Any:
    return kind.element if isinstance(kind, ir.VectorType) else kind


def _like(kind: Any, element: Any) -> Any:
    """`element` in the shape of `kind`."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _is_float(kind: Any) -> bool:
    return isinstance(_element(kind), ir.FloatType | ir.DoubleType | ir.HalfType)


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value of the function. Python numbers mixed in become constants of the same type.

    Integers are signed in `//`, `%`, `<`, `>`, `sar` and `to_float`; `>>` is a logical shift.
    """

    k: Kernel
    ir: Any

    @property
    def type(self) -> Any:
        """LLVM type."""
        return self.ir.type

    def _other(self, other: Value | float) -> Any:
        if isinstance(other, Value):
            if isinstance(self.type, ir.VectorType) and not isinstance(other.type, ir.VectorType):
                return self.k.splat(other, self.type.count).ir
            return other.ir
        return self.k.const(other, self.type).ir

    def _op(self, int_op: str, float_op: str, other: Value | float) -> Value:
        if (
            isinstance(other, Value)
            and isinstance(other.type, ir.VectorType)
            and not isinstance(self.type, ir.VectorType)
        ):
            return self.k.splat(self, other.type.count)._op(int_op, float_op, other)
        name = float_op if _is_float(self.type) else int_op
        return Value(self.k, getattr(self.k.b, name)(self.ir, self._other(other)))

    def __add__(self, other: Value | float) -> Value:
        return self._op("add", "fadd", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._op("sub", "fsub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._op("mul", "fmul", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._op("sdiv", "fdiv", other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: Value | float) -> Value:
        return (
            self.k.const(other, self.type) - self if not isinstance(other, Value) else other - self
        )

    def __rtruediv__(self, other: float) -> Value:
        return self.k.const(other, self.type) / self

    def __floordiv__(self, other: Value | int) -> Value:
        return self._op("sdiv", "fdiv", other)

    def __mod__(self, other: Value | int) -> Value:
        return self._op("srem", "frem", other)

    def __and__(self, other: Value | int) -> Value:
        return self._op("and_", "and_", other)

    def __or__(self, other: Value | int) -> Value:
        return self._op("or_", "or_", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._op("xor", "xor", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._op("shl", "shl", other)

    def __rshift__(self, other: Value | int) -> Value:
        return self._op("lshr", "lshr", other)

    def sar(self, other: Value | int) -> Value:
        """Arithmetic shift right."""
        return self._op("ashr", "ashr", other)

    def udiv(self, other: Value | int) -> Value:
        """Unsigned quotient."""
        return self._op("udiv", "udiv", other)

    def urem(self, other: Value | int) -> Value:
        """Unsigned remainder."""
        return self._op("urem", "urem", other)

    def __neg__(self) -> Value:
        if _is_float(self.type):
            return Value(self.k, self.k.b.fneg(self.ir))
        return Value(self.k, self.k.b.neg(self.ir))

    def _cmp(self, op: str, other: Value | float) -> Value:
        if _is_float(self.type):
            return Value(self.k, self.k.b.fcmp_ordered(op, self.ir, self._other(other)))
        return Value(self.k, self.k.b.icmp_signed(op, self.ir, self._other(other)))

    def __lt__(self, other: Value | float) -> Value:
        return self._cmp("<", other)

    def __le__(self, other: Value | float) -> Value:
        return self._cmp("<=", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._cmp(">", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._cmp(">=", other)

    def eq(self, other: Value | float) -> Value:
        """Equality (ordered for floats), lane by lane."""
        return self._cmp("==", other)

    def ne(self, other: Value | float) -> Value:
        """Inequality, lane by lane."""
        return self._cmp("!=", other)

    def __getitem__(self, lane: int | Value) -> Value:
        index = lane.ir if isinstance(lane, Value) else ir.Constant(i32, lane)
        return Value(self.k, self.k.b.extract_element(self.ir, index))

    def insert(self, lane: int, value: Value) -> Value:
        """The vector with one lane replaced."""
        return Value(self.k, self.k.b.insert_element(self.ir, value.ir, ir.Constant(i32, lane)))

    def part(self, start: int, count: int) -> Value:
        """Lanes [start, start + count) as a narrower vector."""
        return self.k.shuffle(self, self, range(start, start + count))

    # --- conversions, lane by lane -----------------------------------------------------------

    def _to(self, op: str, element: Any) -> Value:
        return Value(self.k, getattr(self.k.b, op)(self.ir, _like(self.type, element)))

    def to_float(self) -> Value:
        """Signed integer to f32 (round to nearest even)."""
        return self._to("sitofp", f32)

    def to_double(self) -> Value:
        """f32 or signed integer to f64."""
        return self._to("fpext" if _is_float(self.type) else "sitofp", f64)

    def to_single(self) -> Value:
        """f64 to f32 (round to nearest even)."""
        return self._to("fptrunc", f32)

    def to_long(self) -> Value:
        """Float to i64, towards zero. The value must be in range."""
        return self._to("fptosi", i64)

    def sext(self, element: Any) -> Value:
        """Signed widening."""
        return self._to("sext", element)

    def zext(self, element: Any) -> Value:
        """Unsigned widening."""
        return self._to("zext", element)

    def trunc(self, element: Any) -> Value:
        """The low bits."""
        return self._to("trunc", element)

    def bits(self, kind: Any) -> Value:
        """The same bits as another type of the same size."""
        return Value(self.k, self.k.b.bitcast(self.ir, kind))

    def as_f32(self) -> Value:
        """The bits of i32 lanes as f32."""
        return self.bits(_like(self.type, f32))

    def as_i32(self) -> Value:
        """The bits of f32 lanes as i32."""
        return self.bits(_like(self.type, i32))


@dataclass(frozen=True, slots=True, eq=False)
class Var:
    """A mutable local; LLVM keeps it in a register."""

    k: Kernel
    slot: Any
    kind: Any

    def get(self) -> Value:
        """The present value."""
        return Value(self.k, self.k.b.load(self.slot, typ=self.kind))

    def set(self, value: Value | float) -> None:
        """Replace the value."""
        v = value if isinstance(value, Value) else self.k.const(value, self.kind)
        self.k.b.store(v.ir, self.slot)


class Kernel:
    """One native function `void name(i64 ctx, i64 args, i64 start, i64 stop)`.

    It computes work items [start, stop) of a launch: `ctx` addresses the step context
    (`kernels.op.Ctx`), `args` the launch's argument words. Emit the body, then `finish()`.
    Other signatures (the thread team) pass `params` and `result`.
    """

    def __init__(
        self,
        name: str,
        tier: Tier,
        module: Any | None = None,
        params: Sequence[Any] = (i64, i64, i64, i64),
        result: Any = None,
    ) -> None:
        self.name = name
        self.tier = tier
        self.module = ir.Module(name) if module is None else module
        kind = ir.FunctionType(result or ir.VoidType(), list(params))
        self.function = ir.Function(self.module, kind, name)
        self._entry = self.function.append_basic_block("entry")
        body = self.function.append_basic_block("body")
        self.b = ir.IRBuilder(body)
        self._body = body
        self.params = tuple(Value(self, a) for a in self.function.args)

    @property
    def machine(self) -> str:
        """Where the function will run: the tier's machine, or else this one."""
        return self.tier.machine or platform.machine()

    def finish(self, result: Value | None = None) -> Any:
        """Close the function; returns the LLVM module."""
        if result is None:
            self.b.ret_void()
        else:
            self.b.ret(result.ir)
        ir.IRBuilder(self._entry).branch(self._body)
        return self.module

    # --- the launch --------------------------------------------------------------------------

    @property
    def start(self) -> Value:
        """First work item."""
        return self.params[2]

    @property
    def stop(self) -> Value:
        """One past the last work item."""
        return self.params[3]

    def ctx(self, word: int) -> Value:
        """A word of the step context, i64."""
        return self.load(self.params[0] + 8 * word, i64)

    def arg(self, index: int) -> Value:
        """An argument word of the launch, i64."""
        return self.load(self.params[1] + 8 * index, i64)

    # --- constants and vectors ---------------------------------------------------------------

    def const(self, number: float, kind: Any = i64) -> Value:
        """A constant of a scalar type, or of a vector type with equal lanes."""
        element = _element(kind)
        scalar = ir.Constant(element, float(number) if _is_float(element) else int(number))
        if isinstance(kind, ir.VectorType):
            return Value(self, ir.Constant(kind, [scalar] * kind.count))
        return Value(self, scalar)

    def lanes(self, numbers: Sequence[float], element: Any) -> Value:
        """A constant vector."""
        cast = float if _is_float(element) else int
        return Value(
            self,
            ir.Constant(
                vec(element, len(numbers)), [ir.Constant(element, cast(n)) for n in numbers]
            ),
        )

    def splat(self, scalar: Value, lanes: int = LANES) -> Value:
        """A scalar in every lane."""
        kind = vec(scalar.type, lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar.ir, ir.Constant(i32, 0))
        mask = ir.Constant(vec(i32, lanes), [ir.Constant(i32, 0)] * lanes)
        return Value(self, self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask))

    def opaque(self, integer: Value) -> Value:
        """The same i64, of whose origin LLVM knows nothing: it is kept rather than computed again.

        Addresses of rows that lie evenly apart would else be a chain of additions, one for every
        use: the longest way through a matrix product.
        """
        kind = ir.FunctionType(i64, [i64])
        return Value(self, self.b.asm(kind, "", "=r,0", [integer.ir], side_effect=False))

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes of the concatenation of `a` and `b`."""
        mask = ir.Constant(vec(i32, len(lanes)), [ir.Constant(i32, n) for n in lanes])
        return Value(self, self.b.shuffle_vector(a.ir, b.ir, mask))

    def concat(self, parts: Sequence[Value]) -> Value:
        """Vectors side by side. Equal widths, a power of two of them."""
        parts = list(parts)
        while len(parts) > 1:
            parts = [
                self.shuffle(a, b, range(a.type.count + b.type.count))
                for a, b in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0]

    # --- memory ------------------------------------------------------------------------------

    def _pointer(self, address: Value) -> Any:
        return self.b.inttoptr(address.ir, _POINTER)

    def load(self, address: Value, kind: Any, *, offset: int = 0, align: int = 1) -> Value:
        """A scalar or vector at an absolute address, or so many bytes behind it.

        offset: for many loads near one address. To LLVM that is one address and not many sums, each
        of which it would examine for itself: matrix products take 0.8 of the time to compile.
        """
        pointer = self._pointer(address)
        if offset:
            pointer = self.b.gep(pointer, [ir.Constant(i64, offset)], source_etype=i8)
        return Value(self, self.b.load(pointer, align=align, typ=kind))

    def store(self, value: Value, address: Value, *, align: int = 1, is_far: bool = False) -> None:
        """Write a scalar or vector.

        is_far: past the caches, which a whole aligned cache line of nobody's near future may be.
        Other threads see it after the next atomic change of ours.
        """
        write = self.b.store(value.ir, self._pointer(address), align=align)
        if is_far:
            write.set_metadata("nontemporal", self.b.module.add_metadata([ir.Constant(i32, 1)]))

    def prefetch(self, address: Value, *, is_read_once: bool = False) -> None:
        """Have the cache line of an address fetched. Any address will do: it is only a hint.

        is_read_once: nobody reads it after the next time, so it takes no room in outer caches.
        """
        locality = 0 if is_read_once else 3
        hint = (self.const(n, i32) for n in (0, locality, 1))  # to be read; data
        self.intrinsic("llvm.prefetch.p0", self.pointer(address), *hint)

    def load_part(self, address: Value, count: Value) -> Value:
        """`count` (i64, 0..16) f32 lanes at an address; the lanes beyond are zero and not read."""
        staged = self.stack(f32, LANES)
        self.store(self.const(0.0, f32v), staged)
        with self.loop(0, count) as i:
            self.store(self.load(address + i * 4, f32), staged + i * 4)
        return self.load(staged, f32v)

    def store_part(self, value: Value, address: Value, count: Value) -> None:
        """Write the first `count` (i64, 0..16) f32 lanes."""
        staged = self.stack(f32, LANES)
        self.store(value, staged)
        with self.loop(0, count) as i:
            self.store(self.load(staged + i * 4, f32), address + i * 4)

    def load_f16(self, address: Value, lanes: int = LANES) -> Value:
        """f16 lanes (one: a scalar) widened to f32, exactly."""
        kind = vec(i16, lanes) if lanes > 1 else i16
        return self.widen_f16(self.load(address, kind).zext(i32))

    def widen_f16(self, h: Value) -> Value:
        """f16 bits in the low half of i32 lanes (the high half zero) as f32, exactly."""
        if self.tier.f16c:
            return h.trunc(i16).bits(_like(h.type, f16))._to("fpext", f32)
        # Shift exponent and mantissa into place and multiply by 2^112: exact, denormals included.
        magnitude = ((h & 0x7FFF) << 13).as_f32() * float(2**112)
        is_special = (h & 0x7C00).eq(0x7C00)
        special = ((h & 0x3FF) << 13) | 0x7F800000
        bits = self.select(is_special, special, magnitude.as_i32())
        return (bits | ((h & 0x8000) << 16)).as_f32()

    def store_f16(self, value: Value, address: Value) -> None:
        """f32 lanes (or a scalar) rounded to f16, nearest even; overflow becomes infinity."""
        if self.tier.f16c:
            half = value._to("fptrunc", f16)
            self.store(half.bits(_like(value.type, i16)), address)
        else:
            self.store(self._narrow_f16(value.as_i32()).trunc(i16), address)

    def _narrow_f16(self, x: Value) -> Value:
        sign = (x >> 16) & 0x8000
        a = x & 0x7FFFFFFF
        # Normal: rebias and round to nearest even in integers.
        normal = (a - (112 << 23) + 0xFFF + ((a >> 13) & 1)) >> 13
        # Denormal: adding 0.5 lines the mantissa up with f16's smallest step and rounds it.
        tiny = (a.as_f32() + 0.5).as_i32() - 0x3F000000
        is_nan = a > 0x7F800000
        big = self.select(is_nan, self.const(0x7E00, x.type), self.const(0x7C00, x.type))
        half = self.select(a < 0x38800000, tiny, normal)
        return self.select(a >= 0x477FF000, big, half) | sign

    # --- between threads ---------------------------------------------------------------------
    #
    # Sequentially consistent. Addresses are aligned to the size of the integer.

    def atomic_load(self, address: Value, kind: Any = i64) -> Value:
        """An integer that other threads write."""
        pointer = self._pointer(address)
        return Value(self, self.b.load_atomic(pointer, "seq_cst", kind.width // 8, typ=kind))

    def atomic_store(self, value: Value, address: Value) -> None:
        """Write an integer that other threads read."""
        self._atomic("xchg", value, address)

    def atomic_add(self, value: Value, address: Value) -> Value:
        """Add to an integer; returns what was there before."""
        return self._atomic("add", value, address)

    def _atomic(self, op: str, value: Value, address: Value) -> Value:
        # A typed pointer: llvmlite checks the operand against it. It prints as opaque.
        pointer = self.b.inttoptr(address.ir, ir.PointerType(value.type))
        return Value(self, self.b.atomic_rmw(op, pointer, value.ir, "seq_cst"))

    # --- calls -------------------------------------------------------------------------------

    def call(self, address: Value, *args: Value) -> None:
        """Call the function at an address; it returns nothing."""
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
        self.b.call(self.b.inttoptr(address.ir, ir.PointerType(kind)), [a.ir for a in args])

    def intrinsic(self, name: str, *args: Value, result: Any = None) -> Value:
        """Call an LLVM intrinsic; `result` is its type, by default none."""
        return self._intrinsic(name, args, result or ir.VoidType())

    def pointer(self, address: Value) -> Value:
        """An address as what intrinsics take for one."""
        return Value(self, self._pointer(address))

    def call_c(self, name: str, result: Any, *args: Value, fixed: int | None = None) -> Value:
        """Call a C function of the process. fixed: how many arguments come before the `...`."""
        kinds = [a.type for a in args][:fixed]
        function = self.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, kinds, var_arg=fixed is not None)
            function = ir.Function(self.module, kind, name)
        return Value(self, self.b.call(function, [a.ir for a in args]))

    # --- arithmetic --------------------------------------------------------------------------

    def _intrinsic(self, name: str, args: Sequence[Value], result: Any) -> Value:
        kind = ir.FunctionType(result, [a.type for a in args])
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, kind, name)
        return Value(self, self.b.call(function, [a.ir for a in args]))

    def _overloaded(self, name: str, *args: Value) -> Value:
        kind = args[0].type
        short = {"float": "f32", "double": "f64"}[str(_element(kind))]
        suffix = f"v{kind.count}{short}" if isinstance(kind, ir.VectorType) else short
        return self._intrinsic(f"llvm.{name}.{suffix}", args, kind)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once. Scalars among vectors are splat."""
        widest = next((v for v in (a, b, c) if isinstance(v.type, ir.VectorType)), None)
        if widest is not None:
            n = widest.type.count
            a, b, c = (
                v if isinstance(v.type, ir.VectorType) else self.splat(v, n) for v in (a, b, c)
            )
        return self._overloaded("fma", a, b, c)

    def sqrt(self, a: Value) -> Value:
        """Square root, correctly rounded."""
        return self._overloaded("sqrt", a)

    def abs(self, a: Value) -> Value:
        """Absolute value of floats."""
        return self._overloaded("fabs", a)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        """yes where the condition holds, lane by lane."""
        return Value(self, self.b.select(condition.ir, yes.ir, no.ir))

    def max(self, a: Value, b: Value) -> Value:
        """a where a > b, else b (b where either is NaN)."""
        return self.select(a > b, a, b)

    def min(self, a: Value, b: Value) -> Value:
        """a where a < b, else b (b where either is NaN)."""
        return self.select(a < b, a, b)

    def round_to_int(self, a: Value) -> Value:
        """f32 to i32, nearest even, for |a| < 2^22: adding 1.5 * 2^23 leaves the integer in the
        mantissa's low bits."""
        magic = a + 12582912.0
        return magic.as_i32() - 0x4B400000

    def round(self, a: Value) -> Value:
        """f32 rounded to an integral f32, nearest even, for |a| < 2^22."""
        return (a + 12582912.0) - 12582912.0

    def exp(self, x: Value) -> Value:
        """e^x for x <= 88; below -87 the result is 0; NaN gives 0 or NaN.

        x = n ln 2 + r, |r| <= ln 2 / 2; a degree-7 Taylor polynomial of r (error under 1 ulp),
        scaled by 2^n in the exponent bits.
        """
        lo = x < -87.0
        x = self.min(self.max(x, self.const(-87.0, x.type)), self.const(88.0, x.type))
        n = self.round(x * 1.4426950408889634)
        r = self.fma(n, self.const(-0.693145751953125, x.type), x)
        r = self.fma(n, self.const(-1.42860682030941723212e-6, x.type), r)
        p = self.const(1 / 5040, x.type)
        for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            p = self.fma(p, r, self.const(c, x.type))
        scale = ((self.round_to_int(n) + 127) << 23).as_f32()
        return self.select(lo, self.const(0.0, x.type), p * scale)

    def log(self, x: Value) -> Value:
        """ln x of f32, within 1.5 ulp; below the smallest normal number -inf, infinity and NaN as
        they are.

        x = m 2^e with m in [sqrt(1/2), sqrt(2)); a degree-8 minimax polynomial of m - 1 (Cephes),
        and ln 2 in two parts, the first of which is exact when multiplied by e.
        """
        exponent = ((x.as_i32() - 0x3F3504F3).sar(23)).to_float()
        mantissa = (x.as_i32() - ((x.as_i32() - 0x3F3504F3) & -0x800000)).as_f32()
        r = mantissa - 1.0
        square = r * r
        p = self.const(7.0376836292e-2, x.type)
        for c in (
            -1.1514610310e-1,
            1.1676998740e-1,
            -1.2420140846e-1,
            1.4249322787e-1,
            -1.6668057665e-1,
            2.0000714765e-1,
            -2.4999993993e-1,
            3.3333331174e-1,
        ):
            p = self.fma(p, r, self.const(c, x.type))
        tail = self.fma(exponent, self.const(-2.12194440e-4, x.type), p * (r * square))
        tail = self.fma(square, self.const(-0.5, x.type), tail)
        y = self.fma(exponent, self.const(0.693359375, x.type), r + tail)
        y = self.select(x < 2.0**-126, self.const(float("-inf"), x.type), y)
        return self.select(x < float("inf"), y, x)

    def trailing_zeros(self, v: Value) -> Value:
        """Number of zero bits below the lowest one; the width of the integer where it is 0."""
        return Value(self, self.b.cttz(v.ir, ir.Constant(i1, 0)))

    def mask(self, lanes: Value) -> Value:
        """i1 lanes as an integer of that many bits, lane 0 lowest."""
        return lanes.bits(ir.IntType(lanes.type.count))

    def hsum(self, v: Value) -> Value:
        """Sum of the lanes as a fixed tree: halves are added until one lane is left."""
        return self._fold(v, lambda a, b: a + b)

    def hmax(self, v: Value) -> Value:
        """Largest lane."""
        return self._fold(v, self.max)

    def _fold(self, v: Value, combine: Any) -> Value:
        n = v.type.count
        while n > 1:
            n //= 2
            v = combine(v.part(0, n), v.part(n, n))
        return v[0]

    def dot(self, start: Value, max_u8: int) -> Dot:
        """A dot product of bytes that starts at `start`, i32 [16]; unsigned bytes are at most
        `max_u8`."""
        from jitllm.jit.dots import dot

        return dot(self, start, max_u8)

    # --- control -----------------------------------------------------------------------------

    def var(self, initial: Value | float, kind: Any | None = None) -> Var:
        """A mutable local with an initial value (`kind` when that is a Python number)."""
        kind = initial.type if isinstance(initial, Value) else kind
        with self.b.goto_block(self._entry):
            slot = self.b.alloca(kind)
        var = Var(self, slot, kind)
        var.set(initial)
        return var

    def stack(self, element: Any, count: int) -> Value:
        """Address of an uninitialised local array, 64-byte aligned."""
        with self.b.goto_block(self._entry):
            slot = self.b.alloca(ir.ArrayType(element, count))
            slot.align = 64
        return Value(self, self.b.ptrtoint(slot, i64))

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: Value | int = 1) -> Iterator[Value]:
        """`for i in range(start, stop, step)` with a positive step; i is an i64."""
        first, last, by = (
            v if isinstance(v, Value) else self.const(v) for v in (start, stop, step)
        )
        i = self.var(first)
        head, body, done = (self.b.append_basic_block(n) for n in ("head", "loop", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        now = i.get()
        self.b.cbranch((now < last).ir, body, done)
        self.b.position_at_end(body)
        yield now
        i.set(now + by)
        self.b.branch(head)
        self.b.position_at_end(done)

    @contextmanager
    def while_(self, condition: Any) -> Iterator[None]:
        """Repeat while `condition()` (a function that emits an i1) holds."""
        head, body, done = (self.b.append_basic_block(n) for n in ("while", "do", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(condition().ir, body, done)
        self.b.position_at_end(body)
        yield
        self.b.branch(head)
        self.b.position_at_end(done)

    @contextmanager
    def if_(self, condition: Value) -> Iterator[None]:
        """Run the body where a scalar condition holds."""
        with self.b.if_then(condition.ir):
            yield

    @contextmanager
    def if_else(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        """`with k.if_else(c) as (yes, no): with yes: ...; with no: ...`."""
        with self.b.if_else(condition.ir) as (yes, no):
            yield yes, no

    @contextmanager
    def items(self) -> Iterator[Value]:
        """Loop over this call's work items."""
        with self.loop(self.start, self.stop) as item:
            yield item
