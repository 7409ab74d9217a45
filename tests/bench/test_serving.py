"""Many streams over HTTP: our server against llama.cpp's, and Ray against embedded.

Set JITLLM_BENCH_GGUF to a GGUF file, JITLLM_PEER_SERVER to llama.cpp's `llama-server` (for the
comparison with it), and JITLLM_BENCH_PAIRS to the number of pairs (10).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.api.server import running
from tests.bench.paired import Sample, compare

SOURCE, PEER = os.environ.get("JITLLM_BENCH_GGUF"), os.environ.get("JITLLM_PEER_SERVER")
PAIRS = int(os.environ.get("JITLLM_BENCH_PAIRS", "10"))
NUM_STREAMS, NUM_WORDS, NUM_TOKENS = 16, 60, 48
NUM_ROUNDS = 6
"""Rounds of a sample against the peer: first tokens come in groups, and whether the middle of
sixteen is in the first group or in the second is a matter of milliseconds."""

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not SOURCE, reason="JITLLM_BENCH_GGUF is not set"),
]

WORDS = (
    "river", "stone", "cloud", "winter", "garden", "letter",
    "engine", "music", "harbour", "candle", "forest", "market",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, converted."""
    assert SOURCE
    path = tmp_path_factory.mktemp("bench") / "model.jlm"
    command = [sys.executable, "-m", "jitllm.cli.main", "convert", SOURCE, str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.mark.skipif(not PEER, reason="JITLLM_PEER_SERVER is not set")
def test_sixteen_streams_against_the_peer(model: Path, tmp_path: Path) -> None:
    """The same load in turn; the server that is not asked has nothing to do."""
    with (
        running(tmp_path, "-load", model, "-threads", "2", "-max-queue", "64") as ours,
        peer_server(tmp_path) as peer,
    ):
        samples = (load(url, NUM_STREAMS, NUM_ROUNDS) for url in (ours.url, peer))
        for ratio in compare(*samples, PAIRS):
            print(f"\n{NUM_STREAMS} streams {ratio}")


@pytest.mark.ray
@pytest.mark.parametrize("streams", [1, NUM_STREAMS])
def test_ray_costs_little(streams: int, model: Path, tmp_path: Path) -> None:
    """Output rate on Ray over embedded."""
    pytest.importorskip("ray")
    (tmp_path / "ray").mkdir()
    with (
        running(tmp_path, "-load", model, "-threads", "2") as embedded,
        running(tmp_path / "ray", "-load", model, "-threads", "2", "-ray", "local") as on_ray,
    ):
        for ratio in compare(load(on_ray.url, streams), load(embedded.url, streams), PAIRS):
            print(f"\n{streams} streams on Ray {ratio}")


def load(url: str, streams: int, rounds: int = 1) -> Sample:
    """A load of `streams` requests at once, as many again when they are done, and so on; every
    round has prompts of its own, so that no cache of prefixes helps anybody. Rates: tokens a second
    of all, and one over the median time to first token."""
    calls = iter(range(1_000_000))
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]

    def sample() -> dict[str, float]:
        firsts: list[float] = []
        started = time.perf_counter()
        for _ in range(rounds):
            firsts += asyncio.run(_load(url, model, streams, next(calls)))
        elapsed_s = time.perf_counter() - started
        return {
            "output": rounds * streams * NUM_TOKENS / elapsed_s,
            "first token": 1 / statistics.median(firsts),
        }

    return sample


async def _load(url: str, model: str, streams: int, call: int) -> list[float]:
    """Seconds to the first token of each request of a round."""
    loop, address = asyncio.get_running_loop(), httpx.URL(url)
    replies = []
    for number in range(streams):
        reply = Reply(_request(model, _prompt(call * streams + number)))
        await loop.create_connection(lambda reply=reply: reply, address.host, address.port)
        replies.append(reply)
    return [await reply.first_s for reply in replies]


class Reply(asyncio.Protocol):
    """One streamed completion. It is looked at once it is whole: client and server share the
    cores, and what a client does for a token is missing elsewhere."""

    def __init__(self, request: bytes) -> None:
        self.first_s: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """Seconds to the first token, known at the end."""
        self._request = request
        self._parts: list[bytes] = []
        self._started = self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._started = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._first and b"data: {" in data:
            self._first = time.perf_counter()
        self._parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        whole = b"".join(self._parts)
        if error or not whole.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in whole:
            self.first_s.set_exception(AssertionError(f"{error}: {whole[:500]!r}"))
        else:
            self.first_s.set_result(self._first - self._started)


def _request(model: str, prompt: str) -> bytes:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


def _prompt(number: int) -> str:
    words = [WORDS[(number * 7 + i * (3 + number % 5)) % len(WORDS)] for i in range(NUM_WORDS)]
    return f"{number} " + " ".join(words)


@contextmanager
def peer_server(folder: Path) -> Iterator[str]:
    """llama-server with as many slots as there are streams."""
    assert PEER
    assert SOURCE
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PEER, "-m", SOURCE, "-t", "2", "-np", str(NUM_STREAMS), "-c", "8192"]
    with (folder / "peer.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log
        )
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(120):
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                time.sleep(0.5)
            yield url
        finally:
            process.kill()
            process.wait(60)
