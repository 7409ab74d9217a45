"""Biases and the likeliest tokens, through the Engine port, against the raw logits in NumPy."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jitllm.engine import MAX_TOP_LOGPROBS, Delta, Engine, Outputs, Request, Sampling, TopLogprobs
from jitllm.errors import UsageError
from tests.conftest import TinyModel
from tests.models.native import F32, opened

PROMPT = (3, 14, 15, 9, 26, 5)


async def whole(engine: Engine, request: Request) -> Delta:
    """All deltas of a reply as one, its logits aside."""
    parts = [part async for part in engine.generate(request)]

    def joined(name: str) -> Any:
        return tuple(item for part in parts for item in getattr(part, name))

    return Delta(
        tokens=joined("tokens"),
        logprobs=joined("logprobs"),
        prompt_logprobs=joined("prompt_logprobs"),
        top_logprobs=joined("top_logprobs"),
        prompt_top_logprobs=joined("prompt_top_logprobs"),
        finish=parts[-1].finish,
        error=parts[-1].error,
    )


async def raw_logits(engine: Engine, request: Request) -> F32:
    """Logits of every output position of a reply."""
    rows = [
        np.array(delta.logits.view(), np.float32)
        async for delta in engine.generate(replace(request, logits=True))
        if delta.logits is not None
    ]
    return np.concatenate(rows)


def likeliest(row: F32, count: int) -> TopLogprobs:
    """Log-softmax in f64, most likely first, ties to the lowest id."""
    x = row.astype(np.float64)
    logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
    order = np.lexsort((np.arange(len(x)), -x))[:count]
    return tuple((int(i), float(logprobs[i])) for i in order)


def assert_close(found: tuple[TopLogprobs, ...], rows: F32, count: int) -> None:
    """The ids are those of NumPy, the log-probabilities within f32 rounding."""
    assert len(found) == len(rows)
    for top, row in zip(found, rows, strict=True):
        expected = likeliest(row, count)
        assert [i for i, _ in top] == [i for i, _ in expected]
        np.testing.assert_allclose(
            [p for _, p in top], [p for _, p in expected], rtol=1e-6, atol=2e-6
        )


@pytest.mark.parametrize("chunk_tokens", [None, 2])
@pytest.mark.parametrize("count", [1, 5, MAX_TOP_LOGPROBS])
async def test_the_likeliest_tokens_of_every_position(
    tiny_model: TinyModel, count: int, chunk_tokens: int | None
) -> None:
    """Of the prompt and of the reply, of the raw logits whatever is drawn, as between processes."""
    request = Request(
        PROMPT,
        max_tokens=4,
        sampling=Sampling(temperature=1.5, seed=3, repeat_penalty=1.4, logit_bias=((7, 2.5),)),
        logprobs=True,
        top_logprobs=count,
        outputs=Outputs.ALL,
        chunk_tokens=chunk_tokens,
    )
    async with opened(tiny_model("llama"), kv_type="f32", strict=True) as model:
        reply = await whole(model.engine, request)
        rows = await raw_logits(model.engine, request)
    num_known = len(PROMPT) - 1
    assert len(reply.tokens) == len(reply.logprobs) == 4
    assert len(reply.prompt_logprobs) == num_known
    assert_close(reply.prompt_top_logprobs, rows[:num_known], count)
    assert_close(reply.top_logprobs, rows[num_known:], count)
    for token, logprob, top in zip(reply.tokens, reply.logprobs, reply.top_logprobs, strict=True):
        assert dict(top).get(token, logprob) == logprob


async def test_the_likeliest_tokens_come_where_they_are_asked_for(tiny_model: TinyModel) -> None:
    """With log-probabilities of the reply, with those of the prompt, else nowhere; in a batch
    nobody gets a neighbour's."""
    async with opened(tiny_model("llama"), kv_type="f32") as model:

        async def ask(**choices: Any) -> Delta:
            return await whole(model.engine, Request(PROMPT, max_tokens=3, **choices))

        plain = await ask()
        assert plain.top_logprobs == plain.prompt_top_logprobs == ()
        assert (await ask(top_logprobs=5)) == plain
        of_prompt = await ask(top_logprobs=5, outputs=Outputs.ALL)
        assert of_prompt.top_logprobs == ()
        assert len(of_prompt.prompt_top_logprobs) == len(PROMPT) - 1
        of_reply = await ask(top_logprobs=5, logprobs=True)
        assert of_reply.prompt_top_logprobs == ()
        assert [top[0][0] for top in of_reply.top_logprobs] == list(plain.tokens)
        assert [top[0][1] for top in of_reply.top_logprobs] == list(of_reply.logprobs)


async def test_replies_side_by_side_keep_their_own_biases_and_lists(tiny_model: TinyModel) -> None:
    """What a request gets alone it gets among others."""
    requests = [
        Request(
            PROMPT[: 2 + n],
            max_tokens=6,
            sampling=Sampling(logit_bias=((n, 50.0),) if n % 2 else ()),
            logprobs=n != 2,
            top_logprobs=3 * n,
        )
        for n in range(4)
    ]
    async with opened(tiny_model("llama"), kv_type="f32") as model:
        alone = [await whole(model.engine, request) for request in requests]
        streams = [whole(model.engine, request) for request in requests]
        assert await asyncio.gather(*streams) == alone
    assert alone[1].tokens == (1,) * 6
    assert alone[3].tokens == (3,) * 6


async def test_a_bias_bans_or_forces_a_token(tiny_model: TinyModel) -> None:
    """Biases of one id add up, before penalties; log-probabilities do not see them."""
    request = Request(PROMPT, max_tokens=5, logprobs=True)
    async with opened(tiny_model("llama"), kv_type="f32") as model:

        async def ask(*biases: tuple[int, float]) -> Delta:
            biased = replace(request, sampling=Sampling(logit_bias=biases))
            return await whole(model.engine, biased)

        plain = await ask()
        banned = await ask((plain.tokens[0], -math.inf))
        assert plain.tokens[0] not in banned.tokens
        assert (await ask((11, 60.0), (11, 60.0), (12, 100.0))).tokens == (11,) * 5
        forced = await ask((plain.tokens[0], 100.0))
        assert forced.logprobs[0] == plain.logprobs[0]


FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
)
NO_FLOATS: list[Any] = [math.nan, math.inf, -1e39]

IMPOSSIBLE: dict[str, list[dict[str, Any]]] = {
    "top_logprobs": [{"top_logprobs": MAX_TOP_LOGPROBS + 1}, {"top_logprobs": -1}],
    "max_tokens": [{"max_tokens": -1}],
    "chunk_tokens": [{"chunk_tokens": 0}, {"chunk_tokens": -1}],
    "logit_bias": [
        {"sampling": Sampling(logit_bias=((0, 1.0), pair))}
        for pair in ((-1, 1.0), (10**6, 1.0), (2**40, 0.0), (0, math.nan), (0, 1e39))
    ],
    "top_k": [{"sampling": Sampling(top_k=2**31)}],
    **{
        name: [{"sampling": replace(Sampling(), **{name: number})} for number in NO_FLOATS]
        for name in FLOATS
    },
}
"""Requests that cannot mean anything, by the field that the refusal names."""


async def test_a_request_that_cannot_mean_anything_is_refused_at_once(
    tiny_model: TinyModel,
) -> None:
    """By the field's name, and replies under way go on."""
    async with opened(tiny_model("llama"), kv_type="f32") as model:
        running = model.engine.generate(Request(PROMPT, max_tokens=40))
        await anext(running)
        for field, cases in IMPOSSIBLE.items():
            for case in cases:
                with pytest.raises(UsageError, match=f"^{field}"):
                    await whole(model.engine, replace(Request(PROMPT), **case))
        assert [delta.error async for delta in running][-1] is None
