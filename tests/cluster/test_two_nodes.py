"""A model over two nodes: Ray in two network namespaces of this machine, joined by a cable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TinyModel

ROOT = Path(__file__).parents[2]
RAY = Path(sysconfig.get_path("scripts")) / "ray"
PORT = 6390
# Both nodes are one user's on one machine, and nothing else reaches the cable between them.
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("ip") is None,
        reason="two nodes on one machine need root and `ip` (Debian: iproute2)",
    ),
]


class Node:
    """A network namespace with an address."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address

    def command(self, *words: str | Path) -> list[str]:
        return ["ip", "netns", "exec", self.name, *map(str, words)]

    def run(self, *words: str | Path) -> None:
        done = subprocess.run(
            self.command(*words), env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True,
            timeout=150,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def kill(self) -> None:
        """End all of its processes."""
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        subprocess.run(["kill", "-9", *pids.stdout.split()], capture_output=True)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    made = tuple(Node(f"jitllm{n}-{os.getpid()}", f"10.77.0.{n}") for n in (1, 2))
    first, second = made
    try:
        for node in made:
            ip("netns", "add", node.name)
        ends = [f"jl{n}-{os.getpid()}" for n in (1, 2)]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for node, end in zip(made, ends, strict=True):
            ip("link", "set", end, "netns", node.name)
            ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", end)
            ip("-n", node.name, "link", "set", "lo", "up")
            ip("-n", node.name, "link", "set", end, "up")
        yield first, second
    finally:
        for node in made:
            node.kill()
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True)


@pytest.fixture
def address(nodes: tuple[Node, Node]) -> Iterator[str]:
    """Of a cluster of both."""
    first, second = nodes
    address = f"{first.address}:{PORT}"
    # Sockets have names of limited length, so Ray's folder is not below the test's.
    folder = Path(f"/tmp/jl{os.getpid()}")
    common = ("--num-cpus=1", "--disable-usage-stats", f"--temp-dir={folder}")
    try:
        first.run(
            *(RAY, "start", "--head", f"--port={PORT}", f"--node-ip-address={first.address}"),
            *("--include-dashboard=false", *common),
        )
        second.run(
            RAY, "start", f"--address={address}", f"--node-ip-address={second.address}", *common
        )
        yield address
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_blocks_of_one_model_are_on_two_nodes_and_move_between_them(
    nodes: tuple[Node, Node], address: str, tiny_model: TinyModel
) -> None:
    first, second = nodes
    model = tiny_model("llama", "q8_0")
    program = (sys.executable, "-m", "tests.cluster.two_nodes")
    first.run(*program, "moves", model, address, second.address)


def test_nodes_offer_their_devices_and_one_that_leaves_is_missed(
    nodes: tuple[Node, Node], address: str, tiny_model: TinyModel
) -> None:
    first, second = nodes
    model = tiny_model("llama", "q8_0")
    program = first.command(sys.executable, "-m", "tests.cluster.two_nodes", "loses", model)
    with subprocess.Popen(
        [*program, address, second.address],
        env=ENVIRONMENT,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if ready:
                second.kill()
            _, problems = process.communicate(timeout=150)
        finally:
            process.kill()
    assert (process.returncode, ready) == (0, "ready\n"), problems
