"""Emulated processors are what they say, and a thread team works on one."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.errors import UsageError
from jitllm.jit.cache import ObjectCache
from jitllm.jit.cpu import Compiler, Emitter
from jitllm.jit.emit import Kernel, i32v, i64
from jitllm.jit.tiers import NEON, NEON_DOTPROD, Tier, available
from jitllm.kernels.op import Count, Ctx, KernelSpec, Launch
from jitllm.kernels.team import State, table
from tests.ops.arena import shared
from tests.ops.emulator import CPUS, Emulator, emulator
from tests.ops.harness import obstacle, piece

Words = NDArray[np.int64]

pytestmark = pytest.mark.skipif(
    bool(obstacle(NEON)) or NEON in available(), reason=obstacle(NEON) or "this is an Arm processor"
)


def _dot(k: Kernel) -> None:
    """words[0..16] = dot products of 1, 2, 3, 4 with themselves, from 5."""
    word = k.const(0x04030201, i32v)
    dot = k.dot(k.const(5, i32v), 127)
    dot.add(word, word)
    k.store(dot.total(), k.params[0])


@pytest.mark.parametrize("tier", [NEON, NEON_DOTPROD], ids=lambda tier: tier.name)
def test_a_processor_without_a_feature_has_none_of_its_instructions(tier: Tier) -> None:
    """So what passes on it was not emitted for another one."""
    out = shared(np.zeros(16, np.int32))
    plain = Emulator(tier, CPUS["neon"])
    _, call = piece(plain, "dot", _dot)
    if tier is NEON:
        call(out.ctypes.data, 0, 0, 0)
        assert out.tolist() == [35] * 16
    else:
        with pytest.raises(ChildProcessError, match="-4"):  # illegal instruction
            call(out.ctypes.data, 0, 0, 0)
    plain.close()


def test_a_foreign_tier_is_emitted_and_never_run() -> None:
    """This process's memory is not the place for it."""
    assert Emitter(NEON).object_code(KernelSpec.of("gather")).startswith(b"\x7fELF")
    with pytest.raises(UsageError, match="tier neon is for aarch64"):
        Compiler(NEON, ObjectCache(None))


# --- the thread team ------------------------------------------------------------------------------


def _tally(k: Kernel) -> None:
    """words[i] += 1."""
    with k.items() as i:
        at = k.arg(0) + i * 8
        k.store(k.load(at, i64) + 1, at)


def _fpcr(k: Kernel) -> None:
    """words[0] = the control register, after setting it to words[1] where that is not 0."""
    at = k.arg(0)
    wanted = k.load(at + 8, i64)
    with k.if_(wanted.ne(0)):
        k.intrinsic("llvm.aarch64.set.fpcr", wanted)
    k.store(k.intrinsic("llvm.aarch64.get.fpcr", result=i64), at)


class Team:
    """Threads of the emulated process, told what `jit/team.py` tells its own."""

    def __init__(self, machine: Emulator, threads: int) -> None:
        self.machine = machine
        self.state = shared(np.zeros(State.BYTES // 8, np.int64))
        self.counters = shared(np.zeros(100_000, np.int64))
        self.ctx = shared(np.zeros(Ctx.WORDS, np.int64))
        self.ctx[Ctx.ONE] = 1
        self.state[State.THREADS // 8] = threads
        self.state[State.COUNTERS // 8] = self.counters.ctypes.data
        self._run = machine.address(KernelSpec.of("team", role="run"))
        worker = machine.address(KernelSpec.of("team", role="worker"))
        self.threads = shared(np.zeros(threads - 1, np.int64))
        for n in range(threads - 1):
            at = self.threads[n:].ctypes.data
            start = machine.function("pthread_create")
            assert machine.call(start, at, 0, worker, self.state.ctypes.data) == 0

    def run(self, launches: list[Launch]) -> bool:
        """One run; whether all of it was done."""
        kernels = {launch.kernel: self.machine.address(launch.kernel) for launch in launches}
        records = shared(np.frombuffer(table(launches, kernels), np.uint8))
        words = (self.state, records)
        at = [w.ctypes.data for w in words]
        return not self.machine.call(self._run, *at, len(launches), self.ctx.ctypes.data)

    def close(self) -> None:
        """Ends when the threads have."""
        self.state[State.CLOSING // 8] = 1
        self.run([])
        for thread in self.threads:
            assert self.machine.call(self.machine.function("pthread_join"), int(thread), 0) == 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_team_does_every_item_once(threads: int) -> None:
    """Over many barriers, with threads that spin and threads that sleep."""
    machine = emulator(NEON)
    tally, _ = piece(machine, "tally", _tally)
    words = shared(np.zeros(64, np.int64))
    team = Team(machine, threads)
    launches = [Launch(tally, Count.ONE, 64, (words.ctypes.data,))] * 300
    for _ in range(5):
        assert team.run(launches)
        time.sleep(0.02)  # the workers go to sleep on a futex
    team.state[State.STOP // 8] = 1
    assert not team.run(launches)
    team.close()
    assert (words == 5 * 300).all()


def test_rounding_control_is_ours_inside_and_theirs_outside() -> None:
    """Denormals are kept in a run although the caller flushes them; the caller still does after."""
    machine = Emulator(NEON, CPUS["neon"])  # its register, nobody else's
    spec, native = piece(machine, "fpcr", _fpcr)
    flush = 1 << 24
    outside, inside = shared(np.array([0, flush])), shared(np.array([-1, 0]))
    args = shared(np.array([outside.ctypes.data]))
    native(0, args.ctypes.data, 0, 1)
    team = Team(machine, 1)
    assert team.run([Launch(spec, Count.ONE, 1, (inside.ctypes.data,))])
    team.close()
    outside[:] = 0
    native(0, args.ctypes.data, 0, 1)
    assert (int(inside[0]), int(outside[0])) == (0, flush)
    machine.close()
