"""Prompts that begin like others before them, also in an earlier process: the same bits, sooner."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jitllm.compose import Loaded
from jitllm.engine import Engine, EngineStats, Request, Sampling, Usage
from jitllm.errors import UsageError
from tests.conftest import TinyModel
from tests.models.native import Reply, opened, reply

TEXT = tuple(random.Random(1).choices(range(3, 300), k=600))
OTHER = tuple(random.Random(2).choices(range(3, 300), k=600))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Path:
    return tiny_model(request.param, "q8_0")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is given back is overwritten, so that a read after it would show."""
    monkeypatch.setenv("JITLLM_POISON", "1")


@asynccontextmanager
async def caching(model: Path, folder: Path, **choices: Any) -> AsyncIterator[Loaded]:
    """With a prefix cache on disk, which is whole again at the end."""
    choices = {
        "threads": 1,
        "page_size_tokens": 16,
        "strict": True,
        "kv_cache": str(folder),
        "prefix_cache_bytes": 0,
        **choices,
    }
    async with opened(model, **choices) as loaded:
        yield loaded


async def alone(model: Path, requests: Sequence[Request], **choices: Any) -> list[Reply]:
    """Each computed from its first token on."""
    choices = {"threads": 1, "page_size_tokens": 16, "share_prefixes": False, **choices}
    async with opened(model, **choices) as loaded:
        return [await reply(loaded.engine, request) for request in requests]


async def usage_of(engine: Engine, request: Request) -> Usage:
    async for delta in engine.generate(request):
        assert delta.error is None, delta.error
        if delta.finish is not None:
            assert delta.usage is not None
            return delta.usage
    raise AssertionError("it did not end")


async def written(engine: Engine) -> EngineStats:
    """Once nothing waits for the disk."""
    while True:
        stats = await engine.stats()
        if not stats.prefix_waiting_bytes:
            return stats
        await asyncio.sleep(0.001)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("prefixes/*/*.kv"))


@pytest.mark.parametrize("count", [16, 17, 64, 100, 257, 300])
async def test_a_prompt_that_is_all_there_is_not_computed(
    model: Path, tmp_path: Path, count: int
) -> None:
    request = Request(TEXT[:count], max_tokens=8, logprobs=True)
    [expected] = await alone(model, [request])
    async with caching(model, tmp_path) as loaded:
        assert (await reply(loaded.engine, request)).bits == expected.bits
        stats = await loaded.engine.stats()
        assert (stats.prefix_totals.hits, stats.prefix_totals.whole) == (0, 0)
    async with caching(model, tmp_path) as loaded:
        assert (await reply(loaded.engine, request)).bits == expected.bits
        usage = await usage_of(loaded.engine, replace(request, max_tokens=1))
        stats = await loaded.engine.stats()
    assert usage.cached_tokens == usage.prompt_tokens == count
    assert stats.prefix_totals.whole == 2
    assert stats.prefix_totals.bytes_in > 0
    assert stats.steps == 8 + 1  # the first token of each takes the head alone


@pytest.mark.parametrize("others", [True, False])
async def test_what_differs_is_computed_and_nothing_else(
    model: Path, tmp_path: Path, others: bool
) -> None:
    """1,500 of 2,000 tokens, on a smaller scale: 150 of 200."""
    first = Request(TEXT[:200], max_tokens=4)
    second = Request((*TEXT[:150], *OTHER[:50]), max_tokens=4)
    [expected] = await alone(model, [second])
    async with caching(model, tmp_path) as loaded:
        await reply(loaded.engine, first)
    async with caching(model, tmp_path, max_batch=4) as loaded:
        engine = loaded.engine
        beside = [Request(OTHER[i : i + 30], max_tokens=100) for i in range(2 if others else 0)]
        tasks = [asyncio.create_task(reply(engine, request)) for request in beside]
        assert (await reply(engine, second)).bits == expected.bits
        assert (await usage_of(engine, second)).cached_tokens >= 144
        totals = (await engine.stats()).prefix_totals
        for task in tasks:
            await task
    assert totals.tokens >= 144
    async with caching(model, tmp_path) as loaded:
        usage = await usage_of(loaded.engine, replace(second, prompt=(*second.prompt[:170], 5)))
    assert usage.cached_tokens == 160  # up to a multiple of 16


async def test_a_conversation_goes_on_after_its_reply(model: Path, tmp_path: Path) -> None:
    first = Request(TEXT[:40], max_tokens=60, sampling=Sampling(temperature=0.8, seed=3))
    async with caching(model, tmp_path) as loaded:
        said = await reply(loaded.engine, first)
    second = Request((*first.prompt, *said.ids, *OTHER[:10]), max_tokens=10)
    [expected] = await alone(model, [second])
    async with caching(model, tmp_path) as loaded:
        again = await reply(loaded.engine, second)
        totals = (await loaded.engine.stats()).prefix_totals
    assert again.bits == expected.bits
    assert totals.tokens == (40 + 59) // 16 * 16  # nobody computed what the last token leads to


async def test_other_requests_of_every_kind_give_what_they_give_alone(
    model: Path, tmp_path: Path
) -> None:
    prompt = TEXT[:70]
    requests = [
        Request(prompt, max_tokens=20, sampling=Sampling(temperature=0.9, seed=5), logprobs=True),
        Request(prompt, max_tokens=20, sampling=Sampling(repeat_penalty=1.4), top_logprobs=3),
        Request(prompt, max_tokens=0),
        Request(prompt, max_tokens=12, chunk_tokens=7),
        Request(prompt, max_tokens=12, sampling=Sampling(logit_bias=((7, 5.0),))),
        Request(prompt[:69], max_tokens=12),
        Request((*prompt, 9), max_tokens=12),
    ]
    expected = await alone(model, requests)
    async with caching(model, tmp_path) as loaded:
        await reply(loaded.engine, requests[0])
    async with caching(model, tmp_path) as loaded:
        tasks = [asyncio.create_task(reply(loaded.engine, request)) for request in requests]
        replies = [await task for task in tasks]
        totals = (await loaded.engine.stats()).prefix_totals
    assert [r.bits for r in replies] == [e.bits for e in expected]
    assert totals.whole >= 5


async def test_nothing_is_skipped_between_memory_and_the_end_of_a_prompt(
    model: Path, tmp_path: Path
) -> None:
    """Pages smaller than what files share end in the middle of it."""
    short, middle, long = (Request(TEXT[:count], max_tokens=4) for count in (96, 93, 100))
    [expected] = await alone(model, [long])
    async with caching(model, tmp_path) as loaded:
        await reply(loaded.engine, short)
        await written(loaded.engine)
        await reply(loaded.engine, long)
    gone = [path for path in files_of(tmp_path) if "-0-" in path.name]
    for path in gone:
        path.unlink()
    assert [path for path in files_of(tmp_path) if path.name.endswith("-96-end.kv")]
    async with caching(model, tmp_path, page_size_tokens=4) as loaded:
        await reply(loaded.engine, replace(middle, max_tokens=1))
        assert (await reply(loaded.engine, long)).bits == expected.bits


async def test_namespaces_have_nothing_in_common(model: Path, tmp_path: Path) -> None:
    """Neither on disk nor in memory: who is served sooner would know what others asked."""
    request = Request(TEXT[:64], max_tokens=3)
    for _ in range(2):
        async with caching(model, tmp_path) as loaded:
            mine = replace(request, namespace="mine")
            await usage_of(loaded.engine, mine)
            cached = [
                (await usage_of(loaded.engine, replace(request, namespace=name))).cached_tokens
                for name in ("mine", "theirs", "")
            ]
            assert (await written(loaded.engine)).prefix_totals.failures == 0
        assert cached[0] >= 48
        if not _:
            assert cached[1:] == [0, 0]
    assert cached == [64, 64, 64]


async def test_it_is_off_where_nobody_asked_for_it(model: Path, tmp_path: Path) -> None:
    for choices in ({"prefix_cache_bytes": None}, {"share_prefixes": False}):
        async with caching(model, tmp_path, **choices) as loaded:
            await reply(loaded.engine, Request(TEXT[:100], max_tokens=3))
        assert os.listdir(tmp_path) == []
    with pytest.raises(UsageError, match="-kv-cache-max is about a -kv-cache"):
        async with caching(model, tmp_path, kv_cache=None):
            pass


async def test_other_keys_and_values_are_others(model: Path, tmp_path: Path) -> None:
    request = Request(TEXT[:100], max_tokens=3)
    for kv_type in ("f16", "f32", "q8_0"):
        [expected] = await alone(model, [request], kv_type=kv_type)
        async with caching(model, tmp_path, kv_type=kv_type) as loaded:
            assert (await usage_of(loaded.engine, request)).cached_tokens == 0
        async with caching(model, tmp_path, kv_type=kv_type) as loaded:
            assert (await reply(loaded.engine, request)).bits == expected.bits
            assert (await loaded.engine.stats()).prefix_totals.tokens == 100
    assert len(os.listdir(tmp_path / "prefixes")) == 3


async def test_the_bound_holds_and_what_was_used_last_is_there(model: Path, tmp_path: Path) -> None:
    async with caching(model, tmp_path) as loaded:
        await reply(loaded.engine, Request(TEXT[:64], max_tokens=1))
    [file] = files_of(tmp_path)
    most = file.stat().st_size * 4
    async with caching(model, tmp_path, prefix_cache_bytes=most) as loaded:
        for start in range(0, 400, 40):
            await reply(loaded.engine, Request(OTHER[start : start + 64], max_tokens=1))
            await written(loaded.engine)
        stats = await loaded.engine.stats()
    assert stats.prefix_totals.evictions > 0
    assert (
        sum(path.stat().st_size for path in files_of(tmp_path)) == stats.prefix_disk_bytes <= most
    )
    async with caching(model, tmp_path, prefix_cache_bytes=most) as loaded:
        usage = await usage_of(loaded.engine, Request(OTHER[360:424], max_tokens=1))
        assert usage.cached_tokens == 64
        usage = await usage_of(loaded.engine, Request(TEXT[:64], max_tokens=1))
        assert usage.cached_tokens == 0


async def test_a_real_model_with_windows_gives_the_same_bits(
    gemma_model: Path, tmp_path: Path
) -> None:
    """Of 700 positions others share 688; blocks look back 512 of them, or at all."""
    dice = random.Random(5)
    prompt = tuple(dice.choices(range(1000, 200_000), k=700))
    requests = [
        Request(prompt, max_tokens=4),
        Request((*prompt[:690], *dice.choices(range(1000, 200_000), k=30)), max_tokens=4),
    ]
    kept = {"kv_cache": str(tmp_path), "prefix_cache_bytes": 0, "ctx_tokens": 2048}
    async with opened(gemma_model, share_prefixes=False, ctx_tokens=2048) as loaded:
        expected = [await reply(loaded.engine, request) for request in requests]
    async with opened(gemma_model, **kept) as loaded:
        assert (await reply(loaded.engine, requests[0])).bits == expected[0].bits
    for request, want, cached in zip(requests, expected, (700, 688), strict=True):
        async with opened(gemma_model, page_size_tokens=128, **kept) as loaded:
            assert (await reply(loaded.engine, request)).bits == want.bits
            assert (await loaded.engine.stats()).prefix_totals.tokens == cached


# --- disks that fail ------------------------------------------------------------------------------


def refuse(number: int) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_a_disk_that_takes_nothing_costs_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    request = Request(TEXT[:100], max_tokens=5)
    [expected] = await alone(model, [request])
    async with caching(model, tmp_path) as loaded:
        with monkeypatch.context() as patch:
            patch.setattr("jitllm.memory.prefix_store.os.write", refuse(number))
            assert (await reply(loaded.engine, request)).bits == expected.bits
            totals = (await written(loaded.engine)).prefix_totals
        assert totals.failures > 0
        assert totals.files == 0
        assert files_of(tmp_path) == []
        other = Request(OTHER[:100], max_tokens=5)
        await reply(loaded.engine, other)
        assert (await written(loaded.engine)).prefix_totals.files > 0


async def test_a_folder_that_cannot_be_written_is_still_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions mean nothing to root, so the system says no in their place."""
    request, other = Request(TEXT[:100], max_tokens=5), Request(OTHER[:100], max_tokens=5)
    expected = await alone(model, [request, other])
    async with caching(model, tmp_path) as loaded:
        await reply(loaded.engine, request)
    monkeypatch.setattr("tempfile.mkstemp", refuse(errno.EROFS))
    monkeypatch.setattr("jitllm.memory.prefix_store.os.utime", refuse(errno.EROFS))
    async with caching(model, tmp_path) as loaded:
        replies = [await reply(loaded.engine, one) for one in (request, other)]
        totals = (await written(loaded.engine)).prefix_totals
    assert [r.bits for r in replies] == [e.bits for e in expected]
    assert totals.whole == 1
    assert totals.failures > 0


async def test_a_folder_that_there_cannot_be_is_reported(model: Path, tmp_path: Path) -> None:
    request = Request(TEXT[:100], max_tokens=5)
    [expected] = await alone(model, [request])
    (tmp_path / "prefixes").write_text("in the way")
    async with caching(model, tmp_path) as loaded:
        for _ in range(2):
            assert (await reply(loaded.engine, request)).bits == expected.bits
        totals = (await written(loaded.engine)).prefix_totals
    assert totals.failures > 0


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_a_disk_that_gives_nothing_back_costs_computing_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    request = Request(TEXT[:400], max_tokens=5)
    [expected] = await alone(model, [request])
    async with caching(model, tmp_path) as loaded:
        await reply(loaded.engine, request)
    whole, calls = os.pread, 0

    def failing(fd: int, count: int, at: int) -> bytes:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(fd, count, at)

    async with caching(model, tmp_path) as loaded:
        assert await loaded.engine.stats()  # it has begun, and soon knows its files
        await usage_of(loaded.engine, Request(OTHER[:1], max_tokens=1))
        with monkeypatch.context() as patch:
            patch.setattr("jitllm.memory.prefix_file.os.pread", failing)
            assert (await reply(loaded.engine, request)).bits == expected.bits
        totals = (await written(loaded.engine)).prefix_totals
    assert 1 <= totals.failures <= 2  # the end of the prompt, and its beginning
    assert totals.whole == 0
    assert len(files_of(tmp_path)) > 1  # a disk may come to its senses


async def test_a_wrong_byte_that_nobody_noticed_would_show(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These tests can fail: without sums, a damaged file is another answer."""
    from jitllm.memory.prefix_file import PrefixFile

    request = Request(TEXT[:100], max_tokens=5)
    [expected] = await alone(model, [request])
    async with caching(model, tmp_path) as loaded:
        await reply(loaded.engine, request)
    read = PrefixFile.read

    def wrong(self: PrefixFile, number: int) -> bytes:
        data = read(self, number)
        return data[:-64] + b"\x3c" * 64

    async with caching(model, tmp_path) as loaded:
        monkeypatch.setattr(PrefixFile, "read", wrong)
        assert (await reply(loaded.engine, request)).bits != expected.bits


# --- everything at random -------------------------------------------------------------------------

NUM_CASES, NUM_ENGINES = 200, 10

ENGINES: tuple[dict[str, Any], ...] = (
    {},
    {"page_size_tokens": 64},
    {"page_size_tokens": 4, "prompt_chunk_tokens": 24},
    {"devices": "cpu:0,cpu:1", "placement": "0=cpu:0,1=cpu:1,*=cpu:0", "threads": 2},
    {
        "devices": "cpu:0,cpu:1",
        "placement": "*=cpu:1,head=cpu:0",
        "page_sizes": (("cpu:0", 16), ("cpu:1", 4)),
        "threads": 2,
    },
    {"maxmem_bytes": 1},
    {"kv_budget_bytes": 150_000},
    {"prefix_cache_bytes": 200_000},
)


def drawn(dice: random.Random) -> Request:
    """A prompt that begins like others, or does not."""
    text = dice.choice((TEXT, TEXT, OTHER))
    common = dice.choice((0, 16, 48, 100, 150, 256, 300))
    rest = tuple(dice.randrange(3, 300) for _ in range(dice.choice((0, 0, 1, 15, 16, 40))))
    sampling = dice.choice((Sampling(), Sampling(temperature=0.8, seed=dice.randrange(9))))
    return Request(
        (*text[:common], *rest) or (1,), max_tokens=dice.randint(1, 6), sampling=sampling
    )


def damage(folder: Path, dice: random.Random) -> None:
    """Something happens to a file, unless the engine has just deleted it."""
    if not (files := files_of(folder)):
        return
    path, other, what = dice.choice(files), dice.choice(files), dice.randrange(4)
    at, bit = dice.random(), 1 << dice.randrange(8)
    with suppress(FileNotFoundError):
        data = bytearray(path.read_bytes())
        match what:
            case 0:
                data[int(at * len(data))] ^= bit
                path.write_bytes(data)
            case 1:
                os.truncate(path, int(at * len(data)))
            case 2:
                os.replace(other, path)
            case 3:
                path.unlink()


async def test_random_prompts_on_random_engines_with_random_damage(
    model: Path, tmp_path: Path
) -> None:
    dice = random.Random(7)
    cases = [drawn(dice) for _ in range(NUM_CASES)]
    expected = await alone(model, cases)
    numbers, together = list(range(NUM_CASES)), []
    while numbers:
        together.append([numbers.pop(0) for _ in range(min(dice.randint(1, 5), len(numbers)))])
    tokens = damaged = whole = 0
    for engine_number in range(NUM_ENGINES):
        choices = ENGINES[engine_number % len(ENGINES)]
        batches = together[engine_number::NUM_ENGINES]
        for _ in range(3):
            damage(tmp_path, dice)
        async with caching(model, tmp_path, **choices) as loaded:
            for batch in batches:
                if dice.random() < 0.4:
                    damage(tmp_path, dice)
                replies = await asyncio.gather(*(reply(loaded.engine, cases[n]) for n in batch))
                for number, got in zip(batch, replies, strict=True):
                    assert got.bits == expected[number].bits, (choices, cases[number])
            stats = await written(loaded.engine)
            assert (stats.running, stats.waiting, stats.kv_bytes) == (0, 0, 0)
            tokens += stats.prefix_totals.tokens
            damaged += stats.prefix_totals.damaged
            whole += stats.prefix_totals.whole
            assert stats.prefix_totals.failures == 0
    assert tokens > 1000
    assert damaged > 5
    assert whole > 5
