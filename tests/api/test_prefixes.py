"""What a server says about the prefix cache, and how tenants are kept apart."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest

from jitllm.cli.daemon.report import prefixes_line
from jitllm.engine import EngineStats, PrefixTotals
from tests.api.fake import FakeEngine

TEXT = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 2}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TOTALS = PrefixTotals(
    hits=3,
    whole=1,
    misses=2,
    tokens=700,
    files=5,
    bytes_out=6 << 20,
    bytes_in=2 << 20,
    evictions=1,
    damaged=4,
    failures=6,
    skipped=7,
    restore_s=0.25,
)
FIELDS = tuple(asdict(TOTALS))


@pytest.mark.parametrize(("path", "body"), [("completions", TEXT), ("chat/completions", CHAT)])
async def test_a_salt_is_the_namespace_of_a_request(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    for salt in ({}, {"cache_salt": "tenant 7"}, {"cache_salt": None}):
        assert (await client.post(f"/v1/{path}", json=body | salt)).status_code == 200
    assert [request.namespace for request in engine.requests] == ["", "tenant 7", ""]
    for wrong in ("", 7, "x" * 1000):
        reply = await client.post(f"/v1/{path}", json=body | {"cache_salt": wrong})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "cache_salt"


async def test_everything_about_prefixes_is_counted(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = engine.stats

    async def with_prefixes() -> EngineStats:
        kept = {"prefix_disk_bytes": 5 << 20, "prefix_waiting_bytes": 9}
        return replace(await stats(), prefix_totals=TOTALS, **kept)

    monkeypatch.setattr(engine, "stats", with_prefixes)
    lines = (await client.get("/metrics")).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    names = {name: name.removesuffix("_s") + "_seconds" * name.endswith("_s") for name in FIELDS}
    expected = {f"{names[name]}_total": getattr(TOTALS, name) for name in FIELDS}
    expected |= {"disk_bytes": 5 << 20, "waiting_bytes": 9}
    shown = {name: float(values[f'jitllm_prefix_{name}{{model="fake"}}']) for name in expected}
    assert shown == expected
    [found] = (await client.get("/jitllm/v1/stats")).json()["models"]
    assert found["prefix_totals"] == asdict(TOTALS)
    [line] = prefixes_line(found)
    assert line.startswith("prefixes 5.00 MiB on disk   hits 3   misses 2   700 tokens from there")


async def test_nothing_is_said_of_a_cache_that_there_is_not(client: httpx.AsyncClient) -> None:
    [found] = (await client.get("/jitllm/v1/stats")).json()["models"]
    assert prefixes_line(found) == []
