"""How a team of threads runs a table of launches: the words that it and its caller share.

No op: nothing is computed here. `cpu.py` emits the native functions, `jit/team.py` owns the
threads.

Every thread walks the whole table. A launch's items are cut into a share for each thread, of which
it takes grain after grain, and then what is left of others' shares: grains of a share lie together,
so what a kernel fetches ahead is what the thread needs next, and rows stay with a thread from one
launch to another. It goes on to the next launch at once; where that one has its barrier flag set,
it waits until all items of all launches before it are done. Completion is what is counted, not
threads: a thread whose core was taken away holds up the others only while it is in a grain.

A run is open while the generation is odd. A worker enters by raising ACTIVE and then looking at
the generation again; the run ends by making the generation even and then waiting for ACTIVE to be
zero, so no worker touches a table, a context or a counter after `run` has returned.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum

from jitllm.kernels.op import MAX_ARGS, KernelSpec, Launch

RECORD_WORDS = 4 + MAX_ARGS
"""A launch record: u64 function address, index of the count in the step context, factor, barrier
flag, then the arguments."""

RECORD_BYTES = 8 * RECORD_WORDS

_RECORD = struct.Struct(f"<{RECORD_WORDS}Q")
_LINE = 128  # two cache lines: the processor fetches them in pairs


class State(IntEnum):
    """Byte offsets of the 64-bit words of a team.

    THREADS, COUNTERS (address of a word for every launch of every thread), STOP and CLOSING are set
    from outside; WORKERS counts the workers that have begun. A word that many threads write all the
    time, or sleep on, has a line to itself.
    """

    THREADS = 0
    COUNTERS = 8
    LAUNCHES = 16
    NUM_LAUNCHES = 24
    CTX = 32
    STOP = 40
    CLOSING = 48
    WORKERS = 56
    GENERATION = _LINE
    IDLE = 2 * _LINE
    DONE = 3 * _LINE
    WAITING = 4 * _LINE
    ACTIVE = 5 * _LINE
    BYTES = 6 * _LINE


def table(launches: Iterable[Launch], addresses: Mapping[KernelSpec, int]) -> bytes:
    """Launch records, to be kept 8-byte aligned for as long as they are run."""
    return b"".join(
        _RECORD.pack(
            addresses[launch.kernel],
            launch.count,
            launch.factor,
            launch.barrier,
            *(arg % 2**64 for arg in launch.args),
            *[0] * (MAX_ARGS - len(launch.args)),
        )
        for launch in launches
    )
