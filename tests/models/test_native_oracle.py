"""Native code gives the logits of an independent engine, and loses them with any feature.

Everything goes through the Engine port: container, pager, device, compiled kernels.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jitllm.engine import Request
from jitllm.errors import UsageError
from jitllm.models import registry
from jitllm.models.graph import Graph
from tests.conftest import TinyModel
from tests.models import oracle, shapes
from tests.models.native import opened, prompt_logits, reply
from tests.models.reference import logits as exact_logits
from tests.models.variants import CHANGES, Change, Variant

MAX_DIFFERENCE = 2e-4
MAX_RMS = 5e-5


@pytest.mark.parametrize("page_size", [64, 16])
@pytest.mark.parametrize("name", oracle.FLOAT_MODELS)
async def test_float_weights_give_the_golden_logits(
    name: str, page_size: int, tiny_model: TinyModel
) -> None:
    """As one prompt and token by token."""
    tokens, truth = oracle.golden(name)
    async with opened(tiny_model(name), kv_type="f32", page_size_tokens=page_size) as model:
        for chunk_tokens in (None, 1):
            difference = await prompt_logits(model.engine, tokens, chunk_tokens) - truth
            assert np.abs(difference).max() <= MAX_DIFFERENCE
            assert np.sqrt((difference.astype(np.float64) ** 2).mean()) <= MAX_RMS


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek"])
async def test_keys_and_values_of_signed_bytes_cost_what_they_cost_in_exact_arithmetic(
    name: str, tiny_model: TinyModel
) -> None:
    """As near to exact arithmetic with such keys and values as f32 is to exact arithmetic, but for
    ties that fall the other way: each costs as much as one of tens of thousands of roundings.
    Chunks and pages are invisible in the bits."""
    tokens, truth = oracle.golden(name)
    source = oracle.model(name)
    rounded = exact_logits(source.graph(), source.values, tokens, "q8_0")
    cost = np.abs(rounded - truth)
    assert cost.max() > 100 * MAX_DIFFERENCE
    found = []
    for page_size in (64, 16):
        choices = {"kv_type": "q8_0", "page_size_tokens": page_size}
        async with opened(tiny_model(name), **choices) as model:
            found += [await prompt_logits(model.engine, tokens, n) for n in (None, 7, 1)]
    difference = np.abs(found[0] - rounded)
    assert difference.max() <= MAX_DIFFERENCE + 0.1 * cost.max()
    assert np.sqrt((difference**2).mean()) <= MAX_RMS + 0.1 * np.sqrt((cost**2).mean())
    assert all(other.tobytes() == found[0].tobytes() for other in found)


async def test_heads_without_whole_groups_have_no_keys_and_values_of_signed_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "HEAD_DIM", 16)
    path = shapes.write_container(tmp_path / "narrow.jlm", shapes.Shape(blocks=2, width=128))
    with pytest.raises(UsageError, match="-kv-type q8_0 .* keys of block 0 have 16; choose f16"):
        async with opened(path, kv_type="q8_0"):
            pass


@pytest.mark.parametrize("name", oracle.QUANTIZED_MIXTURES)
async def test_quantised_mixtures_are_near_the_golden_logits(
    name: str, tiny_model: TinyModel
) -> None:
    """And have the same bits as one prompt, in chunks, and token by token."""
    tokens, truth = oracle.golden(name)
    async with opened(tiny_model(*name.rsplit("-", 1)), kv_type="f32") as model:
        whole, *others = [await prompt_logits(model.engine, tokens, n) for n in (None, 7, 1)]
    oracle.check_quantized_mixture(whole - truth)
    assert all(other.tobytes() == whole.tobytes() for other in others)


@pytest.mark.parametrize("name", oracle.FLOAT_MODELS)
async def test_greedy_replies_are_the_golden_ones(name: str, tiny_model: TinyModel) -> None:
    tokens, _ = oracle.golden(name)
    greedy = oracle.greedy(name)
    request = Request(tuple(tokens.tolist()), max_tokens=len(greedy))
    async with opened(tiny_model(name), kv_type="f32") as model:
        assert (await reply(model.engine, request)).ids == greedy


@pytest.mark.parametrize("change", CHANGES)
async def test_without_a_feature_the_logits_are_wrong(
    change: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, take_away = CHANGES[change]
    monkeypatch.setattr(registry, "build", partial(changed_graph, take_away))
    tokens, truth = oracle.golden(name)
    async with opened(tiny_model(name), kv_type="f32") as model:
        difference = await prompt_logits(model.engine, tokens) - truth
    assert np.abs(difference).max() > 10 * MAX_DIFFERENCE


def changed_graph(take_away: Change, *parts: object) -> Graph:
    """What `build` makes of its arguments once a feature is gone."""
    variant = Variant(*parts)  # type: ignore[arg-type]
    take_away(variant)
    return variant.graph()
