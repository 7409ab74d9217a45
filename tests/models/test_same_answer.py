"""Memory, threads, chunks and neighbours change what an answer costs, never a bit of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.mailbox import Stopped
from jitllm.engine import Engine, Finish, Outputs, Request, Sampling
from jitllm.formats.jlm import Container
from tests.conftest import TinyModel
from tests.models import oracle
from tests.models.answer import Answer, answer
from tests.models.native import Reply, opened, replies, reply
from tests.models.served import in_child
from tests.models.test_gemma import prompts

# --- one process for each budget -----------------------------------------------------------------

PROMPT = next(p.tokens for p in prompts() if len(p.tokens) == 20)
NUM_BLOCKS = 18
NUM_STEPS = 4 * (NUM_BLOCKS - 1)
"""The scan of N blocks under F frames repeats after N-1 steps."""


def ask(path: Path, **choices: Any) -> Answer:
    """What a process of its own answers, with a step for the prompt and one for each token."""
    choices = {"read_ahead": "off", **choices}
    found = in_child(answer, path=path, choices=choices, prompt=PROMPT, max_tokens=NUM_STEPS)
    return Answer(**found)


@pytest.fixture(scope="module")
def unbudgeted(gemma_model: Path) -> Answer:
    """The answer with all the memory it likes."""
    return ask(gemma_model)


@pytest.mark.slow
@pytest.mark.parametrize("frames", [1, 3, 6, 12, 18])
def test_a_budget_costs_page_ins_and_nothing_else(
    frames: int, gemma_model: Path, unbudgeted: Answer
) -> None:
    block_bytes = largest_block_bytes(gemma_model)
    budget_bytes = unbudgeted.fixed_bytes + frames * block_bytes
    tight = ask(gemma_model, maxmem_bytes=budget_bytes)
    optimum = NUM_STEPS * NUM_BLOCKS * (NUM_BLOCKS - frames) / (NUM_BLOCKS - 1)
    print(f"{frames} frames: {tight.page_ins} page-ins in {NUM_STEPS} steps, optimum {optimum:.0f}")
    assert (tight.digest, tight.ids) == (unbudgeted.digest, unbudgeted.ids)
    assert tight.fixed_bytes == unbudgeted.fixed_bytes
    assert tight.frames == frames
    assert tight.steps == unbudgeted.steps == NUM_STEPS
    assert unbudgeted.page_ins == 0
    # Blocks differ in size, so room for F of the largest may hold a few more of the others.
    assert 0.8 * optimum <= tight.page_ins <= 1.01 * optimum


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads: int, gemma_model: Path, unbudgeted: Answer) -> None:
    assert ask(gemma_model, threads=threads).digest == unbudgeted.digest


def largest_block_bytes(path: Path) -> int:
    """What the pager charges for the largest block."""
    container = Container.open(path)
    try:
        return max(extent.length for extent in container.header.blocks)
    finally:
        container.close()


# --- chunks of the prompt ------------------------------------------------------------------------


async def test_a_real_prompt_in_any_chunks_gives_the_same_bits(gemma_model: Path) -> None:
    prompt = next(p.tokens for p in prompts() if len(p.tokens) == 80)
    request = Request(tuple(prompt), max_tokens=8, logprobs=True)
    async with opened(gemma_model, share_prefixes=False) as model:
        whole = await reply(model.engine, request)
        for chunk_tokens in (7, 1):
            other = await reply(model.engine, replace(request, chunk_tokens=chunk_tokens))
            assert other.bits == whole.bits, chunk_tokens


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral3", "llama-q-q4_k", "llama-q-q8_0"])
async def test_chunks_and_decoding_give_the_same_bits(
    name: str, strict: bool, tiny_model: TinyModel
) -> None:
    """A token's logits do not depend on which tokens share its step."""
    async with opened(path_of(tiny_model, name), page_size_tokens=16, strict=strict) as model:
        engine = model.engine
        tokens = tuple(oracle.golden("llama")[0].tolist())
        decoded = await reply(engine, Request(tokens[:5], max_tokens=40))
        sequence = (*tokens[:5], *decoded.ids)
        request = Request(sequence[:-1], max_tokens=0, outputs=Outputs.ALL)
        whole = await reply(engine, request)
        assert whole.logits[4:].tobytes() == decoded.logits.tobytes()
        for chunk_tokens in (7, 16, 1):
            other = await reply(engine, replace(request, chunk_tokens=chunk_tokens))
            assert other.bits == whole.bits, chunk_tokens


def path_of(tiny_model: TinyModel, name: str) -> Path:
    """A tiny model, its weight type in its name unless that is f32."""
    stem, _, weight_type = name.rpartition("-")
    quantised = weight_type in oracle.WEIGHT_TYPES
    return tiny_model(stem, weight_type) if quantised else tiny_model(name)


# --- a budget that changes -----------------------------------------------------------------------


@contextmanager
def served(path: Path, **choices: Any) -> Iterator[tuple[Engine, Callable[..., Any]]]:
    """An engine, and what runs a coroutine on its event loop: for properties, which are plain
    functions that are called often."""
    with asyncio.Runner() as runner:
        context = opened(path, **choices)
        model = runner.run(context.__aenter__())
        try:
            yield model.engine, runner.run
        finally:
            runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("read_ahead", ["off", "on"])
@pytest.mark.parametrize("name", ["gemma3", "llama-q-q4_k"])
def test_a_budget_that_changes_between_tokens_changes_nothing(
    name: str, read_ahead: str, tiny_model: TinyModel
) -> None:
    path = path_of(tiny_model, name)
    block_bytes = largest_block_bytes(path)
    sampling = Sampling(temperature=0.8, seed=5)
    request = Request((1, 20, 33, 7, 5), max_tokens=16, sampling=sampling, logprobs=True)
    with served(path, read_ahead=read_ahead) as (engine, run):
        whole = run(reply(engine, request))
        stats = run(engine.stats())
        assert stats.pages.page_ins == stats.pages.blocks
        # Up to a little more than what everything takes while the request runs, by quarter blocks.
        most = 4 * (stats.pages.blocks + 2)
        budgets = st.lists(st.none() | st.integers(-4, most), min_size=1, max_size=16)

        @settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
        @given(budgets)
        def changes(quarters: list[int | None]) -> None:
            found = run(reply_under(engine, request, quarters, block_bytes))
            assert found.bits == whole.bits

        changes()
        assert run(engine.stats()).pages.page_ins > stats.pages.page_ins


async def reply_under(
    engine: Engine, request: Request, quarters: list[int | None], block_bytes: int
) -> Reply:
    """The reply under budgets that are set one after another, one with each delta.

    quarters: room for blocks beside all that is fixed, in quarters of the largest block; None
    leaves the budget as it is.
    """
    await engine.set_budget(0)
    await engine.set_budget(2**40)
    whole, pending = Reply(), list(quarters)
    async with aclosing(engine.generate(replace(request, logits=True))) as deltas:
        async for delta in deltas:
            whole.add(delta)
            if pending and (quarter := pending.pop(0)) is not None:
                fixed_bytes = (await engine.stats()).pages.fixed_bytes
                wanted = max(fixed_bytes + quarter * block_bytes // 4, 0)
                reached = await engine.set_budget(wanted)
                assert reached.budget_bytes == wanted
                assert reached.frames >= 1
    return whole


# --- neighbours ----------------------------------------------------------------------------------

TOKENS = tuple(oracle.golden("llama")[0].tolist())
REQUESTS = [
    Request(TOKENS[:5], max_tokens=12),
    Request(TOKENS, max_tokens=3, logprobs=True),
    Request(TOKENS[3:], max_tokens=20, outputs=Outputs.ALL),
    Request(TOKENS[::-1], max_tokens=9, chunk_tokens=4, sampling=Sampling(1.0, seed=1)),
    Request(TOKENS[:9], max_tokens=30, sampling=Sampling(1.0, seed=2)),
    Request(TOKENS[:9], max_tokens=30, sampling=Sampling(1.0, seed=3)),
    Request(TOKENS[7:9], max_tokens=24, sampling=Sampling(0.7, 20, 0.9, seed=4), logprobs=True),
    Request(TOKENS[:30], max_tokens=17, sampling=Sampling(1.2, min_p=0.05, repeat_penalty=1.3)),
    Request(TOKENS[5:7], max_tokens=40, sampling=Sampling(1.0, 5, repeat_last_n=-1, seed=9)),
    Request(TOKENS[1:2], max_tokens=10, sampling=Sampling(0.0, frequency_penalty=0.6)),
    Request(TOKENS[2:4], max_tokens=10, sampling=Sampling(0.0, presence_penalty=0.9)),
    Request(TOKENS[:1], max_tokens=0, outputs=Outputs.ALL),
]
"""More than one step holds, of every kind."""


CHOICES: dict[str, dict[str, Any]] = {
    "usual": {},
    "strict": {"strict": True},
    "small pages": {"page_size_tokens": 4},
    "a page beyond the context": {"page_size_tokens": 1 << 20},
    "small steps": {"prompt_chunk_tokens": 1},
    "one thread": {"threads": 1},
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["gemma3", "llama-q-q4_k"])
async def test_sequences_beside_each_other_say_what_they_say_alone(
    name: str, choice: str, tiny_model: TinyModel
) -> None:
    path = path_of(tiny_model, name)
    async with opened(path) as model:
        alone = [await reply(model.engine, request) for request in REQUESTS]
        assert alone[4].ids != alone[5].ids, "seeds do nothing"
        num_steps = (await model.engine.stats()).steps
    async with opened(path, **CHOICES[choice]) as model:
        beside = await replies(model.engine, REQUESTS)
        assert [one.bits for one in beside] == [one.bits for one in alone]
        stats = await model.engine.stats()
        assert stats.steps < num_steps / 2, "they did not share steps"
        assert (stats.kv_bytes, stats.running, stats.waiting) == (0, 0, 0)


async def test_neighbours_under_a_tight_budget_say_the_same(tiny_model: TinyModel) -> None:
    path = tiny_model("gemma3")
    async with opened(path, page_size_tokens=16) as model:
        alone = [await reply(model.engine, request) for request in REQUESTS]
        await model.engine.set_budget(0)
        beside = await replies(model.engine, REQUESTS)
    assert [one.bits for one in beside] == [one.bits for one in alone]


# --- cancelling ----------------------------------------------------------------------------------

STRANGER = Request(TOKENS, max_tokens=400, sampling=Sampling(1.0, seed=8), logits=True)


async def close_after(engine: Engine, request: Request, num_deltas: int) -> None:
    """Read that many deltas of a reply, then leave."""
    async with aclosing(engine.generate(request)) as deltas:
        for _ in range(num_deltas):
            delta = await anext(deltas)
            assert delta.finish is None


CANCELLED = {
    "early in the prompt": (replace(STRANGER, outputs=Outputs.ALL, chunk_tokens=1), 1),
    "late in the prompt": (replace(STRANGER, outputs=Outputs.ALL, chunk_tokens=5), 6),
    "at the first token": (STRANGER, 1),
    "in the middle of decoding": (STRANGER, 30),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("moment", CANCELLED)
async def test_a_request_that_is_cancelled_leaves_no_trace(
    moment: str, strict: bool, tiny_model: TinyModel
) -> None:
    stranger, num_deltas = CANCELLED[moment]
    async with opened(tiny_model("gemma3"), page_size_tokens=16, strict=strict) as model:
        engine = model.engine
        alone = [await reply(engine, request) for request in REQUESTS[:5]]
        fixed_bytes = (await engine.stats()).pages.fixed_bytes
        *beside, _ = await asyncio.gather(
            *(reply(engine, request) for request in REQUESTS[:5]),
            close_after(engine, stranger, num_deltas),
        )
        assert [one.bits for one in beside] == [one.bits for one in alone]
        # Messages keep their order, so what comes after the cancellation finds it done.
        assert (await reply(engine, REQUESTS[0])).bits == alone[0].bits
        await all_is_free(engine, fixed_bytes)


async def test_a_task_that_is_cancelled_takes_its_request_along(tiny_model: TinyModel) -> None:
    """Whoever waits for the first token of a long prompt can be cancelled, queued or not."""
    async with opened(tiny_model("gemma3")) as model:
        engine = model.engine
        alone = await reply(engine, REQUESTS[0])
        fixed_bytes = (await engine.stats()).pages.fixed_bytes
        slow = replace(STRANGER, prompt=TOKENS * 8, chunk_tokens=1)
        tasks = [asyncio.create_task(reply(engine, slow)) for _ in range(10)]
        while (await engine.stats()).running < 8:
            pass
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in done)
        assert (await reply(engine, REQUESTS[0])).bits == alone.bits
        await all_is_free(engine, fixed_bytes)


@pytest.mark.parametrize("strict", [False, True])
async def test_a_request_may_be_cancelled_at_any_moment(
    strict: bool, tiny_model: TinyModel
) -> None:
    """Also before anyone knows that it was taken in."""
    async with opened(tiny_model("gemma3"), strict=strict) as model:
        engine = model.engine
        alone = await reply(engine, REQUESTS[0])
        fixed_bytes = (await engine.stats()).pages.fixed_bytes
        for num_turns in range(30):
            task = asyncio.create_task(reply(engine, STRANGER))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        assert (await reply(engine, REQUESTS[0])).bits == alone.bits
        await all_is_free(engine, fixed_bytes)


# --- closing -------------------------------------------------------------------------------------


async def test_an_engine_that_closes_ends_its_replies(tiny_model: TinyModel) -> None:
    """Also those that nobody waits for; who comes later hears that it has stopped."""
    async with opened(tiny_model("gemma3")) as model:
        idle, left = model.engine.generate(STRANGER), model.engine.generate(STRANGER)
        await anext(idle)
        await anext(left)
        waiting = [asyncio.create_task(reply(model.engine, STRANGER)) for _ in range(9)]
        await asyncio.wait(waiting, timeout=0)
    for one in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(one, Stopped) or one.finish is Finish.CANCELLED
    assert [delta async for delta in idle][-1].finish is Finish.CANCELLED
    await left.aclose()
    with pytest.raises(Stopped):
        await reply(model.engine, STRANGER)


async def all_is_free(engine: Engine, fixed_bytes: int) -> None:
    """Nothing runs, and nothing is held or promised to what ran, once who left is gone."""
    stats = await engine.stats()
    async with asyncio.timeout(10):
        while stats.running or stats.kv_bytes or stats.pages.fixed_bytes != fixed_bytes:
            stats = await engine.stats()
    assert (stats.running, stats.waiting, stats.kv_bytes) == (0, 0, 0)
    assert stats.pages.fixed_bytes == fixed_bytes
