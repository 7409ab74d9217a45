"""Being part of a Ray cluster: starting one on this machine, or joining one that runs.

Imports Ray, for `actors.ray`. Knows no actor. A process is part of one cluster at most, and of that
as long as anyone in it is. A cluster that was started here ends with this process whatever ends it:
the kernel sees to its processes, and the next start to its folder. No signal reaches it that was
meant for this process and its group.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray

from jitllm.errors import JitllmError, UsageError, one_line, shown
from jitllm.log import logger

REMEDY = "start one with `ray start --head`, or let one be started: -ray local"
TOKEN_REMEDY = "if it wants its token (~/.ray/auth_token), set RAY_AUTH_MODE=token"
REACH_S = 5.0
"""How long an address may take to answer."""

PROBE_S = 1.0
"""How long a cluster that we are part of may take."""

OBJECT_STORE_BYTES = 100 << 20
"""Ray's own messages only: weights, KV and hidden states never lie in the object store."""

SETTINGS = {
    "worker_niceness": 0,
    "enable_metrics_collection": False,
    "event_stats": False,
    "memory_monitor_refresh_ms": 0,
    "raylet_report_resources_period_milliseconds": 1000,
    "task_events_report_interval_ms": 0,
}
"""Of a cluster that is started here. It collects nothing about itself: there is no task to see but
an actor's start and end, and who leaves a cluster that has crashed would wait 15 s to report. It
kills nobody for the memory that is left: budgets are what bounds ours. What it does all the time
it does on cores that compute."""

_MAX_FOLDER = 40
"""Letters in the path of our folder: Ray puts sockets into it, whose paths have limits."""

_log = logger(__name__)


@dataclass(slots=True)
class _Membership:
    """What this process shares with all that use the cluster in it. Ray allows one a process."""

    how: str
    dashboard: str
    num_members: int = 0


_membership: _Membership | None = None


class Cluster:
    """This process as part of a cluster, which holds an object store and processes of Ray's.

    `close` it, or use it in a `with`; the last one that is closed leaves the cluster.
    """

    def __init__(self, how: str, *, dashboard: bool = True) -> None:
        """Start a cluster on this machine ("local"), join the one that runs here ("auto"), or the
        one at an address.

        dashboard: with "local", serve Ray's own pages too. Takes about 5 s. A cluster that is
        started lives no longer than the thread that does it. Raises `JitllmError` when there is
        no cluster, and when this process is part of another one.
        """
        global _membership
        if _membership is None:
            _membership = _Membership(how, _join(how, dashboard))
        elif _membership.how != how:
            raise JitllmError(
                f"this process is part of a cluster already (-ray {_membership.how})",
                "one process joins one cluster",
            )
        _membership.num_members += 1
        self._is_member = True
        context = ray.get_runtime_context()
        self.address: str = context.gcs_address
        """For `ray list actors --address`, and for others who want to join."""
        self.node: str = context.get_node_id()
        self.dashboard = _membership.dashboard
        """Address of Ray's pages; empty if there are none."""

    def is_there(self) -> bool:
        """Whether anyone answers at its address: calls of Ray's hang where nobody does."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
        except OSError:
            return False
        return True

    def nodes(self) -> dict[str, str]:
        """The nodes that are up, by the name that devices of theirs are called after.

        That is the name of the machine, or its address where several have one name; the id of each
        is Ray's. This node is among them.
        """
        return {name: node_id for node_id, name in nodes_up().items()}

    def find(self, name: str) -> str:
        """The id of a node; of this one if it has no name. Raises `UsageError` if there is none."""
        nodes = self.nodes() if name else {"": self.node}
        if name not in nodes:
            raise UsageError(f"no node {name} in the cluster", f"there are {', '.join(nodes)}")
        return nodes[name]

    def kill(self, pid: int) -> None:
        """End a process of Ray's on this node that the cluster itself can end no more."""
        with contextlib.suppress(psutil.Error):  # it may have ended
            process = psutil.Process(pid)
            if process.name().startswith("ray::"):  # the number may be another's by now
                process.kill()

    def close(self) -> None:
        """Leave; what was started here ends. Twice is fine."""
        global _membership
        if not self._is_member or _membership is None:
            return
        self._is_member = False
        _membership.num_members -= 1
        if not _membership.num_members:
            _membership = None
            _leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def nodes_up() -> dict[str, str]:
    """Names of the nodes that are up in the cluster that this process is in, by Ray's ids."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    alive = [node for node in nodes if node["Alive"]]
    hosts = Counter(node["NodeManagerHostname"] for node in alive)
    return {
        node["NodeID"]: node["NodeManagerHostname"]
        if hosts[node["NodeManagerHostname"]] == 1
        else node["NodeManagerAddress"]
        for node in alive
    }


def _join(how: str, dashboard: bool) -> str:
    """Be part of a cluster; the address of its pages."""
    options: dict[str, Any] = {
        "namespace": "jitllm",
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    if how == "local":
        # The kernel ends Ray's processes when the thread that started them is gone.
        if threading.current_thread() is not threading.main_thread():
            raise JitllmError("a cluster is started by the main thread")
        sweep()
        options |= {
            "address": "local",
            "include_dashboard": None if dashboard else False,  # None: if its packages are there
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(_own_folder()),
            "_system_config": SETTINGS,
        }
    else:
        _check_address(how)
        options["address"] = how
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
    # Else it lists its folder ten times a second.
    os.environ.setdefault("RAY_LOG_MONITOR_MANY_FILES_THRESHOLD", "0")
    _redirect_prints()
    try:
        with _own_signals(), _private_files(), _own_sessions():
            url = ray.init(**options).dashboard_url
    except Exception as error:  # whatever it is, there is no cluster
        _leave()
        is_nowhere = how == "auto" and isinstance(error, ConnectionError)
        why = "none runs on this machine" if is_nowhere else str(error).partition("\n")[0]
        remedy = REMEDY if how in ("auto", "local") else TOKEN_REMEDY
        raise JitllmError(f"no Ray cluster (-ray {how}): {why}", remedy) from error
    return f"http://{url}" if url else ""


def _check_address(address: str) -> None:
    """Raises when nobody is there: Ray takes 40 s and a page of its own log to notice."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise UsageError(
            f"-ray {shown(address)}: that is no address of a Ray cluster",
            "write HOST:PORT (of `ray start --head`, port 6379), local or auto",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise JitllmError(f"no Ray cluster answers at {shown(address)}: {error}", REMEDY) from error


def _redirect_prints() -> None:
    """Ray prints its troubles to stdout, which is for replies: they go to the log.

    There is no setting for it; where Ray's inside has changed, it prints.
    """
    worker: Any = sys.modules.get("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = _log_lines


def _log_lines(data: dict[str, Any], **_: Any) -> None:
    for line in data.get("lines", ()):
        _log.warning("ray: %s", one_line(str(line).partition("\n")[0]))


def _leave() -> None:
    with _own_signals():
        ray.shutdown()
    _remove_own_folder()


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; what it means here is not for Ray to say."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_is_starting = False
"""Whether processes that are forked here are Ray's."""


def _leave_group() -> None:
    if _is_starting:
        os.setsid()


os.register_at_fork(after_in_child=_leave_group)


@contextlib.contextmanager
def _own_sessions() -> Iterator[None]:
    """Processes of Ray's that start meanwhile get no signal that goes to our process group.

    A terminal and `timeout` send one to all of a group. It asks us for the end, and the
    cluster is needed until then.
    """
    global _is_starting
    _is_starting = True
    try:
        yield
    finally:
        _is_starting = False


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """What Ray writes at its start is for this user alone: the token of its clusters, above all."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


# ----------------------------------------------------------------------------- folders

_own: tuple[Path, int] | None = None
"""The folder of the cluster that was started here, and the lock that says so."""


def _base() -> Path:
    parent = tempfile.gettempdir()
    return Path(parent if len(parent) < _MAX_FOLDER - 20 else "/tmp") / f"jitllm-{os.getuid()}"


def _own_folder() -> Path:
    """A folder for a cluster's sockets and logs, locked for as long as this process lives."""
    global _own
    base = _base()
    base.mkdir(mode=0o700, exist_ok=True)
    if base.stat().st_uid != os.getuid():
        raise JitllmError(f"{base} belongs to another user", "remove it or set TMPDIR")
    folder = base / f"ray-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _own = folder, lock
    return folder


def _remove_own_folder() -> None:
    global _own
    if _own is not None:
        folder, lock = _own
        _own = None
        _kill_processes_of(folder)  # whom Ray did not find, because a part of it had crashed
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep() -> int:
    """Remove what clusters left whose process was killed; returns how many there were."""
    left = 0
    for folder in _base().glob("ray-*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except OSError:
            continue  # it is just being made, or gone
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its process lives
        else:
            left += 1
            for pid in _kill_processes_of(folder):
                _log.warning("a process of a killed server is ended: %d", pid)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
    return left


def _kill_processes_of(folder: Path) -> list[int]:
    """End this user's processes that have anything open in `folder`, except this one; who."""
    killed = []
    for process in psutil.process_iter(["uids"]):
        with contextlib.suppress(psutil.Error):
            is_ours = process.info["uids"].real == os.getuid() and process.pid != os.getpid()
            if is_ours and _uses(process, folder):
                process.kill()
                killed.append(process.pid)
    return killed


def _uses(process: psutil.Process, folder: Path) -> bool:
    """Whether a process was called with a session of a cluster, or has a file open in one."""
    # Some of Ray's processes rename themselves, and what they were called with is lost. The lock
    # lies beside the sessions: who sweeps, here or elsewhere, has it open.
    session = f"{folder}/session_"
    named: list[str] = process.cmdline()
    return any(session in word for word in named) or any(
        file.path.startswith(session) for file in process.open_files()
    )
