"""Prompts through the matrix unit: the bits of replies are those of vectors."""

from __future__ import annotations

from typing import Any

import pytest

from jitllm.engine import Request
from tests.conftest import TinyModel
from tests.models.native import opened, replies
from tests.ops import amx_twin
from tests.ops.amx_twin import TWIN, TwinCompiler

PROMPTS = [tuple(range(3, 3 + num_tokens)) for num_tokens in (40, 5, 21)]


@pytest.mark.parametrize(
    ("name", "weight_type"), [("llama-q", "q6_k"), ("llama-q", "q4_k"), ("qwen3moe", "q4_0")]
)
async def test_replies_are_the_same(
    name: str, weight_type: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several prompts at once and what follows them, through a model on the twin."""
    path = tiny_model(name, weight_type)
    requests = [Request(prompt, max_tokens=4, logprobs=True) for prompt in PROMPTS]
    async with opened(path, tier="plain", threads=1) as model:
        expected = [found.bits for found in await replies(model.engine, requests)]

    def twin(*_: Any) -> TwinCompiler:
        return TwinCompiler()

    monkeypatch.setattr("actors.recipes.choose", lambda name: TWIN)
    monkeypatch.setattr("actors.recipes.Compiler", twin)
    products, faults = amx_twin.num_products(), amx_twin.num_faults()
    async with opened(path, threads=1) as model:
        assert [found.bits for found in await replies(model.engine, requests)] == expected
    assert amx_twin.num_products() > products
    assert amx_twin.num_faults() == faults
