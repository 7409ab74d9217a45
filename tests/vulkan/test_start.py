"""Kernels are compiled at the first start, for the device and the model, and never again."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitllm.compose import open_engine
from jitllm.config import EngineConfig
from jitllm.engine import Request
from jitllm.jit.cache import ObjectCache
from jitllm.jit.slang import SlangCompiler
from tests.conftest import TinyModel
from tests.models.native import Reply, reply
from tests.ops.vulkan import needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]

REQUEST = Request((1, 259, 75, 260), max_tokens=4)


async def start(path: Path, cache: Path) -> tuple[int, Reply]:
    """How many kernels were compiled, and a reply of theirs."""
    config = EngineConfig(devices="vulkan:0")
    loaded = await open_engine(path, config, cache=ObjectCache(cache))
    try:
        return loaded.compiled_kernels, await reply(loaded.engine, REQUEST)
    finally:
        await loaded.close()


async def test_a_warm_start_compiles_nothing(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one damaged entry held is compiled again, alone."""
    path, folder = tiny_model("gemma3"), tmp_path / "cache"
    num_compiled, expected = await start(path, folder)
    entries = ObjectCache(folder).entries()
    assert num_compiled == len(entries) > 10

    entries[0].write_bytes(entries[0].read_bytes()[:-1])
    num_compiled, found = await start(path, folder)
    assert num_compiled == 1
    assert found.bits == expected.bits

    def refuse(*_: object) -> None:
        raise AssertionError("the compiler was asked for something")

    monkeypatch.setattr(SlangCompiler, "_compile", refuse)
    num_compiled, found = await start(path, folder)
    assert num_compiled == 0
    assert found.bits == expected.bits
