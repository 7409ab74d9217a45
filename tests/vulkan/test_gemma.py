"""A real model on a Vulkan device is as near to exact arithmetic as on the CPU."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.models.native import opened
from tests.models.test_gemma import along_golden_replies, prompts
from tests.ops.vulkan import needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan, pytest.mark.slow]


async def test_logits_along_golden_replies(gemma_model: Path) -> None:
    """The bounds are those of the CPU; tests/bench/test_vulkan.py has all prompts."""
    async with opened(gemma_model, devices="vulkan:0", ctx_tokens=512) as loaded:
        found = await along_golden_replies(loaded.engine, islice(prompts(), 2), 16)
    print(found)
    assert found.num_positions == 32
    found.check()
