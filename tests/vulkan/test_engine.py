"""Engines on a Vulkan device, as every caller has them: the same port, the same answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jitllm.devices.vulkan.found import find_vulkan
from jitllm.engine import Request, Sampling
from jitllm.errors import JitllmError, OverBudget, PlacementError
from tests.conftest import TinyModel
from tests.models import oracle
from tests.models.native import opened, prompt_logits, replies, reply
from tests.ops.vulkan import needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]

MAX_DIFFERENCE = 5e-4
PROMPT = (1, 259, 75, 260, 269, 270, 271, 300, 12, 13)
REQUESTS = (
    Request(PROMPT, max_tokens=30),
    Request(PROMPT[:4], max_tokens=40, sampling=Sampling(temperature=0.8, seed=3)),
    Request(PROMPT[3:], max_tokens=30, sampling=Sampling(repeat_penalty=1.3)),
    Request(
        PROMPT * 3,
        max_tokens=20,
        chunk_tokens=5,
        sampling=Sampling(logit_bias=((75, 4.0), (12, -100.0)), presence_penalty=0.5),
        logprobs=True,
        top_logprobs=3,
    ),
)


@pytest.mark.parametrize("name", oracle.FLOAT_MODELS)
async def test_an_engine_gives_the_golden_logits(name: str, tiny_model: TinyModel) -> None:
    """As one prompt, in chunks and token by token: near the truth, and the same bits."""
    tokens, truth = oracle.golden(name)
    async with opened(tiny_model(name), devices="vulkan:0", kv_type="f32") as loaded:
        whole, *others = [await prompt_logits(loaded.engine, tokens, n) for n in (None, 7, 1)]
        stats = await loaded.engine.stats()
    assert {use.name for use in stats.devices if use.placed} == {"vulkan:0"}
    assert np.abs(whole - truth).max() <= MAX_DIFFERENCE
    assert all(np.array_equal(other, whole) for other in others)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_replies_have_the_ids_that_the_cpu_gives(name: str, tiny_model: TinyModel) -> None:
    """Greedy ones and drawn ones, with penalties and biases, each alone and all at once."""
    path = tiny_model(name)
    async with opened(path, devices="cpu:0", kv_type="f32") as loaded:
        expected = await replies(loaded.engine, REQUESTS)
    async with opened(path, devices="vulkan:0", kv_type="f32", strict=True) as loaded:
        together = await replies(loaded.engine, REQUESTS)
        alone = [await reply(loaded.engine, request) for request in REQUESTS]
        stats = await loaded.engine.stats()
    assert [r.ids for r in together] == [e.ids for e in expected]
    assert [r.bits for r in alone] == [r.bits for r in together]
    for got, want in zip(together, expected, strict=True):
        assert np.allclose(got.logprobs, want.logprobs, atol=MAX_DIFFERENCE)
        assert np.abs(got.logits - want.logits).max() <= MAX_DIFFERENCE
    assert str(stats.placement).startswith("0-")
    assert {use.name for use in stats.devices} == {"vulkan:0"}
    assert stats.kv_bytes == 0


async def test_a_prefix_is_computed_once(tiny_model: TinyModel) -> None:
    request = Request(PROMPT * 4, max_tokens=5)
    choices = {"devices": "vulkan:0", "page_size_tokens": 16}
    async with opened(tiny_model("llama"), **choices) as loaded:
        first = await reply(loaded.engine, request)
        cached = [
            delta.usage.cached_tokens
            async for delta in loaded.engine.generate(replace(request, logits=True))
            if delta.usage
        ]
        again = await reply(loaded.engine, request)
    assert cached[-1] == 32
    assert again.ids == first.ids


# --- budgets ----------------------------------------------------------------------------------


async def test_what_does_not_fit_is_refused_with_numbers(tiny_model: TinyModel) -> None:
    with pytest.raises(
        PlacementError, match=r"no room for blocks 0-2 .*on vulkan:0: .* MiB are .* vulkan:0=SIZE"
    ):
        async with opened(tiny_model("llama"), devices="vulkan:0=14M"):
            pass
    with pytest.raises(JitllmError, match=r"vulkan:0 has no room for the buffers .* vulkan:0=SIZE"):
        async with opened(tiny_model("llama"), devices="vulkan:0=1M"):
            pass


@pytest.mark.parametrize(
    ("devices", "vram_bytes", "expected"),
    [("vulkan:0", 24 << 20, 24 << 20), ("vulkan:0=26M", 24 << 20, 26 << 20), ("vulkan:0", 0, None)],
)
async def test_the_device_list_knows_best_then_the_flag_then_what_is_free(
    devices: str, vram_bytes: int, expected: int | None, tiny_model: TinyModel
) -> None:
    async with opened(tiny_model("llama"), devices=devices, vram_bytes=vram_bytes) as loaded:
        (use,) = (await loaded.engine.stats()).devices
    (device, *_) = find_vulkan().devices
    most = device.free_bytes - max(device.free_bytes // 8, 256 << 20)
    # What is free on a software device is what the host has free, which changes all the time.
    assert use.budget_bytes == expected or (expected is None and 0.5 < use.budget_bytes / most < 2)


async def test_a_budget_is_kept_by_the_drivers_count(tiny_model: TinyModel) -> None:
    async with opened(tiny_model("llama"), devices="vulkan:0=24M") as loaded:
        await replies(loaded.engine, REQUESTS)
        (use,) = (await loaded.engine.stats()).devices
    assert use.budget_bytes == 24 << 20
    assert use.placed_bytes + use.scratch_bytes <= use.allocated_bytes <= use.budget_bytes


async def test_a_context_that_outgrows_the_device_ends_with_an_error(tiny_model: TinyModel) -> None:
    """And everybody else goes on."""
    path = tiny_model("llama")
    choices = {"devices": "vulkan:0=17M", "kv_type": "f32", "page_size_tokens": 16}
    async with opened(path, **choices) as loaded:
        context = (await loaded.engine.stats()).context_tokens
        long = Request(PROMPT, max_tokens=context - len(PROMPT))
        with pytest.raises(OverBudget, match=r"positions on vulkan:0 needs .* vulkan:0=SIZE"):
            await reply(loaded.engine, long)
        assert len((await reply(loaded.engine, REQUESTS[0])).ids) == 30
        assert (await loaded.engine.stats()).kv_bytes == 0
