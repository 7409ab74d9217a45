"""A server that ends, however it ends, leaves nothing on its machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from actors import cluster as cluster_module
from actors.cluster import sweep
from tests.conftest import TinyModel

SERVER = """
import asyncio, sys
from pathlib import Path
from actors import cluster
from jitllm.compose import open_engine
from jitllm.config import EngineConfig
from jitllm.engine import Request

cluster._base = lambda: Path(sys.argv[2])

async def main():
    loaded = await open_engine(Path(sys.argv[1]), EngineConfig(), ray="local")
    async for delta in loaded.engine.generate(Request((1, 2, 3), max_tokens=4)):
        assert delta.error is None
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await loaded.close()

asyncio.run(main())
"""


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the folders of clusters lie: a short path, and nobody else's."""
    base = Path(f"/tmp/jitllm-test-{os.getpid()}")
    monkeypatch.setattr(cluster_module, "_base", lambda: base)
    yield base
    sweep()
    base.rmdir()


def serve(path: Path, base: Path) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path), str(base)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return server


def processes(base: Path, server: subprocess.Popen[str]) -> list[psutil.Process]:
    """Of a cluster: the server's children, theirs, and who names its folder."""
    family = psutil.Process(server.pid).children(recursive=True)
    named = [p for p in psutil.process_iter(["cmdline"]) if f"{base}/" in " ".join(_line(p))]
    return list({p.pid: p for p in (*family, *named) if p.pid != server.pid}.values())


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


def test_an_end_leaves_nothing(tiny_model: TinyModel, base: Path) -> None:
    before = shared_files()
    with serve(tiny_model("llama"), base) as server:
        found = processes(base, server)
        assert len(found) > 4  # Ray's own, and our three
        assert ports(found)
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(60) == 0
    _, alive = psutil.wait_procs(found, 30)
    assert not alive
    assert shared_files() <= before
    assert not list(base.iterdir())


def test_the_next_start_removes_what_a_kill_leaves(tiny_model: TinyModel, base: Path) -> None:
    before = shared_files()
    with serve(tiny_model("llama"), base) as server:
        found = processes(base, server)
        ours = [process for process in found if "ActorProcess" in process.name()]
        server.kill()
    assert len(ours) == 3
    _, alive = psutil.wait_procs(ours, 30)  # the kernel and Ray see to that
    assert not alive
    assert sweep() == 1
    _, alive = psutil.wait_procs(found, 10)
    assert not alive
    assert shared_files() <= before
    assert not list(base.iterdir())


def test_a_sweep_leaves_the_living_alone(tiny_model: TinyModel, base: Path) -> None:
    with serve(tiny_model("llama"), base) as server:
        assert sweep() == 0
        assert len(list(base.iterdir())) == 1
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(60) == 0
