"""A model that is being loaded holds up nobody: not replies of others, not who asks for health."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.api.server import running
from tests.conftest import TinyModel


@pytest.mark.parametrize("runtime", ["embedded", pytest.param("ray", marks=pytest.mark.slow)])
async def test_health_and_replies_go_on_while_a_model_is_loaded(
    runtime: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # in which no kernel is
    if runtime == "ray":
        pytest.importorskip("ray", reason="needs the extra `ray`")
    args = [*("-threads", "1"), *(("-ray", "local") if runtime == "ray" else ())]
    with running(tmp_path, "-load", tiny_model("llama"), "-id", "first", *args) as server:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as client:
            body = {"path": str(tiny_model("gemma3")), "id": "second"}
            load = asyncio.create_task(client.post("/jitllm/v1/models", json=body))
            num_healthy, num_pieces = await asyncio.gather(
                _healthy(client, load), _pieces(client, load)
            )
            assert (await load).status_code == 201
            assert num_healthy >= 10
            assert num_pieces >= 10


async def _healthy(client: httpx.AsyncClient, load: asyncio.Task[httpx.Response]) -> int:
    """How often the server was well until the load was done."""
    num = 0
    while not load.done():
        assert (await client.get("/healthz")).status_code == 200
        num += 1
    return num


async def _pieces(client: httpx.AsyncClient, load: asyncio.Task[httpx.Response]) -> int:
    """How many pieces of replies came until the load was done."""
    body = {"model": "first", "prompt": "the in", "stream": True, "ignore_eos": True}
    num = 0
    while not load.done():
        async with client.stream(
            "POST", "/v1/completions", json=body | {"max_tokens": 200}
        ) as reply:
            async for line in reply.aiter_lines():
                num += line.startswith("data: {") and not load.done()
    return num
