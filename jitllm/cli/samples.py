"""Rates that were measured a few times: how they are taken, and what is said of them.

Knows clocks and the machine's read bandwidth. Knows no verb.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from jitllm.engine import EngineStats
from jitllm.errors import JitllmError
from jitllm.units import format_size

LEAST_TICKS = 100
"""Of the clock: a shorter run has no rate."""

READ_REPETITIONS = 5


def rate(count: float, elapsed_s: float, what: str, remedy: str) -> float:
    """So many a second. Raises `JitllmError` for a run that the clock cannot see."""
    if elapsed_s < LEAST_TICKS * time.get_clock_info("perf_counter").resolution:
        raise JitllmError(f"{what} took less than the clock can measure", remedy)
    return count / elapsed_s


def middle(values: list[float]) -> float | None:
    """The median; None of nothing."""
    return median(values) if values else None


def spread(values: list[float]) -> float | None:
    """Largest minus smallest, over the median; None where that says nothing."""
    if len(values) < 2 or not median(values):
        return None
    return (max(values) - min(values)) / median(values)


def read_wall(num_bytes: int, stats: EngineStats) -> list[float]:
    """GB a second that this machine reads of so much memory, with the threads of an engine.

    To be called once the engine has given its memory back.
    """
    from jitllm.devices.bandwidth import read_rates
    from jitllm.jit.cache import ObjectCache, default_directory
    from jitllm.jit.cpu import Compiler
    from jitllm.jit.tiers import choose

    compiler = Compiler(choose(stats.tier), ObjectCache(default_directory()))
    rates = read_rates(num_bytes, stats.threads, compiler, READ_REPETITIONS)
    return [per_second / 1e9 for per_second in rates]


def against_the_wall(gb_s: list[float], wall_gb_s: list[float]) -> dict[str, Any]:
    """What a report says of weights that were read, beside the plain read loop."""
    found, wall = middle(gb_s), middle(wall_gb_s)
    return {
        "gb_s": found,
        "read_gb_s": wall,
        "read_share": None if found is None or wall is None else found / wall,
    }


def weights_line(num_bytes: int, per: str, found: dict[str, Any]) -> str:
    """The same in words: bytes per token or step, rate and share."""
    line = f"{format_size(num_bytes)} of weights per {per}, {found['gb_s']:.2f} GB/s"
    if found["read_share"] is None:
        return line
    return f"{line}, {found['read_share']:.0%} of the {found['read_gb_s']:.1f} GB/s read here"


def with_spread(text: str, values: list[float]) -> str:
    """A median with its spread, where there is one."""
    found = spread(values)
    return text if found is None else f"{text} (spread {found:.1%})"
