"""Whole models on a Vulkan device give the logits of an independent engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.devices.host import Pass
from jitllm.errors import JitllmError
from jitllm.kernels.op import ALL_KEYS
from tests.conftest import TinyModel
from tests.models import oracle
from tests.models.vulkan import VulkanModel
from tests.ops.vulkan import gpu, needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]

F32s = NDArray[np.float32]


def prompt_logits(path: Path, tokens: Sequence[int], chunk_tokens: int, **choices: str) -> F32s:
    """Logits of all tokens, in steps of so many; the device's memory is all given back."""
    count = len(tokens)
    model = VulkanModel(path, gpu(), step_tokens=count, context_tokens=count, **choices)
    logits = model.prompt(tokens, chunk_tokens)
    model.close()
    assert gpu().arena.used_bytes == gpu().arena.allocated_bytes == 0
    return logits


@pytest.mark.parametrize("weight_type", oracle.WEIGHT_TYPES)
def test_weight_types_are_near_the_golden_logits(weight_type: str, tiny_model: TinyModel) -> None:
    """And have the same bits in chunks, with keys and values of half floats."""
    tokens, truth = oracle.golden(weight_type)
    path = tiny_model("llama-q", weight_type)
    whole, chunks = (
        prompt_logits(path, tokens.tolist(), n, kv_element="f16") for n in (len(tokens), 5)
    )
    difference = (whole - truth).astype(np.float64)
    assert np.abs(difference).max() <= 0.3
    assert np.sqrt((difference**2).mean()) <= 0.06
    assert np.array_equal(whole, chunks)


@pytest.mark.parametrize("name", oracle.QUANTIZED_MIXTURES)
def test_quantised_mixtures_are_near_the_golden_logits(name: str, tiny_model: TinyModel) -> None:
    tokens, truth = oracle.golden(name)
    path = tiny_model(*name.rsplit("-", 1))
    oracle.check_quantized_mixture(prompt_logits(path, tokens.tolist(), 7) - truth)


@pytest.mark.parametrize("name", ["gemma3", "qwen3moe"])
def test_greedy_replies_are_the_golden_ones(name: str, tiny_model: TinyModel) -> None:
    """Tokens are chosen on the device."""
    tokens, _ = oracle.golden(name)
    greedy = oracle.greedy(name)
    length = len(tokens) + len(greedy)
    model = VulkanModel(tiny_model(name), gpu(), step_tokens=len(tokens), context_tokens=length)
    assert model.reply(tokens.tolist(), len(greedy)) == greedy
    model.close()


def test_a_program_that_does_not_fit_leaves_nothing_behind(tiny_model: TinyModel) -> None:
    arena = gpu().arena
    budget, arena.budget_bytes = arena.budget_bytes, 128 << 20
    try:
        with pytest.raises(JitllmError, match="no room for the buffers"):
            VulkanModel(tiny_model("llama"), gpu(), step_tokens=1 << 16, context_tokens=1).close()
    finally:
        arena.budget_bytes = budget
    assert arena.used_bytes == arena.allocated_bytes == 0


def test_runs_of_blocks_give_the_same_bits(tiny_model: TinyModel) -> None:
    """All blocks in one submission, or one after another, asked for together or apart."""
    tokens, _ = oracle.golden("gemma3")
    count = len(tokens)
    found = []
    for splits, blocks_at_once in (((), 100), ((1,), 100), ((2, 3), 1), ((), 1), ((), 2)):
        model = VulkanModel(
            tiny_model("gemma3"), gpu(), step_tokens=count, context_tokens=count, page_tokens=16
        )
        model.program.blocks_at_once = blocks_at_once
        found.append(model.step(tokens.tolist(), splits))
        model.close()
    assert all(np.array_equal(other, found[0]) for other in found)


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_attention_in_passes_gives_the_same_bits(
    name: str, num_tokens: int, tiny_model: TinyModel
) -> None:
    """Of all blocks, or of some; in one run of blocks, or in several."""
    tokens = np.random.default_rng(1).integers(3, 300, 200).tolist()
    ends = [0, 64, 192, ALL_KEYS[1]]
    found = []
    for passing, splits in (((), ()), ((0, 1, 2), ()), ((1,), ()), ((0, 2), (1,)), ((), ())):
        model = VulkanModel(
            tiny_model(name), gpu(), step_tokens=200, context_tokens=200, has_passes=True
        )
        model.program.blocks_at_once = 1 + len(splits)
        model.step(tokens[:-num_tokens])
        passes = [Pass(block, ((a, b),)) for block in passing for a, b in pairwise(ends)]
        found.append(model.step(tokens[-num_tokens:], splits, passes))
        model.close()
    assert all(np.array_equal(other, found[0]) for other in found)


@pytest.mark.parametrize("name", ["gemma3", "llama-moe"])
def test_weights_may_move_between_steps(name: str, tiny_model: TinyModel) -> None:
    """Every block's in turn, experts too; nothing of the old place is read again."""
    tokens, _ = oracle.golden(name)
    whole = prompt_logits(tiny_model(name), tokens.tolist(), 1)
    model = VulkanModel(tiny_model(name), gpu(), step_tokens=1, context_tokens=len(tokens))
    found = []
    for i, token in enumerate(tokens.tolist()):
        found.append(model.step([token]))
        model.move(i % model.program.num_blocks)
    model.close()
    assert np.array_equal(np.concatenate(found), whole)
