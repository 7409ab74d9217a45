"""Every weight type stays near exact arithmetic on the same weights, and every tier agrees.

The arithmetic is one: which instructions do it, and how many threads, is invisible in the bits.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from jitllm.jit.tiers import available
from tests.conftest import TinyModel
from tests.models import oracle
from tests.models.native import F32, opened, prompt_logits

MAX_DIFFERENCE = 0.3
MAX_RMS = 0.06

MODELS = [(name, "f32") for name in oracle.FLOAT_MODELS]
MODELS += [("llama-q", weight_type) for weight_type in oracle.WEIGHT_TYPES]
"""Every model and weight type that there is."""


@pytest.mark.parametrize("chunk_tokens", [None, 1])
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("weight_type", oracle.WEIGHT_TYPES)
async def test_every_weight_type_stays_close_to_exact_arithmetic(
    weight_type: str, kv_type: str, chunk_tokens: int | None, tiny_model: TinyModel
) -> None:
    tokens, truth = oracle.golden(weight_type)
    async with opened(tiny_model("llama-q", weight_type), kv_type=kv_type) as model:
        difference = await prompt_logits(model.engine, tokens, chunk_tokens) - truth
    assert np.abs(difference).max() <= MAX_DIFFERENCE
    assert np.sqrt((difference.astype(np.float64) ** 2).mean()) <= MAX_RMS


@pytest.mark.parametrize(("name", "weight_type"), MODELS)
async def test_tiers_and_threads_are_invisible_in_the_bits(
    name: str, weight_type: str, tiny_model: TinyModel
) -> None:
    path = tiny_model(name, weight_type)
    tokens, _ = oracle.golden(name if weight_type == "f32" else weight_type)
    expected = await logits(path, tokens, "plain", threads=1)
    tiers = [tier.name for tier in available()]
    assert "plain" in tiers
    for tier, threads in product(tiers, (1, 2, 3)):
        found = await logits(path, tokens, tier, threads)
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), (tier, threads)


async def logits(path: Path, tokens: np.ndarray, tier: str, threads: int) -> F32:
    """Logits of a prompt, the first half at once, the rest in pieces that leave remainders."""
    async with opened(path, tier=tier, threads=threads) as model:
        stats = await model.engine.stats()
        assert (stats.tier, stats.threads) == (tier, threads)
        parts = [await prompt_logits(model.engine, tokens, chunk) for chunk in (None, 7, 1)]
    return np.stack(parts)
