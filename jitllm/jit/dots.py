"""Dot products of unsigned with signed bytes, as each tier multiplies bytes.

Exact in i32 whatever the tier, so all of them give the same bits. Knows vectors of the expression
layer; knows no weight format.
"""

from __future__ import annotations

from jitllm.jit.emit import Kernel, Value, i8, i16, i32, vec


class Dot:
    """A dot product under way: `add` words, then take the `total`."""

    def __init__(self, k: Kernel, start: Value, max_u8: int) -> None:
        self.k = k
        self.acc = start
        self.max_u8 = max_u8

    def add(self, u8: Value, s8: Value) -> None:
        """Four products per lane; u8, s8: i32 [16], four bytes a lane, s8 in -127..127."""
        for j in range(4):
            weight = (u8 >> (8 * j)) & 0xFF
            self.acc = self.acc + weight * (s8 << (24 - 8 * j)).sar(24)

    def total(self) -> Value:
        """The sum so far, i32 [16]."""
        return self.acc


def dot(k: Kernel, start: Value, max_u8: int) -> Dot:
    """A dot product that starts at `start`, i32 [16]; unsigned bytes are at most `max_u8`."""
    kind = {
        "generic": Dot,
        "maddubs": _PairDot,
        "vnni256": _VnniDot,
        "vnni512": _VnniDot,
        "smull": _SignedDot,
        "sdot": _SignedDot,
    }[k.tier.dot]
    return kind(k, start, max_u8)


# --- x86 ----------------------------------------------------------------------------------------


class _VnniDot(Dot):
    """One instruction multiplies, sums and accumulates: a whole vector, or half of one."""

    def add(self, u8: Value, s8: Value) -> None:
        """As `Dot.add`."""
        if self.k.tier.dot == "vnni512":
            self.acc = self._vpdpbusd(512, self.acc, u8, s8)
            return
        halves = [
            self._vpdpbusd(256, self.acc.part(h, 8), u8.part(h, 8), s8.part(h, 8)) for h in (0, 8)
        ]
        self.acc = self.k.concat(halves)

    def _vpdpbusd(self, width: int, acc: Value, u8: Value, s8: Value) -> Value:
        kind = vec(i8, width // 8)
        name = f"llvm.x86.avx512.vpdpbusd.{width}"
        return self.k.intrinsic(name, acc, u8.bits(kind), s8.bits(kind), result=acc.type)


class _PairDot(Dot):
    """On AVX2 without VNNI: pairs of products are added in i16 as long as they surely fit.

    Bytes too large for even one pair are cut in two nibbles, whose sums are added at the end.
    """

    def __init__(self, k: Kernel, start: Value, max_u8: int) -> None:
        super().__init__(k, start, max_u8)
        self.low = self.high = None
        if 2 * 127 * max_u8 > 32767:
            self.low = _PairDot(k, start, 15)
            self.high = _PairDot(k, k.const(0, start.type), 15)
        self.pending: Value | None = None
        self.room = 0

    def add(self, u8: Value, s8: Value) -> None:
        """As `Dot.add`."""
        if self.low is not None and self.high is not None:
            self.low.add(u8 & 0x0F0F0F0F, s8)
            self.high.add((u8 >> 4) & 0x0F0F0F0F, s8)
            return
        pairs = _pair_products(self.k, u8, s8)
        if self.room == 0:
            self._flush()
            self.room = 32767 // (2 * 127 * self.max_u8)
        self.pending = pairs if self.pending is None else self.pending + pairs
        self.room -= 1

    def _flush(self) -> None:
        if self.pending is not None:
            self.acc = self.acc + _pair_sums(self.k, self.pending)
            self.pending = None

    def total(self) -> Value:
        """As `Dot.total`."""
        if self.low is not None and self.high is not None:
            return self.low.total() + (self.high.total() << 4)
        self._flush()
        return self.acc


def _pair_products(k: Kernel, u8: Value, s8: Value) -> Value:
    """Sums of two neighbouring products, i16 [2 a lane]: vpmaddubsw, which saturates."""
    parts = [
        k.intrinsic(
            "llvm.x86.avx2.pmadd.ub.sw",
            *(v.part(h, 8).bits(vec(i8, 32)) for v in (u8, s8)),
            result=vec(i16, 16),
        )
        for h in (0, 8)
    ]
    return k.concat(parts)


def _pair_sums(k: Kernel, pairs: Value) -> Value:
    """i16 [2 a lane] to i32 [16]: the two halves of a lane added."""
    ones = k.const(1, vec(i16, 16))
    parts = [
        k.intrinsic("llvm.x86.avx2.pmadd.wd", pairs.part(h, 16), ones, result=vec(i32, 8))
        for h in (0, 16)
    ]
    return k.concat(parts)


# --- Arm ----------------------------------------------------------------------------------------


class _SignedDot(Dot):
    """On Arm, which multiplies signed bytes with signed ones.

    Where bytes may exceed 127, 128 is taken from each by flipping its top bit, and the signed
    bytes are summed beside the products: 128 times that sum is added at the end.
    """

    def __init__(self, k: Kernel, start: Value, max_u8: int) -> None:
        super().__init__(k, start, max_u8)
        self.sums = k.const(0, start.type) if max_u8 > 127 else None

    def add(self, u8: Value, s8: Value) -> None:
        """As `Dot.add`."""
        if self.sums is not None:
            u8 = u8 ^ 0x80808080
            self.sums = self._multiply(self.sums, self.k.const(0x01010101, s8.type), s8)
        self.acc = self._multiply(self.acc, u8, s8)

    def total(self) -> Value:
        """As `Dot.total`."""
        return self.acc if self.sums is None else self.acc + (self.sums << 7)

    def _multiply(self, acc: Value, a: Value, b: Value) -> Value:
        """A quarter, which is a register, at a time."""
        multiply = _sdot if self.k.tier.dot == "sdot" else _smull
        quarters = [
            multiply(self.k, acc.part(q, 4), a.part(q, 4), b.part(q, 4)) for q in (0, 4, 8, 12)
        ]
        return self.k.concat(quarters)


def _sdot(k: Kernel, acc: Value, a: Value, b: Value) -> Value:
    """The dot-product extension: four products a lane, summed and accumulated."""
    operands = (v.bits(vec(i8, 16)) for v in (a, b))
    return k.intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", acc, *operands, result=acc.type)


def _smull(k: Kernel, acc: Value, a: Value, b: Value) -> Value:
    """Products in i16, neighbours added in i16 (two of -128 * 127 fit), and again in i32."""
    products = [
        k.intrinsic(
            "llvm.aarch64.neon.smull.v8i16",
            *(v.bits(vec(i8, 16)).part(h, 8) for v in (a, b)),
            result=vec(i16, 8),
        )
        for h in (0, 8)
    ]
    pairs = k.intrinsic("llvm.aarch64.neon.addp.v8i16", *products, result=vec(i16, 8))
    return acc + k.intrinsic("llvm.aarch64.neon.saddlp.v4i32.v8i16", pairs, result=acc.type)
