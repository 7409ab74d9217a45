"""Many streams over HTTP: our server against llama.cpp's, and Ray against embedded.

Set JITLLM_BENCH_GGUF to a GGUF file, JITLLM_PEER_SERVER to llama.cpp's `llama-server` (for the
comparison with it), and JITLLM_BENCH_PAIRS to the number of pairs (10).
"""

from __future__ import annotations

import asyncio
import contextlib
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
        for ratio in compare(load(ours.url, NUM_STREAMS), load(peer, NUM_STREAMS), PAIRS):
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


def load(url: str, streams: int) -> Sample:
    """A load of `streams` requests at once; every call has prompts of its own, so that no cache of
    prefixes helps anybody. Rates: tokens a second of all, and one over the median time to first
    token."""
    calls = iter(range(1_000_000))

    def sample() -> dict[str, float]:
        return asyncio.run(_load(url, streams, next(calls)))

    return sample


async def _load(url: str, streams: int, call: int) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        started = time.perf_counter()
        firsts = await asyncio.gather(
            *(_stream(client, model, _prompt(call * streams + n)) for n in range(streams))
        )
        elapsed_s = time.perf_counter() - started
    return {
        "output": streams * NUM_TOKENS / elapsed_s,
        "first token": 1 / statistics.median(firsts),
    }


async def _stream(client: httpx.AsyncClient, model: str, prompt: str) -> float:
    """Seconds to the first token of one streamed completion."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started, first_s = time.perf_counter(), None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if first_s is None and line.startswith("data: {"):
                first_s = time.perf_counter() - started
    assert first_s is not None
    return first_s


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
