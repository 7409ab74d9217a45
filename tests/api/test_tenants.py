"""Tenants of one server with a prefix cache: nobody is served sooner for what others asked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.server import chat_model, running
from tests.conftest import TinyModel

SALTS = (None, "one", "two", "One", "one ", "\0", "a" * 64)
"""Whose names are alike, too."""


@pytest.fixture(scope="module")
def model(tiny_gguf: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tiny_gguf("llama"), tmp_path_factory.mktemp("tenants") / "tiny.jlm")


def asked(client: httpx.Client, path: str, salt: str | None, **more: Any) -> tuple[int, str]:
    """How many tokens of a prompt were cached, and what was said."""
    body: dict[str, Any] = {"model": "small", "max_tokens": 4, "temperature": 0, **more}
    if path == "completions":
        body["prompt"] = list(range(20, 160))
    else:
        body["messages"] = [{"role": "user", "content": "the in an " * 30}]
    if salt is not None:
        body["cache_salt"] = salt
    reply = client.post(f"/v1/{path}", json=body, timeout=60).raise_for_status().json()
    choice = reply["choices"][0]
    text = choice["text"] if path == "completions" else choice["message"]["content"]
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"], text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_tenant_sees_its_own_prompts_only(model: Path, tmp_path: Path, path: str) -> None:
    """At once, one after the other, and after a restart."""
    args = ("-load", model, "-id", "small", "-threads", "1", "-kv-cache", tmp_path / "kept")
    with (
        running(tmp_path, *args) as server,
        httpx.Client(base_url=server.url) as client,
        ThreadPoolExecutor(len(SALTS)) as pool,
    ):
        first = list(pool.map(lambda salt: asked(client, path, salt), SALTS))
        assert [cached for cached, _ in first] == [0] * len(SALTS)
        again = list(pool.map(lambda salt: asked(client, path, salt), SALTS))
        assert all(cached > 0 for cached, _ in again)
        assert asked(client, path, "three", n=3, temperature=1)[0] == 0
        assert server.stop() == 0
    with running(tmp_path, *args) as server, httpx.Client(base_url=server.url) as client:
        assert asked(client, path, "four")[0] == 0
        later = [asked(client, path, salt) for salt in SALTS]
        assert all(cached > 0 for cached, _ in later)
        assert {text for _, text in (*first, *again, *later)} == {first[0][1]}
