"""A burst that no server of this size can take: what it answers, and what is left of it."""

from __future__ import annotations

import asyncio
import re
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.api.server import Server, running
from tests.conftest import TinyModel

NUM_REQUESTS = 500
NUM_TOKENS = 50
MAX_QUEUE, MAX_BATCH = 64, 16
MODEL = "tiny"
RUNTIMES: dict[str, list[str]] = {"embedded": [], "ray": ["-ray", "local"]}
"""What `serve` is told for each."""
MAX_GROWTH = 0.05
"""Of resident memory, by a burst like the one before."""
RAYS_OWN = {"embedded": 0, "ray": 8}
"""Threads, and as many handles, that Ray may start in our processes whenever it likes."""
_ACTOR = re.compile(r"ray::(?!IDLE).*(?<!Agent)")
_SHARED = re.compile(r"/dev/shm/|/memfd:|/SYSV")


@pytest.fixture(scope="module", params=RUNTIMES)
def server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: TinyModel,
) -> Iterator[Server]:
    if request.param == "ray":
        pytest.importorskip("ray", reason="needs the extra `ray`")
    args: list[str | Path] = ["-load", tiny_model("llama"), "-id", MODEL, "-threads", "1"]
    args += ["-max-queue", str(MAX_QUEUE), "-max-batch", str(MAX_BATCH), *RUNTIMES[request.param]]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4 * NUM_REQUESTS, hard)), hard))
    try:
        with running(tmp_path_factory.mktemp("server"), *args) as server:
            yield server
            assert server.stop() == 0
            assert "Traceback" not in server.log.read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@dataclass(frozen=True)
class Level:
    """What a server holds while it has nothing to do."""

    kv_bytes: int
    handles: int
    threads: int
    segments: int

    @classmethod
    def of(cls, server: Server) -> Level:
        [model] = get(server, "/jitllm/v1/stats").json()["models"]
        at_work = processes(server)
        return cls(
            kv_bytes=model["kv_bytes"],
            handles=sum(process.num_fds() for process in at_work),
            threads=sum(process.num_threads() for process in at_work),
            segments=sum(
                len(_SHARED.findall(Path(f"/proc/{process.pid}/maps").read_text()))
                for process in at_work
            ),
        )

    def is_like(self, other: Level, slack: int) -> bool:
        """Whether it is that level again, but for so many handles and threads."""
        return (
            (self.kv_bytes, self.segments) == (other.kv_bytes, other.segments)
            and abs(self.handles - other.handles) <= slack
            and abs(self.threads - other.threads) <= slack
        )


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", trust_env=False, timeout=30)


def processes(server: Server) -> list[psutil.Process]:
    """The server's own and those of its actors."""
    own = psutil.Process(server.process.pid)
    below = own.children(recursive=True)
    return [own, *(process for process in below if _ACTOR.fullmatch(process.name()))]


def resident_bytes(server: Server) -> int:
    return sum(int(process.memory_info().rss) for process in processes(server))


def request(number: int) -> dict[str, Any]:
    """One of a mixture: whole and streamed, chosen once and twice, prompts that share nothing."""
    return {
        "model": MODEL,
        "prompt": [1, *(260 + (number * 7 + i * i) % 60 for i in range(20 + number % 30))],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": number % 3 == 0,
        "n": 1 + (number % 10 == 0),
        "seed": number,
    }


async def burst(server: Server, num_requests: int = NUM_REQUESTS) -> list[httpx.Response]:
    """All answers to as many requests at once, each on a connection of its own."""
    async with httpx.AsyncClient(
        base_url=server.url,
        trust_env=False,
        limits=httpx.Limits(max_connections=None),
        timeout=120,
    ) as client:
        return await asyncio.gather(
            *(client.post("/v1/completions", json=request(i)) for i in range(num_requests))
        )


def check(answers: list[httpx.Response]) -> None:
    """Each is whole or refused, and both happened."""
    for number, answer in enumerate(answers):
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        elif request(number)["stream"]:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text
        else:
            assert answer.json()["usage"]["completion_tokens"] == NUM_TOKENS * request(number)["n"]
    counted = Counter(answer.status_code for answer in answers)
    assert set(counted) == {200, 429}, counted
    assert counted[200] >= MAX_QUEUE


async def until_level(server: Server, level: Level) -> None:
    """Wait until it holds that again: a connection ends a moment after its client."""
    slack = RAYS_OWN["ray" if server.said["ray"] else "embedded"]
    for _ in range(200):
        if (now := Level.of(server)).is_like(level, slack):
            return
        await asyncio.sleep(0.05)
    assert now == level


@pytest.mark.slow
async def test_every_request_of_a_burst_is_answered_and_leaves_nothing(server: Server) -> None:
    await burst(server, 1)
    level = Level.of(server)
    assert level.kv_bytes == 0
    await burst(server, MAX_QUEUE)  # fills what is kept of prompts
    resident: list[int] = []
    for _ in range(2):
        check(await burst(server))
        await until_level(server, level)
        resident.append(resident_bytes(server))
    first, second = resident
    assert abs(second - first) <= MAX_GROWTH * first
    metrics = get(server, "/metrics").text
    assert re.search(r"^jitllm_kv_bytes\{.*\} 0\.0$", metrics, re.MULTILINE)
    assert re.search(r"^jitllm_requests_waiting\{.*\} 0\.0$", metrics, re.MULTILINE)
