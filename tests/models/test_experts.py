"""Experts that are paged one by one: the same bits, and nothing is read but what routers choose."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jitllm.compose import Loaded
from jitllm.engine import Engine, Outputs, Request, Sampling
from jitllm.errors import PageError
from jitllm.formats.jlm import Container, Extent
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.route import Route
from jitllm.memory.use import ExpertUse
from tests.conftest import TinyModel
from tests.models import oracle, reference
from tests.models.deaths import Reaper
from tests.models.kv_memory import columns_of
from tests.models.native import Reply, opened, replies, reply
from tests.models.test_faults import Fault, actor, overwrite, tokens_of
from tests.models.test_moves import bits, moving, num_blocks, one_each, random_moves, two_devices


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is given back is overwritten, so that computing with it would show."""
    monkeypatch.setenv("JITLLM_POISON", "1")


@dataclass(frozen=True)
class Sizes:
    """What blocks take without experts, and one expert of each block that has some."""

    own_bytes: int
    expert_bytes: dict[int, int]
    count: int

    @staticmethod
    def of(path: Path) -> Sizes:
        with Container.open(path) as container:
            runs = container.header.runs()
        mixtures = {block: experts for block, (_, *experts) in enumerate(runs) if experts}
        return Sizes(
            sum(own.length for own, *_ in runs),
            {block: max(-(-e.length // 4096) * 4096 for e in es) for block, es in mixtures.items()},
            max(map(len, mixtures.values())),
        )


@asynccontextmanager
async def apart(path: Path, num_experts: float, **choices: Any) -> AsyncIterator[Loaded]:
    """An engine with room for all blocks, and so many of the largest experts."""
    sizes = Sizes.of(path)
    async with opened(path, experts="apart", read_ahead="off", **choices) as loaded:
        fixed = (await loaded.engine.stats()).pages.fixed_bytes
        room = int(num_experts * max(sizes.expert_bytes.values()))
        await loaded.engine.set_budget(fixed + sizes.own_bytes + room)
        yield loaded
        check_nothing_is_kept(loaded)


def check_nothing_is_kept(loaded: Loaded) -> None:
    engine: Any = loaded.engine
    for site in engine._sites.values():
        experts = actor(site.pager)._experts
        experts._residency.check()
        assert experts._leases == {}
        assert not any(experts._residency._pinned.values())


def mixture(tiny_model: TinyModel, name: str) -> Path:
    """The container of a mixture that the oracle has under this name."""
    stem, _, weight_type = name.rpartition("-")
    return tiny_model(stem, weight_type) if name in oracle.QUANTIZED_MIXTURES else tiny_model(name)


def short_requests() -> list[Request]:
    """Some that are routed differently."""
    return [
        Request(tuple(dice.randrange(5, 300) for _ in range(3)), max_tokens=2)
        for dice in map(random.Random, range(8))
    ]


async def check_one_expert_is_missed(
    loaded: Loaded,
    monkeypatch: pytest.MonkeyPatch,
    requests: Sequence[Request],
    sound: Sequence[Reply],
) -> Fault:
    """One that cannot be read ends the replies that are routed to it; the others are `sound`, to
    the last bit. What hinders the reading is still on."""
    expert = next(e.extent for e in loaded.header.experts if (e.block, e.expert) == (1, 3))
    fault = Fault(Extent(expert.offset, expert.length, 0))
    fault.install(monkeypatch, fault.io_error)
    found = await asyncio.gather(
        *(reply(loaded.engine, request) for request in requests), return_exceptions=True
    )
    failed = [isinstance(one, PageError) for one in found]
    assert any(failed), "nobody was routed to it"
    assert not all(failed), "everybody was routed to it"
    for one, whole in zip(found, sound, strict=True):
        assert isinstance(one, PageError) or (isinstance(one, Reply) and one.bits == whole.bits)
    return fault


async def used(engine: Engine) -> ExpertUse:
    experts = (await engine.stats()).pages.experts
    assert experts is not None
    return experts


def num_used(loaded: Loaded) -> int:
    return next(op.used for op in loaded.graph.ops() if isinstance(op, ExpertMatMul))


# --- the same answer --------------------------------------------------------------------------


@pytest.mark.parametrize("num_experts", [0, 5])
@pytest.mark.parametrize("name", [*oracle.MIXTURES, *oracle.QUANTIZED_MIXTURES])
async def test_experts_that_come_one_by_one_change_no_bit(
    name: str, num_experts: int, tiny_model: TinyModel
) -> None:
    path = mixture(tiny_model, name)
    tokens = tuple(oracle.golden(name)[0].tolist())
    requests = [
        Request(tokens, max_tokens=5, outputs=Outputs.ALL),
        Request(tokens[:9], max_tokens=9, chunk_tokens=4, sampling=Sampling(0.8, seed=3)),
    ]
    async with opened(path, experts="blocks") as loaded:
        whole = [await reply(loaded.engine, request) for request in requests]
        assert (await loaded.engine.stats()).pages.experts is None
    async with apart(path, num_experts) as loaded:
        beside = await replies(loaded.engine, requests)
        found = await used(loaded.engine)
    assert [one.bits for one in beside] == [one.bits for one in whole]
    assert found.reads > max(found.resident, Sizes.of(path).count), "nothing had to go"


async def test_a_budget_that_changes_under_way_changes_no_bit(tiny_model: TinyModel) -> None:
    path, dice = tiny_model("qwen2moe", "q8_0"), random.Random(2)
    request = Request(tuple(range(5, 25)), max_tokens=40, sampling=Sampling(1.0, seed=1))
    async with opened(path, experts="blocks") as loaded:
        whole = await reply(loaded.engine, request)
    async with apart(path, 2, strict=True) as loaded:
        task = asyncio.create_task(reply(loaded.engine, request))
        sizes = Sizes.of(path)
        while not task.done():
            room = dice.randrange(40) * max(sizes.expert_bytes.values()) // 2
            reached = await loaded.engine.set_budget(
                dice.choice([0, sizes.own_bytes, 1 << 30]) + room
            )
            assert reached.experts is not None
            assert reached.experts.room_bytes >= max(sizes.expert_bytes.values())
        assert (await task).bits == whole.bits


async def test_with_keys_and_values_beyond_their_budget_too(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("deepseek", "q8_0")
    tokens = tuple(7 + (at * at * 31 + at * 17) % 300 for at in range(150))
    requests = [
        Request(tokens, max_tokens=12),
        Request(tokens[20:90], max_tokens=9, chunk_tokens=30, sampling=Sampling(0.8, seed=3)),
    ]
    async with opened(path, experts="blocks", page_size_tokens=16) as loaded:
        whole = [await reply(loaded.engine, request) for request in requests]
        set_bytes = columns_of(loaded).stride_bytes
    choices = {"kv_budget_bytes": 4 * set_bytes, "kv_cache": str(tmp_path)}
    async with apart(path, 3, page_size_tokens=16, **choices) as loaded:
        beside = await replies(loaded.engine, requests)
        assert (await loaded.engine.stats()).kv_spill.bytes_read > 0
    assert [one.bits for one in beside] == [one.bits for one in whole]


async def test_blocks_that_move_leave_their_experts(tiny_model: TinyModel) -> None:
    path, dice = tiny_model("bailingmoe2", "f32"), random.Random(4)
    requests = [
        Request(tuple(range(5, 25)), max_tokens=30),
        Request(tuple(range(9, 14)), max_tokens=40, sampling=Sampling(1.0, seed=7)),
    ]
    async with opened(path, experts="blocks", page_size_tokens=16) as loaded:
        expected = [await reply(loaded.engine, request) for request in requests]
    sizes = Sizes.of(path)
    async with two_devices(path, experts="apart") as loaded:
        engine = loaded.engine
        fixed = (await engine.stats()).pages.fixed_bytes
        room = 5 * max(sizes.expert_bytes.values())
        await engine.set_budget(fixed + sizes.own_bytes * 3 // 2 + room)
        moves = random_moves(dice, await num_blocks(engine), ("cpu:0", "cpu:1"))
        found, _ = await moving(engine, requests, islice(moves, 6))
        assert bits(found) == one_each(expected)
        stats = await engine.stats()
        engine_: Any = engine
        for name, site in engine_._sites.items():
            residency = actor(site.pager)._experts._residency
            held = {b for b in residency.expert_bytes if residency.num_held(b)}
            assert held <= set(stats.placement.blocks_on(name))
        check_nothing_is_kept(loaded)
        experts = await used(engine)
        assert experts.reads > 2 * sizes.count * len(sizes.expert_bytes)


async def test_a_device_that_dies_amid_its_experts_leaves_none_behind(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any moment, also while it waits for some or computes with others."""
    path, dice = tiny_model("olmoe", "q8_0"), random.Random(6)
    requests = [
        Request(tuple(range(5 + i, 25 + i)), max_tokens=60, sampling=Sampling(1.0, seed=i))
        for i in range(3)
    ]
    async with opened(path, experts="blocks") as loaded:
        expected = [(await reply(loaded.engine, request)).bits for request in requests]
    reaper = Reaper.installed(monkeypatch)
    async with apart(path, 0, strict=True) as loaded:
        engine: Any = loaded.engine
        pager = actor(engine._sites["cpu:0"].pager)
        moments = set()
        for _ in range(6):
            task = asyncio.create_task(replies(loaded.engine, requests))
            await asyncio.sleep(0.01 + dice.random() / 20)
            holders = pager._experts._holders.values()
            moments.add(any(holder.wanted or holder.leases for holder in holders))
            reaper.kill("device cpu:0")
            assert [one.bits for one in await task] == expected
            check_nothing_is_kept(loaded)
        assert True in moments, "it held none whenever it died"
        assert reaper.num_deaths == 6


@pytest.mark.parametrize(
    ("maxmem", "choice", "is_apart"),
    [
        ("fits", "auto", False),
        ("fits", "apart", True),
        ("short", "auto", True),
        ("short", "blocks", False),
    ],
)
async def test_experts_are_apart_where_the_model_does_not_fit(
    maxmem: str, choice: Any, is_apart: bool, tiny_model: TinyModel
) -> None:
    path = tiny_model("olmoe")
    with Container.open(path) as container:
        weight_bytes = container.header.weight_bytes
    maxmem_bytes = 1 << 30 if maxmem == "fits" else weight_bytes
    async with opened(path, experts=choice, maxmem_bytes=maxmem_bytes) as loaded:
        pages = (await loaded.engine.stats()).pages
        assert (pages.experts is not None) == is_apart
        assert pages.fits == (maxmem == "fits")


@pytest.mark.parametrize(("choice", "is_declined"), [("apart", False), ("blocks", True)])
async def test_blocks_without_experts_are_placed_by_what_they_take(
    choice: Any, is_declined: bool, tiny_model: TinyModel
) -> None:
    path = tiny_model("olmoe")
    with Container.open(path) as container:
        dense_bytes = container.header.dense.length
    maxmem_bytes = dense_bytes + Sizes.of(path).own_bytes * 4 // 3
    async with opened(path, experts=choice, maxmem_bytes=maxmem_bytes, ctx_tokens=16) as loaded:
        assert bool((await loaded.engine.stats()).declines) == is_declined


# --- what is read -----------------------------------------------------------------------------


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Experts [tokens, used] of each block in turn, as the reference chooses them."""
    chosen: list[Any] = []
    route = reference.OPS[Route]

    def noted(op: Any, run: Any) -> None:
        route(op, run)
        if op.ids.name == "expert_ids":
            chosen.append(run.buffers[op.ids.name])

    monkeypatch.setitem(reference.OPS, Route, noted)
    return chosen


def distinct(name: str, tokens: list[int], routed: list[Any]) -> list[int]:
    """How many different experts of each block the tokens of a sequence go to."""
    source = oracle.model(name)
    reference.logits(source.graph(), source.values, tokens)
    return [len(np.unique(ids)) for ids in routed]


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek", "bailingmoe2"])
async def test_with_room_each_expert_that_is_routed_to_is_read_once(
    name: str, tiny_model: TinyModel, routed: list[Any]
) -> None:
    tokens, greedy = oracle.golden(name)[0].tolist()[:12], 8
    async with apart(tiny_model(name), 1000, kv_type="f32") as loaded:
        found = await reply(loaded.engine, Request(tuple(tokens), max_tokens=greedy))
        experts = await used(loaded.engine)
    needed = distinct(name, [*tokens, *found.ids[:-1]], routed)
    assert experts.reads == sum(needed) == experts.resident
    assert experts.hits > 0


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek", "bailingmoe2"])
async def test_a_step_reads_each_expert_that_it_needs_once(
    name: str, tiny_model: TinyModel, routed: list[Any]
) -> None:
    """A prompt in one step, with room for fewer experts than it needs of a block."""
    tokens = oracle.golden(name)[0].tolist()
    async with apart(tiny_model(name), 3, kv_type="f32") as loaded:
        await reply(loaded.engine, Request(tuple(tokens), max_tokens=0, outputs=Outputs.ALL))
        experts = await used(loaded.engine)
    assert experts.reads == sum(distinct(name, tokens, routed))
    assert experts.hits == 0


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek"])
async def test_decoding_reads_the_absent_experts_and_nothing_else(
    name: str, tiny_model: TinyModel
) -> None:
    """With room for those of one block they are all absent whenever a token comes to them."""
    path, num_tokens = tiny_model(name, "q8_0"), 12
    sizes = Sizes.of(path)
    async with apart(path, 0) as loaded:
        await reply(loaded.engine, Request((1,), max_tokens=1))
        before, pages = await used(loaded.engine), (await loaded.engine.stats()).pages
        await reply(loaded.engine, Request((7,), max_tokens=num_tokens))
        after, pages_after = await used(loaded.engine), (await loaded.engine.stats()).pages
        each = num_used(loaded)
    assert after.hits == before.hits
    assert after.reads - before.reads == num_tokens * each * len(sizes.expert_bytes)
    num_bytes = num_tokens * each * sum(sizes.expert_bytes.values())
    assert after.bytes_read - before.bytes_read == num_bytes
    of_blocks = pages_after.bytes_read - pages.bytes_read - num_bytes
    assert of_blocks == 0 or pages_after.page_ins > pages.page_ins


# --- files that fail --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "problem"), [("io_error", "read failed: Input/output error"), ("short_read", "short")]
)
async def test_an_expert_that_cannot_be_read_ends_the_request_that_needs_it(
    kind: str, problem: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with apart(tiny_model("olmoe", "q8_0"), 0, strict=True) as loaded:
        sound = await tokens_of(loaded)
        experts = [e.extent for e in loaded.header.experts if e.block == 1]
        fault = Fault(Extent(experts[0].offset, experts[-1].end - experts[0].offset, 0))
        fault.install(monkeypatch, getattr(fault, kind))
        for _ in range(2):
            with pytest.raises(PageError, match=problem) as caught:
                await tokens_of(loaded)
            assert fault.extent.offset <= caught.value.offset < fault.extent.end
            check_nothing_is_kept(loaded)
        fault.is_on = False
        assert await tokens_of(loaded) == sound


@pytest.mark.parametrize("placement", [None, "0=cpu:0,*=cpu:1"])
async def test_replies_that_do_not_need_an_expert_go_on_without_it(
    placement: str | None, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of replies that share steps, those that are routed to it end, the others stay as they are."""
    path = tiny_model("olmoe", "q8_0")
    requests = [
        Request(tuple((5 + 13 * i + j) % 300 + 5 for j in range(2)), max_tokens=4)
        for i in range(12)
    ]
    async with opened(path, experts="blocks") as loaded:
        expected = [await reply(loaded.engine, request) for request in requests]
    choices = {"devices": "cpu:0,cpu:1", "placement": placement} if placement else {}
    async with apart(path, 0, strict=True, **choices) as loaded:
        extent = next(e.extent for e in loaded.header.experts if (e.block, e.expert) == (1, 3))
        fault = Fault(extent)
        fault.install(monkeypatch, fault.io_error)
        alone, beside = [], []
        for request in requests:
            [found] = await asyncio.gather(reply(loaded.engine, request), return_exceptions=True)
            alone.append(found)
        found = await asyncio.gather(
            *(reply(loaded.engine, request) for request in requests), return_exceptions=True
        )
        beside = list(found)
        stats = await loaded.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_bytes) == (0, 0, 0)
    for one, other, whole in zip(alone, beside, expected, strict=True):
        if isinstance(one, BaseException):
            assert isinstance(one, PageError)
            assert isinstance(other, PageError)
        else:
            assert not isinstance(other, BaseException)
            assert one.bits == other.bits == whole.bits
    failed = sum(isinstance(one, PageError) for one in alone)
    assert 0 < failed < len(requests), "the expert is not needed by some of them"


def contents(path: Path) -> bytes:
    return path.read_bytes()


async def test_a_container_that_is_damaged_under_way_ends_who_needs_the_damage(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Cut, overwritten, replaced: the server lives, and goes on where the file is whole again."""
    source, path = tiny_model("olmoe", "q8_0"), tmp_path / "m.jlm"
    shutil.copy(source, path)
    whole = contents(source)
    async with apart(path, 0, strict=True) as loaded:
        first = next(e.extent for e in loaded.header.experts if e.block == 2)
        overwrite(path, first.offset, bytes(len(whole) - first.offset))
        with pytest.raises(PageError, match="checksum"):  # compared when it is read first
            await tokens_of(loaded)
        check_nothing_is_kept(loaded)
        overwrite(path, 0, whole)
        sound = await tokens_of(loaded)

        os.truncate(path, first.offset + 100)
        with pytest.raises(PageError, match="short read") as caught:
            await tokens_of(loaded)
        assert caught.value.offset >= first.offset
        check_nothing_is_kept(loaded)
        overwrite(path, 0, whole)
        assert await tokens_of(loaded) == sound

        os.replace(shutil.copy(tiny_model("qwen3moe", "q8_0"), tmp_path / "other"), path)
        assert await tokens_of(loaded) == sound  # what is open is still the first file
