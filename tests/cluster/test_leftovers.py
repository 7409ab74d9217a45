"""A server that ends, however it ends, leaves nothing on its machine."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

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


def test_the_next_start_removes_what_a_kill_leaves_and_an_end_leaves_nothing(
    tiny_model: TinyModel, base: Path, tmp_path: Path
) -> None:
    before = shared_files()
    args = ["-load", tiny_model("llama"), "-threads", "1", "-ray", "local"]
    with running(tmp_path, *args) as server:
        port = server.url.rpartition(":")[2]
        found = processes(base, server)
        ours = [process for process in found if "ActorProcess" in process.name()]
        assert len(ours) == 3
        assert ports(found)
        server.stop(signal.SIGKILL)
    _, alive = psutil.wait_procs(ours, 30)  # the kernel and Ray see to that
    assert not alive
    [left] = base.iterdir()

    with running(tmp_path, *args, "-addr", f"127.0.0.1:{port}") as server:
        _, alive = psutil.wait_procs(found, 10)
        assert not alive
        assert not left.exists()
        assert sweep() == 0  # the living are left alone
        assert len(list(base.iterdir())) == 1
        found = processes(base, server)
        assert len(found) > 4  # Ray's own, and our three
        assert server.stop() == 0
    _, alive = psutil.wait_procs(found, 30)
    assert not alive
    assert shared_files() <= before
    assert not list(base.iterdir())
