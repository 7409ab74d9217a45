"""CPU tiers: what the processor in front of us can do, and what we emit for it.

A tier is a set of LLVM target features and the way it multiplies bytes. Everything else that a
kernel emits is plain IEEE arithmetic on 16 lanes, so every tier gives the same bits.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jitllm.errors import UsageError


@dataclass(frozen=True, slots=True)
class Tier:
    """One way of emitting kernels.

    features: LLVM features switched on. needs: flags of /proc/cpuinfo that must be there, one for
    each feature: a virtual machine may hide any of them, and `lzcnt` then computes something else.
    dot: how four bytes are multiplied and summed: "vnni512", "vnni256", "maddubs", "sdot", "smull"
    or "generic".
    f16c: half floats are converted by an instruction.
    vector_registers: how many 16-lane f32 values fit in registers; sizes unrolled row blocks.
    machine: what its code is for, as `platform.machine()` says it; "" is the one in front of us.
    has_amx: many rows are multiplied in tile registers (`amx.py`).
    """

    name: str
    features: tuple[str, ...]
    needs: tuple[str, ...]
    dot: str
    f16c: bool
    vector_registers: int
    machine: str = ""
    has_amx: bool = False


_AVX2 = ("avx2", "fma", "f16c", "bmi", "bmi2", "popcnt", "lzcnt")
_AVX2_NEEDS = ("avx2", "fma", "f16c", "bmi1", "bmi2", "popcnt", "abm")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512vnni")
_AVX512_NEEDS = (
    *_AVX2_NEEDS,
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512cd",
    "avx512_vnni",
)

PLAIN = Tier("plain", (), (), "generic", f16c=False, vector_registers=4)
NEON = Tier(
    "neon", ("neon",), ("asimd",), "smull", f16c=True, vector_registers=8, machine="aarch64"
)
NEON_DOTPROD = Tier(
    "neon-dotprod",
    ("neon", "dotprod"),
    ("asimd", "asimddp"),
    "sdot",
    f16c=True,
    vector_registers=8,
    machine="aarch64",
)
AVX2 = Tier("avx2", _AVX2, _AVX2_NEEDS, "maddubs", f16c=True, vector_registers=8, machine="x86_64")
AVX2_VNNI = Tier(
    "avx2-vnni",
    (*_AVX2, "avxvnni"),
    (*_AVX2_NEEDS, "avx_vnni"),
    "vnni256",
    f16c=True,
    vector_registers=8,
    machine="x86_64",
)
AVX512_VNNI = Tier(
    "avx512-vnni",
    _AVX512,
    _AVX512_NEEDS,
    "vnni512",
    f16c=True,
    vector_registers=32,
    machine="x86_64",
)
AVX512_AMX = Tier(
    "avx512-amx",
    (*_AVX512, "amx-tile", "amx-int8"),
    (*_AVX512_NEEDS, "amx_tile", "amx_int8"),
    "vnni512",
    f16c=True,
    vector_registers=32,
    machine="x86_64",
    has_amx=True,
)

TIERS = (PLAIN, NEON, NEON_DOTPROD, AVX2, AVX2_VNNI, AVX512_VNNI, AVX512_AMX)
"""Slowest first, Arm's before x86's; `auto` takes the last one that can be used."""


@cache
def cpu_flags() -> frozenset[str]:
    """Feature flags of the processor as Linux lists them; empty where there is no such list."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


@cache
def cpu_name() -> str:
    """The processor's marketing name, or its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def missing(tier: Tier) -> tuple[str, ...]:
    """Processor flags that a tier needs and that are not there."""
    return tuple(flag for flag in tier.needs if flag not in cpu_flags())


def obstacle(tier: Tier) -> str:
    """Why a tier cannot be used here; empty when it can.

    Of one with AMX this asks the system for its registers, which every process has to before it
    uses them, and on a processor's first use tries it in another process: that takes seconds.
    """
    if absent := missing(tier):
        return f"the processor lacks {', '.join(absent)}"
    if tier.has_amx:
        from jitllm.jit import trial  # it compiles kernels, and the compiler knows tiers

        return trial.obstacle()
    return ""


def available() -> tuple[Tier, ...]:
    """Tiers that can be used here, slowest first."""
    return tuple(tier for tier in TIERS if not obstacle(tier))


def named(name: str) -> Tier:
    """The tier of that name, whether this processor has it or not. Raises UsageError."""
    for tier in TIERS:
        if tier.name == name:
            return tier
    raise UsageError(f"unknown tier {name!r}; choose auto or {', '.join(t.name for t in TIERS)}")


def choose(name: str = "auto") -> Tier:
    """The tier of that name, or the fastest one for "auto".

    Raises UsageError for an unknown name or a tier that cannot be used here.
    """
    if name == "auto":
        return available()[-1]
    tier = named(name)
    if why := obstacle(tier):
        raise UsageError(
            f"tier {name} cannot be used: {why}",
            f"choose auto or {', '.join(t.name for t in available())}",
        )
    return tier
