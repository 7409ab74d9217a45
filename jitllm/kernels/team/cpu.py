"""The native half of a thread team: one function for the caller, one for the workers."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jitllm.jit.emit import Kernel, Value, i32, i64
from jitllm.kernels.team import RECORD_BYTES, State

SPINS = 2000
"""Looks at a word before a thread goes to sleep: 30 to 100 us, by what `pause` takes. More between
two runs would keep the event loop, which has a step to pass on then, from that core."""

GRAINS = 32
"""Grains of a thread's share of a launch: enough that a late thread leaves little to wait for."""

SLEEP_NS = 10_000_000
"""Longest sleep in a run: how late a stop may be noticed by a thread that waits."""

DEFAULT_MXCSR = 0x1F80
"""Round to nearest even, denormals kept, no traps."""

DEFAULT_FPCR = 0
"""The same on Arm."""

_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
"""Number of the system call on Linux."""

_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129


def signature(role: str) -> dict[str, Any]:
    """run(team, launches, num_launches, ctx) -> 0, or 1 where it was stopped early.
    worker(team) returns when the team is closed."""
    if role == "run":
        return {"params": (i64,) * 4, "result": i64}
    return {"params": (i64,)}


def emit(k: Kernel, *, role: str) -> Value | None:
    """Either function."""
    result = None
    with _default_rounding(k):
        if role == "run":
            result = _run(k)
        else:
            _worker(k)
    return result


def _run(k: Kernel) -> Value:
    team, launches, num_launches, ctx = k.params
    counters, threads = (k.load(team + word, i64) for word in (State.COUNTERS, State.THREADS))
    with k.loop(0, num_launches * threads) as j:
        k.store(k.const(0), counters + j * 8)
    k.store(launches, team + State.LAUNCHES)
    k.store(num_launches, team + State.NUM_LAUNCHES)
    k.store(ctx, team + State.CTX)
    k.atomic_store(k.const(0), team + State.DONE)

    k.atomic_add(k.const(1), team + State.GENERATION)
    _wake(k, team + State.GENERATION, team + State.IDLE)
    total = _walk(k, team, k.const(0))
    _wait(k, team + State.DONE, team + State.WAITING, _is_done(k, team, total))
    k.atomic_add(k.const(1), team + State.GENERATION)
    _wait(k, team + State.ACTIVE, team + State.WAITING, lambda active: active.eq(0))
    return k.atomic_load(team + State.DONE).ne(total).zext(i64)


def _worker(k: Kernel) -> None:
    (team,) = k.params
    number = k.atomic_add(k.const(1), team + State.WORKERS) + 1  # 0 is who calls `run`
    generation, active = team + State.GENERATION, team + State.ACTIVE
    seen = k.var(0, i64)

    def is_closing() -> Value:
        return k.atomic_load(team + State.CLOSING).ne(0)

    def is_called(now: Value) -> Value:
        return ((now & 1).ne(0) & now.ne(seen.get())) | is_closing()

    with k.while_(lambda: is_closing().eq(0)):
        _wait(k, generation, team + State.IDLE, is_called, sleep_ns=None)
        seen.set(k.atomic_load(generation))
        k.atomic_add(k.const(1), active)
        is_open = (seen.get() & 1).ne(0) & k.atomic_load(generation).eq(seen.get())
        with k.if_(is_open & is_closing().eq(0)):
            _walk(k, team, number)
        k.atomic_add(k.const(-1), active)
        _wake(k, active, team + State.WAITING)


def _walk(k: Kernel, team: Value, number: Value) -> Value:
    """Work through the table as the thread of a number; returns the items of all its launches, or
    -1 where STOP ended it."""
    launches, num_launches, ctx, counters, threads = (
        k.load(team + word, i64)
        for word in (
            State.LAUNCHES,
            State.NUM_LAUNCHES,
            State.CTX,
            State.COUNTERS,
            State.THREADS,
        )
    )
    before = k.var(0, i64)  # items of the launches before this one
    j = k.var(0, i64)
    with k.while_(lambda: (j.get() < num_launches) & _is_going(k, team)):
        launch = launches + j.get() * RECORD_BYTES
        count, factor, barrier = (k.load(launch + word, i64) for word in (8, 16, 24))
        items = factor * k.load(ctx + count * 8, i64)
        with k.if_(barrier.ne(0)):
            done, waiting = team + State.DONE, team + State.WAITING
            _wait(k, done, waiting, _is_done(k, team, before.get()))
        with k.if_((items > 0) & _is_going(k, team)):
            _take(
                k, team, launch, ctx, counters + j.get() * 8, items, threads, num_launches, number
            )
        before.set(before.get() + items)
        j.set(j.get() + 1)
    return k.select(j.get() < num_launches, k.const(-1), before.get())


def _take(
    k: Kernel,
    team: Value,
    launch: Value,
    ctx: Value,
    counter: Value,
    items: Value,
    threads: Value,
    num_launches: Value,
    number: Value,
) -> None:
    """Take grains of a launch until none are left, and report what was done: first of the thread's
    own share, then of those that are left of others'. counter: of the share of thread 0."""
    function = k.load(launch, i64)
    shared = k.max(items.udiv(threads * GRAINS), k.const(1))
    grain = k.select(threads > 1, shared, items)
    mine, owner, others = k.var(0, i64), k.var(number), k.var(threads)
    with k.while_(lambda: others.get() > 0):
        first = (items * owner.get()).udiv(threads)
        last = (items * (owner.get() + 1)).udiv(threads)
        taken = counter + owner.get() * num_launches * 8
        with k.if_(k.atomic_load(taken) < last - first):
            start = k.var(first + k.atomic_add(grain, taken))
            with k.while_(lambda: start.get() < last):
                stop = k.min(start.get() + grain, last)
                k.call(function, ctx, launch + 32, start.get(), stop)
                mine.set(mine.get() + stop - start.get())
                start.set(first + k.atomic_add(grain, taken))
        following = owner.get() + 1
        owner.set(k.select(following < threads, following, k.const(0)))
        others.set(others.get() - 1)
    with k.if_(mine.get() > 0):
        k.atomic_add(mine.get(), team + State.DONE)
        _wake(k, team + State.DONE, team + State.WAITING)


# --- waiting ------------------------------------------------------------------------------------


def _is_going(k: Kernel, team: Value) -> Value:
    return k.atomic_load(team + State.STOP).eq(0)


def _is_done(k: Kernel, team: Value, items: Value) -> Callable[[Value], Value]:
    return lambda done: (done >= items) | _is_going(k, team).eq(0)


def _wait(
    k: Kernel,
    word: Value,
    sleepers: Value,
    is_ready: Callable[[Value], Value],
    sleep_ns: int | None = SLEEP_NS,
) -> None:
    """Look at a word until it is ready: spin for a while, then sleep. Who changes the word calls
    `_wake` afterwards. Either that sees us among the sleepers, or we see the change."""
    spins = k.var(0, i64)

    def is_early() -> Value:
        return is_ready(k.atomic_load(word)).eq(0)

    with k.while_(is_early), k.if_else(spins.get() < SPINS) as (spin, sleep):
        with spin:
            _pause(k)
            spins.set(spins.get() + 1)
        with sleep:
            k.atomic_add(k.const(1), sleepers)
            now = k.atomic_load(word)
            with k.if_(is_ready(now).eq(0)):
                _sleep(k, word, now, sleep_ns)
            k.atomic_add(k.const(-1), sleepers)


def _sleep(k: Kernel, word: Value, now: Value, sleep_ns: int | None) -> None:
    """Until the word is woken, its low half differs from `now`, or the time is over."""
    if not _has_futex(k):
        k.call_c("sched_yield", i32)
        return
    timeout = k.const(0)
    if sleep_ns is not None:
        timeout = k.stack(i64, 2)
        k.store(k.const(0), timeout)
        k.store(k.const(sleep_ns), timeout + 8)
    _futex(k, word, _FUTEX_WAIT_PRIVATE, now & 0xFFFFFFFF, timeout)


def _wake(k: Kernel, word: Value, sleepers: Value) -> None:
    """Wake everyone who sleeps on the word."""
    if _has_futex(k):
        with k.if_(k.atomic_load(sleepers) > 0):
            _futex(k, word, _FUTEX_WAKE_PRIVATE, k.const(2**31 - 1), k.const(0))


def _has_futex(k: Kernel) -> bool:
    return platform.system() == "Linux" and k.machine in _FUTEX


def _futex(k: Kernel, word: Value, operation: int, value: Value, timeout: Value) -> None:
    arguments = (k.const(operation), value, timeout, k.const(0), k.const(0))
    k.call_c("syscall", i64, k.const(_FUTEX[k.machine]), word, *arguments, fixed=1)


def _pause(k: Kernel) -> None:
    if _is_x86(k):
        k.intrinsic("llvm.x86.sse2.pause")
    elif k.machine == "aarch64":
        k.intrinsic("llvm.aarch64.hint", k.const(1, i32))  # yield


# --- the floating-point control register --------------------------------------------------------


@contextmanager
def _default_rounding(k: Kernel) -> Iterator[None]:
    """The thread's control register is ours in the body, and the caller's again after it."""
    if _is_x86(k):
        control = k.stack(i32, 2)
        k.store(k.const(DEFAULT_MXCSR, i32), control)
        _mxcsr(k, "st", control + 4)
        _mxcsr(k, "ld", control)
        yield
        _mxcsr(k, "ld", control + 4)
    elif k.machine == "aarch64":
        callers = k.intrinsic("llvm.aarch64.get.fpcr", result=i64)
        k.intrinsic("llvm.aarch64.set.fpcr", k.const(DEFAULT_FPCR))
        yield
        k.intrinsic("llvm.aarch64.set.fpcr", callers)
    else:
        yield


def _is_x86(k: Kernel) -> bool:
    return k.machine in ("x86_64", "AMD64")


def _mxcsr(k: Kernel, direction: str, address: Value) -> None:
    k.intrinsic(f"llvm.x86.sse.{direction}mxcsr", k.pointer(address))
