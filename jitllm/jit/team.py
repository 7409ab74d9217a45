"""A persistent team of threads that runs tables of launches.

The caller is one of the threads; the others each sit in one native call until the team is closed,
so the GIL is let go once per run and never handed around. Knows launch records
(`kernels/team`); knows no op.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any, Self

from jitllm.jit.cpu import Compiler
from jitllm.kernels.op import KernelSpec
from jitllm.kernels.team import State

_RUN = KernelSpec.of("team", role="run")
_WORKER = KernelSpec.of("team", role="worker")
_ALIGNMENT = 128


class Team:
    """`threads` threads, the caller of `run` included. One run at a time.

    Close it, or use it in a `with`; a team that is forgotten closes itself, at exit at the latest.
    """

    def __init__(
        self, threads: int, compiler: Compiler, cpus: frozenset[int] = frozenset()
    ) -> None:
        """cpus: the logical CPUs that the threads keep to; empty for any."""
        addresses = compiler.build([_RUN, _WORKER])
        word = ctypes.c_int64
        self.threads = threads
        self._run = ctypes.CFUNCTYPE(word, *[word] * 4)(addresses[_RUN])
        self._memory = ctypes.create_string_buffer(State.BYTES + _ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self._state = start + -start % _ALIGNMENT
        self._counters: Any = None
        self._one_run = threading.Lock()
        self._write(State.THREADS, threads)
        worker = ctypes.CFUNCTYPE(None, word)(addresses[_WORKER])
        workers = [
            threading.Thread(
                target=worker, args=(self._state,), name=f"jitllm-team-{n}", daemon=True
            )
            for n in range(1, threads)
        ]
        # What the workers run in must outlive them, so it is kept by what ends them.
        keep = (compiler, self._memory)
        end = (self._run, self._state, self._one_run, workers, keep)
        self._close = weakref.finalize(self, _close, *end)
        for thread in workers:
            thread.start()
            if cpus and thread.native_id is not None:
                os.sched_setaffinity(thread.native_id, cpus)

    def run(self, launches: int, num_launches: int, ctx: int) -> bool:
        """Run a table of launch records at an address, in order, with the step context at `ctx`.

        Returns True when all of it was done, False when it was stopped early (the buffers then
        hold nothing of use). Raises RuntimeError when the team is closed or already running.
        """
        if not self._one_run.acquire(blocking=False):
            raise RuntimeError("the team is already running")
        try:
            if not self._close.alive:
                raise RuntimeError("the team is closed")
            num_counters = num_launches * self.threads
            if self._counters is None or len(self._counters) < num_counters:
                self._counters = (ctypes.c_int64 * max(num_counters, 64))()
                self._write(State.COUNTERS, ctypes.addressof(self._counters))
            return not self._run(self._state, launches, num_launches, ctx)
        finally:
            self._one_run.release()

    def stop(self) -> None:
        """End the present run, and every later one, at its next launch; from any thread."""
        self._write(State.STOP, 1)

    def resume(self) -> None:
        """Take `stop` back."""
        self._write(State.STOP, 0)

    def close(self) -> None:
        """Stop the present run, end the workers and wait for them. A second call does nothing."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, word: State, value: int) -> None:
        ctypes.c_int64.from_address(self._state + word).value = value


def _close(
    run: Any, state: int, one_run: threading.Lock, workers: list[threading.Thread], keep: object
) -> None:
    for word in (State.STOP, State.CLOSING):
        ctypes.c_int64.from_address(state + word).value = 1
    with one_run:
        run(state, 0, 0, 0)  # an empty run wakes whoever sleeps
    for thread in workers:
        thread.join()
    del keep
