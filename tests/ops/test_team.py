"""The thread team: the same results for every number of threads, and no way to hang it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.cache import ObjectCache
from jitllm.jit.cpu import Compiler
from jitllm.jit.emit import Kernel, i32, i64
from jitllm.jit.team import Team
from jitllm.jit.tiers import choose
from jitllm.kernels.op import Count, Launch
from jitllm.kernels.team import RECORD_BYTES, RECORD_WORDS, table
from tests.ops.harness import piece

Words = NDArray[np.int64]
COMPILER = Compiler(choose(), ObjectCache(None))


def _mix(k: Kernel) -> None:
    """dst[i] = src[7 i mod n] * 31 + a: every item needs another thread's item."""
    src, dst, n, a = (k.arg(i) for i in range(4))
    with k.items() as i:
        k.store(k.load(src + (i * 7).urem(n) * 8, i64) * 31 + a, dst + i * 8)


def _tally(k: Kernel) -> None:
    """words[i] += 1: an item that is done twice shows."""
    with k.items() as i:
        at = k.arg(0) + i * 8
        k.store(k.load(at, i64) + 1, at)


def _spin(k: Kernel) -> None:
    """Some thousand cycles an item."""
    address = k.arg(0)
    with k.items(), k.loop(0, 1000):
        k.atomic_add(k.const(1), address)


def _wait_for_others(k: Kernel) -> None:
    """Item 0 waits, not for ever, until all other ones are done, and then says so in words[1]."""
    words, n = k.arg(0), k.arg(1)
    looks = k.var(0, i64)
    with k.items() as i, k.if_else(i.eq(0)) as (first, other):
        with first:
            with k.while_(lambda: (k.atomic_load(words) < n - 1) & (looks.get() < 1 << 31)):
                looks.set(looks.get() + 1)
            k.store(k.atomic_load(words).eq(n - 1).zext(i64), words + 8)
        with other:
            k.atomic_add(k.const(1), words)


def _mxcsr(k: Kernel) -> None:
    """words[0] = the control register, after setting it to words[1] where that is not 0."""
    at = k.arg(0)
    with k.if_(k.load(at + 4, i32).ne(0)):
        k.intrinsic("llvm.x86.sse.ldmxcsr", k.pointer(at + 4))
    k.intrinsic("llvm.x86.sse.stmxcsr", k.pointer(at))


MIX, _ = piece(COMPILER, "mix", _mix)
TALLY, _ = piece(COMPILER, "tally", _tally)
SPIN, _ = piece(COMPILER, "spin", _spin)
WAIT, _ = piece(COMPILER, "wait", _wait_for_others)


class Program:
    """A table, its context, and what keeps them alive."""

    def __init__(self, launches: list[Launch], tokens: int = 1) -> None:
        records = table(launches, COMPILER.build(launch.kernel for launch in launches))
        self.num_launches = len(launches)
        self.records = np.frombuffer(records, np.uint64).copy()
        self.ctx = np.zeros(16, np.int64)
        self.ctx[Count.ONE], self.ctx[Count.TOKENS] = 1, tokens

    def run(self, team: Team) -> bool:
        """One run of the table."""
        return team.run(self.records.ctypes.data, self.num_launches, self.ctx.ctypes.data)


@pytest.fixture(scope="module", params=[1, 2, 3, 5])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with Team(request.param, COMPILER) as team:
        yield team


def test_a_record_is_sixteen_words() -> None:
    (record,) = np.frombuffer(
        table([Launch(MIX, Count.TOKENS, 3, (5, -1), barrier=False)], {MIX: 77}), np.int64
    ).reshape(-1, RECORD_WORDS)
    assert record.tolist() == [77, 1, 3, 0, 5, -1, *[0] * 10]
    assert RECORD_BYTES == 128


def test_random_programs(team: Team) -> None:
    """Chains of launches that each read all of what the one before wrote."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n = int(rng.choice([1, 2, 7, 50, 1000]))
        buffers = rng.integers(0, 2**40, (2, n))
        expected = buffers.copy()
        tallies = np.zeros(64, np.int64)
        counts = np.zeros(64, np.int64)
        launches, now = [], 0
        for step in range(int(rng.integers(1, 80))):
            src, dst = buffers[now], buffers[1 - now]
            launches.append(
                Launch(MIX, Count.ONE, n, (src.ctypes.data, dst.ctypes.data, n, step - 40))
            )
            expected[1 - now] = expected[now][np.arange(n) * 7 % n] * 31 + step - 40
            now = 1 - now
            for _ in range(int(rng.integers(0, 3))):  # beside it, of no, one or many items
                items = int(rng.choice([0, 1, 9, 64]))
                launches.append(Launch(TALLY, Count.TOKENS, items, (tallies.ctypes.data,)))
                counts[:items] += 1
        program = Program(launches)
        assert program.run(team)
        assert (buffers == expected).all()
        assert (tallies == counts).all()


def test_neighbours_without_a_barrier(team: Team) -> None:
    """Independent launches flow into each other; the next barrier waits for all of them."""
    rng = np.random.default_rng(3)
    source = rng.integers(0, 2**40, 500)
    parts = np.zeros((8, 500), np.int64)
    out = np.zeros((8, 500), np.int64)

    def mix(src: Words, dst: Words, a: int, barrier: bool) -> Launch:
        return Launch(MIX, Count.ONE, 500, (src.ctypes.data, dst.ctypes.data, 500, a), barrier)

    launches = [mix(source, part, i, barrier=False) for i, part in enumerate(parts)]
    launches += [mix(part, out[i], 0, barrier=i == 0) for i, part in enumerate(parts)]
    program = Program(launches)
    index = np.arange(500) * 7 % 500
    for _ in range(50):
        parts[:], out[:] = 0, 0
        assert program.run(team)
        for i in range(8):
            assert (out[i] == (source[index] * 31 + i)[index] * 31).all()


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("items", [2, 5, 8, 33])
def test_others_do_what_is_left_of_the_share_of_who_is_held_up(threads: int, items: int) -> None:
    words = np.zeros(2, np.int64)
    program = Program([Launch(WAIT, Count.ONE, items, (words.ctypes.data, items))])
    with Team(threads, COMPILER) as team:
        for _ in range(20):
            words[:] = 0
            assert program.run(team)
            assert words.tolist() == [items - 1, 1]


def test_items_follow_the_context(team: Team) -> None:
    """One table, other counts; no items at all is fine."""
    words = np.zeros(100, np.int64)
    program = Program([Launch(TALLY, Count.TOKENS, 5, (words.ctypes.data,))])
    for tokens in (0, 1, 20, 3, 0):
        words[:] = 0
        program.ctx[Count.TOKENS] = tokens
        assert program.run(team)
        assert words.tolist() == [1] * (5 * tokens) + [0] * (100 - 5 * tokens)
    assert Program([]).run(team)


def test_a_hundred_thousand_barriers(team: Team) -> None:
    """In one run, most threads with something to do."""
    words = np.zeros(8, np.int64)
    program = Program([Launch(TALLY, Count.ONE, 8, (words.ctypes.data,))] * 100_000)
    assert program.run(team)
    assert (words == 100_000).all()


def test_many_short_runs(team: Team) -> None:
    """Workers that come late, or not at all, do no harm; some runs find them asleep."""
    words = np.zeros(8, np.int64)
    program = Program([Launch(TALLY, Count.ONE, 8, (words.ctypes.data,))])
    for n in range(2000):
        assert program.run(team)
        if n % 100 == 0:
            time.sleep(0.002)
    assert (words == 2000).all()


def test_stop_ends_a_run_between_launches() -> None:
    """From another thread; it stays stopped until it is resumed."""
    word = np.zeros(1, np.int64)
    short = Program([Launch(SPIN, Count.ONE, 2, (word.ctypes.data,))] * 10)
    endless = Program([Launch(SPIN, Count.ONE, 1000, (word.ctypes.data,))] * 100_000)
    with Team(2, COMPILER) as team:
        team.stop()
        assert not short.run(team)
        assert word[0] == 0
        team.resume()
        assert short.run(team)
        timer = threading.Timer(0.05, team.stop)
        timer.start()
        assert not endless.run(team)
        timer.join()
        assert 20_000 < word[0] < 10**11
        team.resume()
        assert short.run(team)


def test_close_ends_the_threads() -> None:
    """Asleep or spinning; a closed team refuses to run, a second close does nothing."""
    for pause in (0, 0.01):
        before = threading.active_count()
        team = Team(4, COMPILER)
        assert threading.active_count() == before + 3
        time.sleep(pause)
        team.close()
        team.close()
        assert threading.active_count() == before
        with pytest.raises(RuntimeError, match="closed"):
            Program([]).run(team)


def test_a_forgotten_team_closes_itself() -> None:
    before = threading.active_count()
    team = Team(3, COMPILER)
    del team
    gc.collect()
    assert threading.active_count() == before


def test_an_open_team_does_not_keep_the_process(tmp_path: Path) -> None:
    """It ends at exit, quietly."""
    code = (
        "from jitllm.jit.cache import ObjectCache\n"
        "from jitllm.jit.cpu import Compiler\n"
        "from jitllm.jit.team import Team\n"
        "from jitllm.jit.tiers import choose\n"
        "from pathlib import Path\n"
        f"team = Team(3, Compiler(choose(), ObjectCache(Path({str(tmp_path)!r}))))\n"
        "print('ready')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("ready\n", "")


def test_the_native_half_is_cached(tmp_path: Path) -> None:
    """A second compiler compiles nothing."""
    for compiled in (2, 0):
        compiler = Compiler(choose(), ObjectCache(tmp_path))
        with Team(2, compiler) as team:
            assert compiler.compiled == compiled
            words = np.zeros(8, np.int64)
            assert Program([Launch(TALLY, Count.ONE, 8, (words.ctypes.data,))]).run(team)
            assert (words == 1).all()


@pytest.mark.skipif(sys.platform != "linux" or not COMPILER.tier.features, reason="x86 only")
def test_rounding_control_is_ours_inside_and_theirs_outside() -> None:
    """Denormals are kept in a run although the caller flushes them; the caller still does after."""
    spec, native = piece(COMPILER, "mxcsr", _mxcsr)
    sticky = 0x3F  # exceptions that have happened
    flush, default = 0x9FC0, 0x1F80
    outside, inside = np.array([0, flush], np.uint32), np.zeros(2, np.uint32)

    def caller() -> None:
        args = np.array([outside.ctypes.data], np.int64)
        native(0, args.ctypes.data, 0, 1)
        with Team(1, COMPILER) as team:
            Program([Launch(spec, Count.ONE, 1, (inside.ctypes.data,))]).run(team)
            outside[:] = 0
            native(0, args.ctypes.data, 0, 1)

    thread = threading.Thread(target=caller)  # its register, not ours
    thread.start()
    thread.join()
    assert int(inside[0]) & ~sticky == default
    assert int(outside[0]) & ~sticky == flush
