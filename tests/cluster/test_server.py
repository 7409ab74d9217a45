"""`jitllmd serve -ray`: what an operator sees of it, and what a death does to a server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import jitllm
from jitllm.cli import main as here
from jitllm.cli.daemon.main import main
from tests.api.server import Server, chat_model, running
from tests.conftest import TinyModel

MODEL = "tiny"
RAYS_NICENESS = min(psutil.Process().nice() + 15, 19)
"""Of the workers of a cluster, when nobody says."""

ACTORS = ("device:cpu:0", "pager:cpu:0", "scheduler")
DEVICE = f"{MODEL}:device:cpu:0"


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: TinyModel) -> Path:
    return chat_model(tiny_gguf("llama"), tmp_path_factory.mktemp("model") / "tiny.jlm")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, container: Path) -> Iterator[Server]:
    """One on a cluster of its own."""
    folder = tmp_path_factory.mktemp("server")
    args = ["-load", container, "-id", MODEL, "-threads", "1", "-ray", "local"]
    with running(folder, *args) as server:
        yield server
        assert server.stop() == 0
        assert server.log.read_text().endswith("stopped\n")


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", trust_env=False, timeout=30)


def post(server: Server, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, trust_env=False, timeout=60)


def asking(model: str = MODEL, max_tokens: int = 300) -> dict[str, Any]:
    about = {"model": model, "prompt": "the in", "temperature": 0, "ignore_eos": True}
    return about | {"max_tokens": max_tokens}


def text(server: Server, model: str = MODEL) -> str:
    reply = post(server, "/v1/completions", asking(model))
    assert reply.status_code == 200, reply.text
    whole: str = reply.json()["choices"][0]["text"]
    return whole


def pieces(server: Server, then: Callable[[], object]) -> Iterator[str]:
    """The same as a stream; `then` is done when it has begun."""
    body = asking() | {"stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=60) as reply:
        for number, line in enumerate(reply.iter_lines()):
            if number == 0:
                then()
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def health(server: Server) -> tuple[int, dict[str, str]]:
    reply = get(server, "/healthz")
    return reply.status_code, reply.json()["models"]


def until(condition: Callable[[], object]) -> None:
    while not condition():  # the test's own limit ends it
        time.sleep(0.05)


def listed(server: Server) -> list[dict[str, Any]]:
    """The actors, as Ray's own command has them."""
    command = [str(Path(sys.executable).parent / "ray"), "list", "actors", "--format", "json"]
    done = subprocess.run(
        [*command, "--address", server.said["ray"]["address"]],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "RAY_AUTH_MODE": "token"},
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return [actor for actor in found if actor["state"] == "ALIVE"]


def process_of(server: Server, actor: str) -> psutil.Process:
    return psutil.Process(next(a["pid"] for a in listed(server) if a["name"] == f"jitllm:{actor}"))


def test_ray_lists_the_actors_under_readable_names(server: Server) -> None:
    actors = listed(server)
    names = {f"jitllm:{MODEL}:{actor}" for actor in ACTORS}
    assert {actor["name"] for actor in actors} == names | {"jitllm:manager"}
    pids = {actor["pid"] for actor in actors} - {server.process.pid}
    assert len(pids) == 4
    assert all(psutil.Process(pid).nice() == 0 for pid in pids)


def test_its_log_says_where_the_cluster_and_its_pages_are(server: Server) -> None:
    log, about = server.log.read_text(), server.said["ray"]
    assert f"started a Ray cluster at {about['address']}" in log
    assert about["dashboard"] in log
    assert httpx.get(about["dashboard"], trust_env=False).status_code == 200


def test_a_reply_says_where_it_was_made(server: Server) -> None:
    about = post(server, "/v1/completions", asking(max_tokens=2)).json()["jitllm"]
    assert (about["runtime"], about["devices"]) == ("ray", ["cpu"])
    devices = get(server, "/jitllm/v1/devices").json()["devices"]
    assert {(device["runtime"], *device["notes"]) for device in devices} == {("ray",)}
    assert {d["name"]: d["models"] for d in devices}["cpu:0"] == [MODEL]


def test_a_device_that_dies_changes_no_reply_and_health_comes_back(server: Server) -> None:
    expected = text(server)
    device = process_of(server, DEVICE)
    assert "".join(pieces(server, device.kill)) == expected
    assert process_of(server, DEVICE) != device
    until(lambda: health(server) == (200, {MODEL: "ok"}))
    assert text(server) == expected


@pytest.mark.parametrize("is_given_up", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_device_that_hangs_is_not_healthy_and_goes_on_once_it_moves(
    server: Server, is_given_up: bool
) -> None:
    expected = text(server)
    device = process_of(server, DEVICE)
    seen: list[tuple[int, dict[str, str]]] = []

    def hang() -> None:
        device.suspend()
        try:
            seen.append(health(server))
            until(lambda: not is_given_up or "does not move" in server.log.read_text())
        finally:
            device.resume()

    assert "".join(pieces(server, hang)) == expected  # a hang is no death: nothing is lost
    assert seen == [(503, {MODEL: "no answer within 5 s"})]
    until(lambda: health(server) == (200, {MODEL: "ok"}))
    assert text(server) == expected


def test_a_model_whose_scheduler_died_is_not_healthy_and_may_be_loaded_again(
    server: Server, container: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = text(server)
    load = ["models", "-load", str(container), "-id", "second", "-addr", server.url]
    assert main(load) == 0
    assert len(listed(server)) == 7
    process_of(server, "second:scheduler").kill()
    until(lambda: health(server)[0] == 503)
    status, states = health(server)
    assert (status, states[MODEL]) == (503, "ok")
    assert states["second"].startswith("dead: scheduler")
    refused = post(server, "/v1/completions", asking("second"))
    assert refused.status_code == 500
    assert "scheduler has stopped" in refused.json()["error"]["message"]
    assert text(server) == expected
    assert main(["models", "-unload", "second", "-addr", server.url]) == 0
    assert main(load) == 0
    assert health(server) == (200, {MODEL: "ok", "second": "ok"})
    assert text(server, "second") == expected
    assert main(["models", "-unload", "second", "-addr", server.url]) == 0
    assert len(listed(server)) == 4
    capsys.readouterr()


async def test_a_handle_of_a_server_on_ray_answers_as_one_of_a_file(
    server: Server, container: Path
) -> None:
    async with jitllm.connect(server.url) as far, jitllm.connect(container) as near:
        one, other = [await h.complete("the in an", max_tokens=12) for h in (far, near)]
    assert (one.text, one.tokens, one.finish) == (other.text, other.tokens, other.finish)


# ------------------------------------------------------------------- on somebody else's cluster

STRANGER = """
import os, ray, sys
ray.init(
    address="local", include_dashboard=False, num_cpus=1, object_store_memory=100 << 20,
    _temp_dir=sys.argv[1], log_to_driver=False, logging_level=40,
)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def stranger() -> Iterator[tuple[str, psutil.Process]]:
    """Address of a cluster as Ray starts it by itself, and the process that keeps it."""
    folder = Path(f"/tmp/jitllm-stranger-{os.getpid()}")  # short: sockets lie in it
    with subprocess.Popen(
        [sys.executable, "-c", STRANGER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address
        yield address, psutil.Process(process.pid)
        process.communicate(timeout=60)
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def actors_under(cluster: psutil.Process) -> list[psutil.Process]:
    family = cluster.children(recursive=True)
    return [process for process in family if "ActorProcess" in process.name()]


def test_joining_a_cluster_says_what_is_slow_there_and_leaves_it_as_it_was(
    stranger: tuple[str, psutil.Process],
    container: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, cluster = stranger
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # as Ray wants it for an address
    args = ["-load", container, "-id", MODEL, "-threads", "1", "-ray", address]
    with running(tmp_path, *args) as server:
        slow = f"Ray runs its workers at nice {RAYS_NICENESS}"
        assert f"joined the Ray cluster at {address}" in server.log.read_text()
        assert slow in server.log.read_text()
        [note] = get(server, "/healthz").json()["notes"]
        assert note.startswith(slow)
        assert main(["devices", "-addr", server.url]) == 0
        assert slow in capsys.readouterr().out
        assert len(actors_under(cluster)) == 4
        assert here.main(["hardware", "-json"]) == 0
        found = json.loads(capsys.readouterr().out)["ray"]["clusters"]
        assert {"address": address, "niceness": RAYS_NICENESS} in found
        assert here.main(["hardware"]) == 0
        assert f"{address} (its workers run at nice {RAYS_NICENESS}" in capsys.readouterr().out
        second = [sys.executable, "-m", "jitllm.cli.daemon.main", "serve", "-addr", "127.0.0.1:0"]
        refused = subprocess.run(
            [*second, *map(str, args)], capture_output=True, text=True, timeout=60, check=False
        )
        assert refused.returncode == 2
        assert f"the cluster has a model '{MODEL}' already, served by" in refused.stderr
        expected = text(server)
        assert "".join(pieces(server, lambda: server.process.terminate())) == expected
        assert server.process.wait(60) == 0
        until(lambda: not actors_under(cluster))
    assert cluster.is_running()

    with running(tmp_path, *args) as server:
        assert len(actors_under(cluster)) == 4
        server.stop(signal.SIGKILL)
        until(lambda: not actors_under(cluster))
    with running(tmp_path, *args) as server:
        assert text(server)
        assert server.stop() == 0


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, psutil.Process]]:
    """Address of a cluster that `ray start --head` made, and the process that keeps it."""
    folder = Path(f"/tmp/jitllm-head-{os.getpid()}")
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))  # there, and nowhere else, is what `auto` finds
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"]
    command += ["--port", "0", "--num-cpus", "1", "--include-dashboard", "false"]
    command += ["--object-store-memory", str(100 << 20), "--disable-usage-stats"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet) as process:
        said = folder / "ray" / "ray_current_cluster"
        until(lambda: process.poll() is not None or (said.exists() and said.read_text()))
        yield said.read_text().strip(), psutil.Process(process.pid)
        process.terminate()
    shutil.rmtree(folder)


def test_a_server_on_a_live_cluster_leaves_it_alive_and_empty(
    head: tuple[str, psutil.Process], container: Path, tmp_path: Path
) -> None:
    address, cluster = head
    for how in ("auto", address):
        args = ["-load", container, "-id", MODEL, "-threads", "1", "-ray", how]
        with running(tmp_path, *args) as server:
            assert f"joined the Ray cluster at {address}" in server.log.read_text()
            assert server.said["ray"]["address"] == address
            [note] = get(server, "/healthz").json()["notes"]
            assert note.startswith(f"Ray runs its workers at nice {RAYS_NICENESS}")
            assert len(actors_under(cluster)) == 4
            assert text(server)
            assert server.stop() == 0
        until(lambda: not actors_under(cluster))
        names = {process.name() for process in cluster.children(recursive=True)}
        assert {"gcs_server", "raylet"} <= names
