"""A server that ends, however it ends, leaves nothing on its machine."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from actors import cluster as cluster_module
from actors.cluster import sweep
from tests.api.server import Server, running
from tests.conftest import TinyModel


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the folders of clusters lie: a short path, and nobody else's."""
    parent = Path(f"/tmp/jl{os.getpid()}")
    parent.mkdir()
    monkeypatch.setenv("TMPDIR", str(parent))  # for servers; here `tempfile` has its own already
    base = parent / f"jitllm-{os.getuid()}"
    monkeypatch.setattr(cluster_module, "_base", lambda: base)
    yield base
    sweep()
    shutil.rmtree(parent)


def processes(base: Path, server: Server) -> list[psutil.Process]:
    """Of a cluster: the server's children, theirs, and who names its folder."""
    pid = server.process.pid
    family = psutil.Process(pid).children(recursive=True)
    named = [p for p in psutil.process_iter(["cmdline"]) if f"{base}/" in " ".join(_line(p))]
    return list({p.pid: p for p in (*family, *named) if p.pid != pid}.values())


def _line(process: psutil.Process) -> list[str]:
    return process.info["cmdline"] or []


def ports(found: list[psutil.Process]) -> set[int]:
    return {
        connection.laddr.port
        for process in found
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def ended(found: list[psutil.Process]) -> None:
    """Wait until none of them computes; who reaps them is not our business."""
    while any(map(_lives, found)):  # the test's own limit ends it
        time.sleep(0.05)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def nothing_is_left(found: list[psutil.Process], base: Path, shared_before: set[str]) -> bool:
    ended(found)
    return shared_files() <= shared_before and not list(base.iterdir())


def test_the_next_start_removes_what_a_kill_leaves_and_an_end_leaves_nothing(
    tiny_model: TinyModel, base: Path, tmp_path: Path
) -> None:
    before = shared_files()
    args = ["-load", tiny_model("llama"), "-threads", "1", "-ray", "local"]
    with running(tmp_path, *args) as server:
        port = server.url.rpartition(":")[2]
        found = processes(base, server)
        ours = [process for process in found if "ActorProcess" in process.name()]
        assert len(ours) == 4
        assert ports(found)
        server.stop(signal.SIGKILL)
    ended(ours)  # the kernel and Ray see to that
    [left] = base.iterdir()

    with running(tmp_path, *args, "-addr", f"127.0.0.1:{port}") as server:
        ended(found)
        assert not left.exists()
        assert sweep() == 0  # the living are left alone
        assert len(list(base.iterdir())) == 1
        found = processes(base, server)
        assert len(found) > 5  # Ray's own, and our four
        assert server.stop() == 0
    assert nothing_is_left(found, base, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_of_a_server_ends_it_after_the_replies_under_way(
    tiny_model: TinyModel, base: Path, tmp_path: Path, number: signal.Signals
) -> None:
    before = shared_files()
    args = ["-load", tiny_model("llama"), "-id", "tiny", "-threads", "1", "-ray", "local"]
    body = {"model": "tiny", "prompt": "the in", "max_tokens": 300, "ignore_eos": True}
    with running(tmp_path, *args) as server:
        found = processes(base, server)
        url, stream = f"{server.url}/v1/completions", {"stream": True}
        with httpx.stream("POST", url, json=body | stream, trust_env=False, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.killpg(server.process.pid, number)  # as `timeout` and a terminal do
            *_, last = (line for line in lines if line)
        assert last == "data: [DONE]"
        assert server.process.wait(60) == 0
        assert "did not stop" not in server.log.read_text()
    assert nothing_is_left(found, base, before)


@pytest.mark.parametrize("crashed", ["gcs_server", "gcs_server raylet"])
def test_a_server_whose_cluster_has_crashed_ends_and_takes_the_rest_along(
    tiny_model: TinyModel, base: Path, tmp_path: Path, crashed: str
) -> None:
    before = shared_files()
    args = ["-load", tiny_model("llama"), "-threads", "1", "-ray", "local"]
    with running(tmp_path, *args) as server:
        found = processes(base, server)
        victims = [process for process in found if process.name() in crashed.split()]
        for process in victims:
            process.kill()
        ended(victims)
        # Ray's own patience with a cluster that is gone is a minute, and its end is an abort.
        assert server.stop() == 0
        assert server.log.read_text().endswith("stopped\n")
    assert nothing_is_left(found, base, before)
