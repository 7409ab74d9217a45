"""A real model, 4-bit weights throughout, against exact arithmetic on the same weights.

It amplifies every rounding: engines of good repute differ by more than a logit. So replies are not
compared, but logits along a golden reply, and how likely a text is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.engine import Engine, Outputs, Request
from jitllm.jit.tiers import available
from tests.conftest import DATA
from tests.models.native import F32, Reply, opened, prompt_logits, reply

GOLDEN = DATA / "golden" / "gemma3-270m.npz"
NUM_POSITIONS = 65
"""Positions of each prompt that have a golden: its last one, and those of a reply of 64 tokens."""


@dataclass(frozen=True)
class Prompt:
    """A text with what a trusted engine made of it.

    top_ids, top_logits: the likeliest 20 in exact arithmetic, the best one first, at each of
    `NUM_POSITIONS` positions along `continuation`.
    """

    text: str
    parse_special: bool
    tokens: list[int]
    continuation: list[int]
    top_ids: NDArray[np.int32]
    top_logits: F32


def prompts() -> Iterator[Prompt]:
    """All golden prompts."""
    with np.load(GOLDEN) as arrays:
        names = [key.removesuffix(".continuation") for key in arrays if ".continuation" in key]
        for name in names:
            yield Prompt(
                text=str(arrays[f"{name}.text"]),
                parse_special=bool(arrays[f"{name}.parse_special"]),
                tokens=arrays[f"{name}.tokens"].tolist(),
                continuation=arrays[f"{name}.continuation"].tolist(),
                top_ids=arrays[f"{name}.exact_top_ids"],
                top_logits=arrays[f"{name}.exact_top_logits"],
            )


@dataclass(frozen=True)
class NearExact:
    """Logits beside those of exact arithmetic, at each position that was looked at.

    differences: of the likeliest 20, [positions, 20]. is_best: the likeliest token is the same.
    gaps: between the two that are likeliest in exact arithmetic.
    """

    differences: F32
    is_best: NDArray[np.bool_]
    gaps: F32

    @property
    def num_positions(self) -> int:
        """Positions that were looked at."""
        return len(self.gaps)

    @property
    def num_best(self) -> int:
        """Positions with the same likeliest token."""
        return int(self.is_best.sum())

    def check(self) -> None:
        """The bounds of every device."""
        assert self.differences.mean() <= 0.17
        assert self.differences.max() <= 1.5
        assert self.is_best[self.gaps > 0.6].all()

    def __str__(self) -> str:
        return (
            f"mean {self.differences.mean():.3f}, max {self.differences.max():.2f}, "
            f"best {self.num_best} of {self.num_positions}"
        )


async def along_golden_replies(
    engine: Engine, of: Iterable[Prompt], num_positions: int
) -> NearExact:
    """What an engine says at the first so many positions of the golden replies to some prompts."""
    differences, is_best, gaps = [], [], []
    for prompt in of:
        tokens = prompt.tokens + prompt.continuation[: num_positions - 1]
        logits = (await prompt_logits(engine, tokens))[-num_positions:]
        top_ids, top_logits = prompt.top_ids[:num_positions], prompt.top_logits[:num_positions]
        differences.append(np.abs(np.take_along_axis(logits, top_ids, axis=1) - top_logits))
        is_best.append(logits.argmax(axis=1) == top_ids[:, 0])
        gaps.append(top_logits[:, 0] - top_logits[:, 1])
    return NearExact(*map(np.concatenate, (differences, is_best, gaps)))


REQUEST = Request(tuple(next(prompts()).tokens), max_tokens=8, logprobs=True)


@pytest.fixture(scope="module")
def expected(gemma_model: Path) -> Reply:
    """The reply to `REQUEST`."""

    async def ask() -> Reply:
        async with opened(gemma_model) as model:
            return await reply(model.engine, REQUEST)

    return asyncio.run(ask())


async def test_prompts_have_the_golden_ids(gemma_model: Path) -> None:
    """By the tokenizer that travels in the container."""
    async with opened(gemma_model) as model:
        for prompt in prompts():
            ids = model.tokenizer.encode(prompt.text, parse_special=prompt.parse_special)
            assert ids == prompt.tokens, prompt.text
        with np.load(GOLDEN) as arrays:
            ids = model.tokenizer.encode(str(arrays["text.text"]))
            assert ids == arrays["text.tokens"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
async def test_logits_along_golden_replies(gemma_model: Path, kv_type: str) -> None:
    async with opened(gemma_model, kv_type=kv_type) as model:
        found = await along_golden_replies(model.engine, prompts(), NUM_POSITIONS)
    print(found)
    assert found.num_positions == 12 * NUM_POSITIONS
    found.check()
    assert found.num_best >= 755


async def test_a_text_is_as_likely_as_in_exact_arithmetic(gemma_model: Path) -> None:
    with np.load(GOLDEN) as arrays:
        tokens, exact = arrays["text.tokens"].tolist(), arrays["text.nll_exact"]
    request = Request(tuple(tokens), max_tokens=0, outputs=Outputs.ALL)
    async with opened(gemma_model) as model:
        logprobs = np.array((await reply(model.engine, request)).prompt_logprobs)
    assert len(logprobs) == len(exact) == len(tokens) - 1
    perplexity = np.exp(-logprobs.mean())
    print(f"perplexity {perplexity:.3f}")
    assert perplexity == pytest.approx(np.exp(exact.mean()), rel=0.0075)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("tier", [tier.name for tier in available()])
async def test_tiers_and_threads_are_invisible_in_the_bits(
    tier: str, threads: int, gemma_model: Path, expected: Reply
) -> None:
    async with opened(gemma_model, tier=tier, threads=threads) as model:
        assert (await reply(model.engine, REQUEST)).bits == expected.bits
