"""The prefix cache on Ray: files of one process of a scheduler serve the next one's devices."""

from __future__ import annotations

from pathlib import Path

from actors.cluster import Cluster
from jitllm.engine import Request
from tests.cluster.test_engine import on_ray, process_of
from tests.conftest import TinyModel
from tests.models.native import opened, reply
from tests.models.test_prefixes import files_of

REQUEST = Request(tuple(range(1, 120)), max_tokens=12)


async def test_a_prompt_is_computed_once_for_all_engines(
    cluster: Cluster, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("llama")
    kept = {"kv_cache": str(tmp_path), "prefix_cache_bytes": 0}
    async with opened(path) as embedded:
        expected = await reply(embedded.engine, REQUEST)
    async with on_ray(path, **kept) as loaded:
        assert (await reply(loaded.engine, REQUEST)).bits == expected.bits
    assert files_of(tmp_path)
    sizes = (("cpu:0", 16), ("cpu:1", 4))
    choices = {"devices": "cpu:0,cpu:1", "threads": 2, "page_sizes": sizes}
    split = "0=cpu:0,1=cpu:1,*=cpu:0"
    async with on_ray(path, placement=split, **choices, **kept) as loaded:
        assert (await reply(loaded.engine, REQUEST)).bits == expected.bits
        stats = await loaded.engine.stats()
        assert (stats.prefix_totals.whole, stats.steps) == (1, REQUEST.max_tokens)
        process_of("device:cpu:1").kill()  # what it held comes from the files again
        assert (await reply(loaded.engine, REQUEST)).bits == expected.bits
        stats = await loaded.engine.stats()
        assert (stats.prefix_totals.whole, stats.losses) == (2, 1)
    async with opened(path, **kept) as embedded:  # and the other way round
        assert (await reply(embedded.engine, REQUEST)).bits == expected.bits
        assert (await embedded.engine.stats()).prefix_totals.whole == 1
