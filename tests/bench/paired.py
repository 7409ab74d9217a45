"""Paired measurements: A B B A, medians of ratios, and a control of A against itself.

Knows commands and the numbers they print. Judges nothing: a measurement is taken or rejected,
because the machine was too noisy, and the caller shows it.

A shared machine has neighbours who read memory as well. Set JITLLM_BENCH_QUIET to the GB/s that a
plain loop reads here, with two threads, when they do not: a pair counts only if the loop reads as
much just before and just after it.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jitllm.devices.bandwidth import read_rates
from jitllm.jit.tiers import choose
from tests.ops.harness import compiler

QUIET_GB_S = float(os.environ.get("JITLLM_BENCH_QUIET", "0"))
QUIET_READ_BYTES = 256 << 20
"""Read for that: more than caches hold."""

MAX_WAIT_S = 1200.0
"""Longest wait for the next pair that counts."""

MAX_SPREAD = 0.10
"""Interquartile range of the ratios over their median, above which a measurement is rejected."""

Sample = Callable[[], dict[str, float]]
"""Runs something once; its rates by name."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A over B for one rate. `control`: A over A, taken first, in the same way."""

    name: str
    a: float
    b: float
    median: float
    spread: float
    control: float
    pairs: int

    @property
    def is_rejected(self) -> bool:
        """The machine was too noisy for this to mean anything."""
        return self.spread > MAX_SPREAD or abs(self.control - 1) > MAX_SPREAD

    def __str__(self) -> str:
        verdict = "rejected: too noisy" if self.is_rejected else "taken"
        return (
            f"{self.name}: {self.median:.2f}x (A {self.a:.1f}, B {self.b:.1f} a second, spread "
            f"{self.spread:.1%}, A/A {self.control:.2f}x, {self.pairs} pairs; {verdict})"
        )


def compare(a: Sample, b: Sample, pairs: int) -> list[Ratio]:
    """Measure `a` against `b` in `pairs` pairs of alternating order, after a control of `a`.

    The first run of each is thrown away, and so is what only one of them tells.
    """
    with _alone():
        a(), b()
        control = _pairs(a, a, max(pairs // 3, 2))
        taken = _pairs(a, b, pairs)
    return [
        _ratio(name, taken, control) for name in sorted(taken[0][0].keys() & taken[0][1].keys())
    ]


def _pairs(a: Sample, b: Sample, count: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    found: list[tuple[dict[str, float], dict[str, float]]] = []
    last_s = time.monotonic()
    while len(found) < count:
        if time.monotonic() - last_s > MAX_WAIT_S:
            raise TimeoutError(
                f"a plain loop read less than {QUIET_GB_S} GB/s for {MAX_WAIT_S / 60:.0f} minutes: "
                "lower JITLLM_BENCH_QUIET"
            )
        if not _is_quiet():
            time.sleep(1)
            continue
        if len(found) % 2:
            second = b()
            pair = a(), second
        else:
            first = a()
            pair = first, b()
        if _is_quiet():
            found.append(pair)
            last_s = time.monotonic()
    return found


def _is_quiet() -> bool:
    """Whether neighbours leave this machine its memory."""
    if not QUIET_GB_S:
        return True
    rates = read_rates(QUIET_READ_BYTES, 2, compiler(choose()), repetitions=3)
    return statistics.median(rates) >= QUIET_GB_S * 1e9


def _ratio(
    name: str,
    taken: list[tuple[dict[str, float], dict[str, float]]],
    control: list[tuple[dict[str, float], dict[str, float]]],
) -> Ratio:
    ratios = [a[name] / b[name] for a, b in taken]
    quarters = statistics.quantiles(ratios, n=4)
    middle = statistics.median(ratios)
    return Ratio(
        name=name,
        a=statistics.median(a[name] for a, _ in taken),
        b=statistics.median(b[name] for _, b in taken),
        median=middle,
        spread=(quarters[2] - quarters[0]) / middle,
        control=statistics.median(a[name] / b[name] for a, b in control),
        pairs=len(ratios),
    )


@contextmanager
def _alone() -> Iterator[None]:
    """One measurement at a time on this machine."""
    with (Path(tempfile.gettempdir()) / f"jitllm-bench-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def jitllm_speed(
    command: list[str], prompt: int, decode: int, depth: int = 0, times: int = 1
) -> dict[str, float]:
    """`jitllm speed`: medians of its samples, of what was asked for; and GB/s of its read loop."""
    flags = ["-p", str(prompt), "-n", str(decode), "-depth", str(depth), "-r", str(times), "-json"]
    found = json.loads(_output([*command, *flags]))
    rates = {"prefill": found["prefill_tok_s"], "decode": found["decode_tok_s"]}
    if decode:
        rates["plain read"] = found["read_gb_s"]
    return {name: rate for name, rate in rates.items() if rate is not None}


def llama_bench(
    command: list[str], prompt: int, decode: int, depth: int = 0, times: int = 1
) -> dict[str, float]:
    """llama.cpp's `llama-bench`: medians of its samples."""
    flags = ["-p", str(prompt), "-n", str(decode), "-d", str(depth), "-r", str(times), "-o", "json"]
    rows = json.loads(_output([*command, *flags]))
    names = {True: "prefill", False: "decode"}
    return {names[row["n_prompt"] > 0]: statistics.median(row["samples_ts"]) for row in rows}


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
