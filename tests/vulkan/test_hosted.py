"""Blocks on a Vulkan device whose experts the host computes."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest

from jitllm.engine import Request, Sampling
from jitllm.errors import PlacementError
from tests.conftest import TinyModel
from tests.models import oracle
from tests.models.native import opened, prompt_logits, replies, reply
from tests.models.test_experts import check_nothing_is_kept
from tests.models.test_hosted import use_of
from tests.models.test_moves import moving, num_blocks, random_moves
from tests.ops.vulkan import needs_vulkan
from tests.vulkan.test_engine import MAX_DIFFERENCE
from tests.vulkan.test_moves import check

pytestmark = [pytest.mark.vulkan, needs_vulkan]

HOSTED = {"devices": "cpu:0,vulkan:0", "placement": "*=vulkan:0%host", "kv_type": "f32"}


@pytest.mark.parametrize("name", [*oracle.MIXTURES, *oracle.QUANTIZED_MIXTURES])
async def test_experts_on_the_host_give_the_golden_logits(name: str, tiny_model: TinyModel) -> None:
    """As one prompt and in chunks: near the truth, and the same bits."""
    stem, _, weight_type = name.rpartition("-")
    is_quantized = name in oracle.QUANTIZED_MIXTURES
    path = tiny_model(stem, weight_type) if is_quantized else tiny_model(name)
    tokens, truth = oracle.golden(name)
    async with opened(path, **HOSTED) as loaded:
        whole, chunks = [await prompt_logits(loaded.engine, tokens, n) for n in (None, 7)]
        stats, header = await loaded.engine.stats(), loaded.header
        experts = use_of(loaded, "cpu:0")
        check_nothing_is_kept(loaded)
    if is_quantized:
        oracle.check_quantized_mixture(whole - truth)
    else:
        assert np.abs(whole - truth).max() <= MAX_DIFFERENCE
    assert np.array_equal(whole, chunks)
    assert experts.reads > 0
    (use,) = (use for use in stats.devices if use.placed)
    assert use.name == "vulkan:0"
    own = sum(extent.length for extent in header.blocks)
    assert own <= use.placed_bytes <= own + header.dense.length


async def test_replies_have_the_same_bits_in_any_company(tiny_model: TinyModel) -> None:
    """Alone and together, with all blocks there or passing through the room of two of them."""
    path = tiny_model("qwen3moe", "q8_0")
    requests = [
        Request(tuple(range(5 + i, 20 + i)), max_tokens=8, sampling=Sampling(1.0, seed=i))
        for i in range(3)
    ]
    async with opened(path, **HOSTED) as loaded:
        alone = [await reply(loaded.engine, request) for request in requests]
        together = await replies(loaded.engine, requests)
    async with opened(path, **HOSTED | {"placement": "*=vulkan:0~%host"}) as loaded:
        streamed = await replies(loaded.engine, requests)
        placement = str((await loaded.engine.stats()).placement)
        check_nothing_is_kept(loaded)
    assert "=vulkan:0~%host," in placement
    assert [one.bits for one in together] == [one.bits for one in alone]
    assert [one.bits for one in streamed] == [one.bits for one in alone]


async def test_a_device_without_room_for_experts_has_room_for_the_rest(
    tiny_model: TinyModel,
) -> None:
    path = tiny_model("mellum")
    choices = HOSTED | {"max_batch": 1, "prompt_chunk_tokens": 16, "ctx_tokens": 64}
    async with opened(path, **choices | {"placement": "*=cpu:0"}) as loaded:
        scratch = next(u for u in (await loaded.engine.stats()).devices if u.name != "cpu:0")
        header = loaded.header
        own, whole = sum(e.length for e in header.blocks), sum(header.frame_bytes)
        budget = scratch.scratch_bytes + header.dense.length + (own + whole) // 2
    choices |= {"devices": f"cpu:0,vulkan:0={budget}"}
    with pytest.raises(PlacementError, match="no room"):
        async with opened(path, **choices | {"placement": "*=vulkan:0"}):
            pass
    async with opened(path, **choices) as loaded:
        assert len((await reply(loaded.engine, Request((5, 6, 7), max_tokens=4))).ids) == 4


async def test_blocks_move_between_the_host_and_the_device(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their experts at home all the time."""
    monkeypatch.setenv("JITLLM_POISON", "1")
    path, dice = tiny_model("bailingmoe2", "f32"), random.Random(5)
    requests = [Request(tuple(range(5, 25)), max_tokens=30), Request((9, 8, 7), max_tokens=30)]
    async with opened(path, devices="cpu:0", kv_type="f32") as loaded:
        expected = [await reply(loaded.engine, request) for request in requests]
    choices = HOSTED | {"move_share": 0.99, "strict": True, "threads": 1}
    async with opened(path, **choices) as loaded:
        engine = loaded.engine
        moves = random_moves(dice, await num_blocks(engine), ("vulkan:0", "cpu:0"))
        found, done = await moving(engine, requests, islice(moves, 5))
        check_nothing_is_kept(loaded)
    assert len(done) == 5
    for same, want in zip(found, expected, strict=True):
        check(path, same, [want] * len(same))
