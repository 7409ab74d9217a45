"""Sharing steps, prefixes and room with strangers changes what an answer costs, never a bit."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jitllm.engine import Engine, Finish, Outputs, Request, Sampling
from jitllm.errors import QueueFull
from tests.conftest import TinyModel
from tests.models import oracle
from tests.models.native import Reply, opened, replies, reply
from tests.models.test_gemma import prompts
from tests.models.test_same_answer import all_is_free, served

TOKENS = tuple(oracle.golden("llama")[0].tolist())
LONG = TOKENS * 4
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=11)


async def crowd(
    engine: Engine,
    requests: list[Request],
    strangers: list[tuple[Request, int]],
    order: random.Random,
) -> list[Reply]:
    """Replies to requests that are sent in a random order beside strangers, of whom each leaves
    after so many deltas."""

    async def leave(request: Request, num_deltas: int) -> None:
        async with aclosing(engine.generate(request)) as deltas:
            async for _ in deltas:
                num_deltas -= 1
                if num_deltas <= 0:
                    return

    tasks: dict[int, asyncio.Task[Reply]] = {}
    leaving = []
    moves = [*range(len(requests)), *(None for _ in strangers)]
    order.shuffle(moves)
    left = list(strangers)
    for move in moves:
        if move is None:
            leaving.append(asyncio.create_task(leave(*left.pop())))
        else:
            tasks[move] = asyncio.create_task(reply(engine, requests[move]))
        for _ in range(order.choice([0, 0, 1, 20])):
            await asyncio.sleep(0)
    await asyncio.gather(*leaving)
    return [await tasks[index] for index in range(len(requests))]


# --- the same answer ------------------------------------------------------------------------------

REQUESTS = [
    Request(
        LONG[start : start + length],
        max_tokens=max_tokens,
        sampling=replace(SEEDED, seed=start) if start % 3 == 0 else Sampling(),
        logprobs=start % 2 == 0,
    )
    for start, length, max_tokens in (
        *((0, 60, 9), (0, 60, 12), (1, 9, 30), (2, 33, 5), (3, 2, 40), (4, 70, 3), (5, 5, 17)),
        *((6, 41, 8), (0, 90, 6), (8, 16, 16), (9, 17, 15), (10, 1, 33), (11, 80, 1), (12, 3, 3)),
        *((0, 31, 20), (14, 64, 10)),
    )
]
"""Sixteen, some of which begin alike; a third of them sampled."""


@pytest.mark.parametrize("page_size_tokens", [4, 16])
@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_sixteen_together_say_what_each_says_alone(
    name: str, page_size_tokens: int, tiny_model: TinyModel
) -> None:
    path = tiny_model(name)
    with served(path, share_prefixes=False) as (engine, run):
        alone = [run(reply(engine, request)) for request in REQUESTS]
        assert run(engine.stats()).kv_idle_bytes == 0
    chunks = st.lists(
        st.none() | st.integers(1, 40), min_size=len(REQUESTS), max_size=len(REQUESTS)
    )
    stranger = st.builds(
        lambda start, length, chunk: Request(
            LONG[start : start + length], max_tokens=60, chunk_tokens=chunk
        ),
        st.sampled_from([0, 0, 1, 5]),
        st.integers(1, 90),
        st.none() | st.integers(1, 40),
    )
    strangers = st.lists(st.tuples(stranger, st.integers(0, 20)), max_size=6)

    with served(path, page_size_tokens=page_size_tokens) as (engine, run):
        fixed_bytes = run(engine.stats()).pages.fixed_bytes

        @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
        @given(chunks, strangers, st.randoms(use_true_random=False))
        def together(
            chunks: list[int | None], strangers: list[tuple[Request, int]], order: random.Random
        ) -> None:
            requests = [
                replace(request, chunk_tokens=chunk)
                for request, chunk in zip(REQUESTS, chunks, strict=True)
            ]
            found = run(crowd(engine, requests, strangers, order))
            assert [one.bits for one in found] == [one.bits for one in alone]
            run(all_is_free(engine, fixed_bytes))

        together()


async def test_sixteen_requests_to_a_real_model_together(gemma_model: Path) -> None:
    texts = [tuple(p.tokens) for p in prompts()]
    shared = max(texts, key=len)
    requests = [Request(tokens[:90], max_tokens=12, logprobs=True) for tokens in texts[:6]]
    requests += [
        Request((*shared[:130], 100 + i), max_tokens=8, sampling=replace(SEEDED, seed=i))
        for i in range(16 - len(requests))
    ]
    assert len(requests) == 16
    async with opened(gemma_model, share_prefixes=False) as model:
        alone = [await reply(model.engine, request) for request in requests]
    strangers = [(Request(shared[:200], max_tokens=50), n) for n in (0, 3)]
    async with opened(gemma_model) as model:
        found = await crowd(model.engine, requests, strangers, random.Random(5))
        assert [one.bits for one in found] == [one.bits for one in alone]


# --- prefixes -------------------------------------------------------------------------------------


async def cached(engine: Engine, request: Request) -> tuple[Reply, int]:
    """A reply, and how much of its prompt existed already."""
    whole, num_cached = Reply(), -1
    async for delta in engine.generate(replace(request, logits=True)):
        whole.add(delta)
        if delta.usage is not None:
            num_cached = delta.usage.cached_tokens
    return whole, num_cached


@pytest.mark.parametrize("name", ["gemma3", "llama"])
@pytest.mark.parametrize("page_size_tokens", [4, 16, 64])
async def test_a_prefix_that_was_computed_is_not_computed_again(
    name: str, page_size_tokens: int, tiny_model: TinyModel
) -> None:
    size = page_size_tokens
    sampling = Sampling(temperature=0.8, repeat_penalty=1.3, repeat_last_n=-1, seed=3)
    request = Request(LONG[:150], max_tokens=12, sampling=sampling, logprobs=True)
    path = tiny_model(name)
    async with opened(path, page_size_tokens=size, share_prefixes=False) as model:
        alone, num_cached = await cached(model.engine, request)
        assert (await cached(model.engine, request))[1] == num_cached == 0
        turn = replace(request, prompt=(*request.prompt, *alone.ids, 7))
        next_alone, _ = await cached(model.engine, turn)
    async with opened(path, page_size_tokens=size) as model:
        first, num_cached = await cached(model.engine, request)
        again, num_again = await cached(model.engine, request)
        assert (num_cached, num_again) == (0, 149 // size * size)
        assert first.bits == again.bits == alone.bits
        # A conversation goes on: the reply is part of the prefix, but for its last token.
        following, num_following = await cached(model.engine, turn)
        assert num_following == (150 + 11) // size * size
        assert following.bits == next_alone.bits


async def test_who_wants_all_outputs_gets_them_all(tiny_model: TinyModel) -> None:
    async with opened(tiny_model("gemma3"), page_size_tokens=4) as model:
        request = Request(LONG[:40], max_tokens=4, outputs=Outputs.ALL)
        first, _ = await cached(model.engine, replace(request, outputs=Outputs.LAST))
        whole, num_cached = await cached(model.engine, request)
        assert num_cached == 0
        assert len(whole.prompt_logprobs) == 39
        assert whole.ids == first.ids
        assert (await cached(model.engine, request))[0].bits == whole.bits


async def test_choices_of_one_prompt_compute_it_once(tiny_model: TinyModel) -> None:
    choices = [
        Request(LONG[:130], max_tokens=10, sampling=replace(SEEDED, seed=seed)) for seed in range(8)
    ]
    path = tiny_model("llama")
    async with opened(path, page_size_tokens=16, share_prefixes=False) as model:
        alone = [await reply(model.engine, choice) for choice in choices]
    async with opened(path, page_size_tokens=16) as model:
        found = await asyncio.gather(*(cached(model.engine, choice) for choice in choices))
        assert [one.bits for one, _ in found] == [one.bits for one in alone]
        assert sorted(num for _, num in found) == [0] + [128] * 7


async def test_shared_pages_are_charged_once(tiny_model: TinyModel) -> None:
    request = Request(LONG[:130], max_tokens=60)
    async with opened(tiny_model("llama"), page_size_tokens=16) as model:
        engine = model.engine

        async def cost(num: int) -> int:
            before = (await engine.stats()).pages.fixed_bytes
            streams = [engine.generate(request) for _ in range(num)]
            for stream in streams:
                await anext(stream)
            taken = (await engine.stats()).pages.fixed_bytes - before
            for stream in streams:
                await stream.aclose()
            await reply(engine, Request((1,), max_tokens=1))
            return taken

        one = await cost(1)
        set_bytes = one // 12  # 190 positions
        assert await cost(5) == one + 4 * (12 - 8) * set_bytes


async def test_kept_prefixes_give_way_to_a_smaller_budget(tiny_model: TinyModel) -> None:
    path = tiny_model("llama")
    request = Request(LONG[:130], max_tokens=4)
    async with opened(path, page_size_tokens=16) as model:
        engine = model.engine
        whole, _ = await cached(engine, request)
        stats = await engine.stats()
        assert stats.kv_idle_bytes > 0
        await engine.set_budget(stats.pages.fixed_bytes)  # less than one block more
        assert (await engine.stats()).kv_idle_bytes == 0
        again, num_cached = await cached(engine, request)
        assert (again.bits, num_cached) == (whole.bits, 0)
        assert (await engine.stats()).kv_idle_bytes == 0  # nothing is kept where blocks need it
        await engine.set_budget(stats.pages.budget_bytes)
        await cached(engine, request)
        again, num_cached = await cached(engine, request)
        assert (again.bits, num_cached) == (whole.bits, 128)


async def test_sharing_goes_on_when_others_are_cancelled(tiny_model: TinyModel) -> None:
    path = tiny_model("gemma3")
    request = Request(LONG[:100], max_tokens=30, sampling=SEEDED)
    async with opened(path, page_size_tokens=4, share_prefixes=False) as model:
        alone = await reply(model.engine, request)
    async with opened(path, page_size_tokens=4) as model:
        engine = model.engine
        fixed_bytes = (await engine.stats()).pages.fixed_bytes
        for num_deltas in (0, 1, 5):
            leaving = [(replace(request, chunk_tokens=20), num_deltas)] * 4
            found = await crowd(engine, [request] * 3, leaving, random.Random(num_deltas))
            assert [one.bits for one in found] == [alone.bits] * 3
            await all_is_free(engine, fixed_bytes)


# --- overload -------------------------------------------------------------------------------------


async def test_five_hundred_at_once_are_served_or_refused(tiny_model: TinyModel) -> None:
    async with opened(tiny_model("gemma3"), max_queue=64) as model:
        engine = model.engine
        fixed_bytes = (await engine.stats()).pages.fixed_bytes
        alone = await reply(engine, Request(LONG[:20], max_tokens=6))
        for _ in range(2):
            outcomes = await asyncio.gather(
                *(reply(engine, Request(LONG[:20], max_tokens=6)) for _ in range(500)),
                return_exceptions=True,
            )
            served = [one for one in outcomes if isinstance(one, Reply)]
            refused = [one for one in outcomes if isinstance(one, QueueFull)]
            assert len(served) + len(refused) == 500
            assert len(served) >= 64
            assert all(one.bits == alone.bits for one in served)
            await all_is_free(engine, fixed_bytes)


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch", [1, 3, 24])
async def test_a_step_holds_as_many_rows_as_was_said(max_batch: int, tiny_model: TinyModel) -> None:
    requests = [Request(LONG[i : i + 5], max_tokens=10) for i in range(24)]
    async with opened(tiny_model("llama"), max_batch=max_batch) as model:
        steps = (await model.engine.stats()).steps
        found = await replies(model.engine, requests)
        assert all(one.finish is Finish.LENGTH and len(one.ids) == 10 for one in found)
        taken = (await model.engine.stats()).steps - steps
        assert 240 / max_batch <= taken <= 3 * 240 / max_batch + 10
