"""A real model on the first Vulkan device, a software one if there is no other: what is too slow
for every run of the tests. Set JITLLM_TEST_VULKAN to the number of another device.
"""

from __future__ import annotations

import os
import random
import resource
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from actors import vulkan_recipe
from jitllm.compose import open_engine
from jitllm.config import EngineConfig
from jitllm.devices.vulkan.arena import Arena
from jitllm.engine import Request
from jitllm.jit.cache import ObjectCache
from tests.models.native import opened, reply
from tests.models.test_gemma import NUM_POSITIONS, along_golden_replies, prompts
from tests.models.test_moves import moving, num_blocks, random_moves
from tests.ops.vulkan import needs_vulkan

pytestmark = [pytest.mark.bench, pytest.mark.vulkan, needs_vulkan, pytest.mark.timeout(7200)]

CPU, GPU = "cpu:0", f"vulkan:{os.environ.get('JITLLM_TEST_VULKAN', '0')}"
MAX_COLD_START_S = 20


def processor_s() -> float:
    """What this process took of processors so far, and those it started that have ended."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


async def test_logits_along_all_golden_replies(gemma_model: Path) -> None:
    """The bounds are those of the CPU."""
    async with opened(gemma_model, devices=GPU, ctx_tokens=1024) as loaded:
        found = await along_golden_replies(loaded.engine, prompts(), NUM_POSITIONS)
    print(f"\n{found}")
    assert found.num_positions == 12 * NUM_POSITIONS
    found.check()
    assert found.num_best >= 755


async def test_a_cold_start(gemma_model: Path, tmp_path: Path) -> None:
    """All kernels are compiled, and at the second start none."""
    for is_cold in (True, False):
        cache, began_s = ObjectCache(tmp_path / "cache"), processor_s()
        loaded = await open_engine(gemma_model, EngineConfig(devices=GPU), cache=cache)
        await loaded.close()
        print(
            f"\n{loaded.compiled_kernels} kernels compiled, {loaded.compile_s:.1f} s to make the "
            f"device's programs, {loaded.open_s:.1f} s to open the model, "
            f"{processor_s() - began_s:.1f} s of processors"
        )
        assert (loaded.compiled_kernels > 0) is is_cold
        assert loaded.compile_s < MAX_COLD_START_S


async def test_blocks_there_and_back(gemma_model: Path) -> None:
    """A reply with all blocks away and at home, and with random ones; beside the host's logits as
    long as the tokens are the same."""
    request = Request(tuple(next(prompts()).tokens), max_tokens=48)
    choices = {"placement": f"*={GPU}", "move_share": 0.99, "share_prefixes": False}
    async with opened(gemma_model, devices=CPU, share_prefixes=False) as loaded:
        expected = await reply(loaded.engine, request)
    async with opened(gemma_model, devices=f"{CPU},{GPU}", ctx_tokens=512, **choices) as loaded:
        count = await num_blocks(loaded.engine)
        whole = [(range(count), to, True) for to in (CPU, GPU)]
        some = islice(random_moves(random.Random(3), count, (GPU, CPU)), 4)
        (replies,), moves = await moving(loaded.engine, [request], [*whole, *some])
        stats = await loaded.engine.stats()
    assert stats.moves == len(moves) == 6
    assert stats.steps == sum(len(found.ids) for found in replies)  # nothing is computed again
    for found in replies:
        differ = (i for i, (a, b) in enumerate(zip(found.ids, expected.ids, strict=True)) if a != b)
        rows = next(differ, len(found.ids) - 1) + 1  # where they part they have the same history
        most = np.abs(found.logits[:rows] - expected.logits[:rows]).max()
        print(f"\n{rows} of {len(found.ids)} tokens alike, logits off by {most:.2f} at most")
        assert most <= 1.5


async def test_all_blocks_in_the_room_of_three(
    gemma_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of a device that holds all of them."""
    # So that what is allocated is what is used, nearly.
    monkeypatch.setattr(vulkan_recipe, "Arena", partial(Arena, chunk_bytes=1 << 20))
    request = Request(tuple(next(prompts()).tokens), max_tokens=8)
    choices = {"ctx_tokens": 512, "max_batch": 1, "prompt_chunk_tokens": 64}
    async with opened(gemma_model, devices=GPU, **choices) as loaded:
        expected = await reply(loaded.engine, request)
        (whole,) = (await loaded.engine.stats()).devices
        block_bytes = max(loaded.header.frame_bytes)
        dense_bytes = whole.placed_bytes - sum(loaded.header.frame_bytes)
    kv_bytes = 4 << 20
    room_bytes = whole.scratch_bytes + dense_bytes + 3 * block_bytes + kv_bytes
    choices |= {"devices": f"{GPU}={room_bytes}", "placement": f"*={GPU}~"}
    async with opened(gemma_model, **choices) as loaded:
        found = await reply(loaded.engine, request)
        stats = await loaded.engine.stats()
    print(f"\n{stats.devices[0].placed} of {whole.placed} blocks in place, {stats.placement}")
    assert stats.devices[0].placed <= 3
    assert stats.devices[0].blocks == 18
    assert found.bits == expected.bits
