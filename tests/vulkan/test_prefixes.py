"""The prefix cache on a GPU: its own prefixes, filled in bit for bit, and none of a CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitllm.engine import Request, Sampling
from tests.conftest import TinyModel
from tests.models.native import opened, reply
from tests.models.test_prefixes import TEXT, caching
from tests.ops.vulkan import needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]

CPU, GPU = "cpu:0", "vulkan:0"
BOTH = f"{CPU},{GPU}"


@pytest.mark.parametrize("placement", [f"*={GPU}", f"0={CPU},*={GPU},head={CPU}"])
async def test_a_prompt_is_filled_in_as_it_was_computed(
    tiny_model: TinyModel, tmp_path: Path, placement: str
) -> None:
    path = tiny_model("llama", "q8_0")
    requests = [
        Request(TEXT[:100], max_tokens=6, sampling=Sampling(repeat_penalty=1.2)),
        Request((*TEXT[:50], *TEXT[:20]), max_tokens=6),
    ]
    choices = {
        "devices": BOTH,
        "placement": placement,
        "page_sizes": ((CPU, 16), (GPU, 4)),
    }
    async with opened(path, threads=1, share_prefixes=False, **choices) as loaded:
        expected = [await reply(loaded.engine, request) for request in requests]
    async with caching(path, tmp_path, **choices) as loaded:
        assert (await reply(loaded.engine, requests[0])).bits == expected[0].bits
    async with caching(path, tmp_path, **choices) as loaded:
        replies = [await reply(loaded.engine, request) for request in requests]
        totals = (await loaded.engine.stats()).prefix_totals
    assert [r.bits for r in replies] == [e.bits for e in expected]
    assert totals.whole == 1
    assert totals.tokens >= 100  # the second one finds its beginning in memory by then
    async with caching(path, tmp_path, devices=CPU) as loaded:
        await reply(loaded.engine, requests[0])
        assert (await loaded.engine.stats()).prefix_totals.hits == 0
