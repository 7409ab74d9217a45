"""Whether AMX may be used here, and whether it computes what it should.

The system must permit it to each process. Then some products are computed in a process of its own,
where an illegal instruction or a wrong result hurts nobody, and compared bit for bit with those of
vectors. What passed is remembered beside the compiled kernels, for this processor and these
sources; what failed is tried again by the next process. Knows the system's call; knows no kernel.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jitllm import log
from jitllm.jit import tiers
from jitllm.jit.cache import ObjectCache, default_directory, emitters_fingerprint

LONGEST_S = 60.0
"""A trial compiles four kernels and takes about two seconds."""

EQUAL, DIFFERENT, NOT_PERMITTED = "equal", "different", "not permitted"
"""What a trial prints."""

_PACKAGE = Path(__file__).resolve().parent.parent

COMMAND = (sys.executable, "-P", "-m", "jitllm.jit.trial_child")

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18

_PASSED = b"passed"

_log = log.logger(__name__)


def permit() -> bool:
    """Ask the system for the tile registers, for every thread of this process; whether it says yes.

    Linux refuses where a thread has a stack for signals that is too small for them.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    words = (ctypes.c_long(word) for word in (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    return int(ctypes.CDLL(None).syscall(*words)) == 0


@cache
def obstacle() -> str:
    """Why AMX cannot be used by this process, which is also logged; empty when it can.

    Only for a processor that lists it.
    """
    if not permit():
        why = "the system does not permit tile registers"
    else:
        why = tried(ObjectCache(default_directory()), COMMAND)
    if why:
        _log.warning("tier %s is not used: %s", tiers.AVX512_AMX.name, why)
    return why


def tried(object_cache: ObjectCache, command: Sequence[str]) -> str:
    """What was wrong with a trial, or nothing; one that passed is not repeated."""
    key = f"{emitters_fingerprint()} {tiers.cpu_name()} {sorted(tiers.cpu_flags())}"
    if object_cache.read("trial", key) == _PASSED:
        return ""
    why = _try(command)
    if not why:
        object_cache.write("trial", key, _PASSED)
    return why


def _try(command: Sequence[str]) -> str:
    path = os.pathsep.join(filter(None, (str(_PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": path},
            timeout=LONGEST_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its trial failed: {error}"
    if done.returncode < 0:
        return f"its trial ended with: {signal.strsignal(-done.returncode)}"
    match done.stdout.strip():
        case _ if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return f"its trial failed: {lines[-1]}"
        case said if said == EQUAL:
            return ""
        case said if said == DIFFERENT:
            return f"its products are not those of {tiers.AVX512_VNNI.name}"
        case said:
            return f"its trial said {said!r}"
