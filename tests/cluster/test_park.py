"""Parking on Ray: a history leaves the processes of devices, and outlives them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from actors.cluster import Cluster
from jitllm.engine import Engine, ParkedIn, Request
from tests.cluster.test_engine import on_ray, process_of
from tests.conftest import TinyModel
from tests.models.native import opened, reply

REQUEST = Request(tuple(range(1, 20)), max_tokens=300, name="patient")
PLACES: tuple[ParkedIn, ...] = ("disk", "memory")


async def until_tokens(engine: Engine, count: int) -> None:
    while True:
        states = await engine.sessions()
        if states and states[0].generated_tokens >= count:
            return
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("to", PLACES)
async def test_a_reply_goes_on_where_its_blocks_are_by_then(
    cluster: Cluster, tiny_model: TinyModel, tmp_path: Path, to: ParkedIn
) -> None:
    path = tiny_model("llama")
    async with opened(path) as embedded:
        expected = await reply(embedded.engine, REQUEST)
    sizes = (("cpu:0", 16), ("cpu:1", 4))
    choices = {"devices": "cpu:0,cpu:1", "threads": 2, "page_sizes": sizes}
    async with on_ray(path, kv_cache=str(tmp_path), **choices) as loaded:
        engine = loaded.engine
        task = asyncio.create_task(reply(engine, REQUEST))
        await until_tokens(engine, 20)
        [parked] = await engine.park("patient", to)
        assert parked.parked_in == to
        assert (await engine.stats()).kv_bytes == 0
        await engine.move([0, 2], "cpu:1")
        process_of("device:cpu:0").kill()  # which costs it nothing
        other = await reply(engine, replace(REQUEST, name="other"))
        assert other.bits == expected.bits
        before = await engine.stats()
        await engine.resume("patient")
        assert (await task).bits == expected.bits
        after = await engine.stats()
        assert before.losses == after.losses == 1
        assert after.steps - before.steps == REQUEST.max_tokens - parked.generated_tokens  # type: ignore[operator]
        assert after.park_totals.resumes == 1
        assert after.parked_disk_bytes == after.parked_memory_bytes == 0


async def test_keys_and_values_beyond_a_budget_die_with_their_device_and_nothing_else(
    cluster: Cluster, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("llama")
    async with opened(path) as embedded:
        expected = await reply(embedded.engine, REQUEST)
    choices = {"kv_cache": str(tmp_path), "kv_budget_bytes": 200 << 10, "page_size_tokens": 16}
    async with on_ray(path, **choices) as loaded:
        engine = loaded.engine
        task = asyncio.create_task(reply(engine, REQUEST))
        await until_tokens(engine, 200)
        assert (await engine.stats()).kv_spill.num_bytes > 0
        process_of("device:cpu:0").kill()
        assert (await task).bits == expected.bits
        stats = await engine.stats()
        assert (stats.losses, os.listdir(tmp_path)) == (1, [])
        assert stats.kv_spill.bytes_read > 0
