"""Experts that the host computes while the rest of their block is elsewhere: the same bits."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from actors.hosted import ExpertHost, Host
from actors.messages.device import AskExperts
from jitllm import compose
from jitllm.compose import Loaded
from jitllm.devices.mixtures import expert_blocks
from jitllm.engine import Outputs, Request, Sampling
from jitllm.errors import JitllmError, PageError, PlacementError, UsageError
from jitllm.memory.use import ExpertUse
from tests.conftest import TinyModel
from tests.models import oracle
from tests.models.deaths import Reaper
from tests.models.native import Reply, opened, replies, reply
from tests.models.test_experts import (
    Sizes,
    check_nothing_is_kept,
    check_one_expert_is_missed,
    mixture,
    short_requests,
)
from tests.models.test_faults import actor, overwrite
from tests.models.test_moves import bits, moving, num_blocks, one_each, random_moves, two_devices


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is given back is overwritten, so that computing with it would show."""
    monkeypatch.setenv("JITLLM_POISON", "1")


@asynccontextmanager
async def hosted(
    path: Path, placement: str = "*=cpu:1%host", num_experts: int | None = None, **choices: Any
) -> AsyncIterator[Loaded]:
    """An engine with the blocks on one CPU device and their experts on the other, with room for so
    many of the largest ones if that is given."""
    choices = {"placement": placement, "read_ahead": "off"} | choices
    async with two_devices(path, **choices) as loaded:
        if num_experts is not None:
            sizes = Sizes.of(path)
            fixed = (await loaded.engine.stats()).pages.fixed_bytes
            room = num_experts * max(sizes.expert_bytes.values())
            await loaded.engine.set_budget(fixed + sizes.own_bytes * 3 // 2 + room)
        yield loaded
        check_nothing_is_kept(loaded)


def use_of(loaded: Loaded, device: str) -> ExpertUse:
    """What the pager of a device did with experts."""
    engine: Any = loaded.engine
    use: ExpertUse = actor(engine._sites[device].pager)._experts.use
    return use


async def plain(path: Path, requests: list[Request]) -> list[Reply]:
    """Replies of a single device that has everything, one by one."""
    async with opened(path, experts="blocks") as loaded:
        return [await reply(loaded.engine, request) for request in requests]


@pytest.mark.parametrize("num_experts", [None, 2])
@pytest.mark.parametrize("name", [*oracle.MIXTURES, *oracle.QUANTIZED_MIXTURES])
async def test_experts_on_the_host_change_no_bit(
    name: str, num_experts: int | None, tiny_model: TinyModel
) -> None:
    path = mixture(tiny_model, name)
    tokens = tuple(oracle.golden(name)[0].tolist())
    requests = [
        Request(tokens, max_tokens=3, outputs=Outputs.ALL),
        Request(tokens[:9], max_tokens=5, chunk_tokens=4, sampling=Sampling(0.8, seed=3)),
    ]
    expected = await plain(path, requests)
    async with hosted(path, num_experts=num_experts) as loaded:
        found = await replies(loaded.engine, requests)
        placement = (await loaded.engine.stats()).placement
        there, here = use_of(loaded, "cpu:0"), use_of(loaded, "cpu:1")
        phases = (await loaded.engine.stats()).pages.phases
    assert phases["prompt"].bytes_read + phases["decode"].bytes_read >= there.bytes_read
    assert [one.bits for one in found] == [one.bits for one in expected]
    assert placement.hosted == expert_blocks(loaded.graph.blocks)
    assert str(placement).count("=cpu:1%host") == 1
    assert (here.reads, here.all_bytes) == (0, 0)
    assert there.reads > 0
    if num_experts is not None:
        assert there.held_bytes <= there.room_bytes < there.all_bytes


async def test_some_blocks_on_the_host_some_with_and_some_without_their_experts(
    tiny_model: TinyModel,
) -> None:
    path = tiny_model("qwen3moe", "q8_0")
    requests = [
        Request(tuple(range(5, 25)), max_tokens=12, sampling=Sampling(1.0, seed=i))
        for i in range(3)
    ]
    expected = await plain(path, requests)
    async with hosted(path, "0=cpu:1%host,1=cpu:1,*=cpu:0") as loaded:
        found = await replies(loaded.engine, requests)
        there, here = use_of(loaded, "cpu:0"), use_of(loaded, "cpu:1")
    assert [one.bits for one in found] == [one.bits for one in expected]
    assert there.reads > 0 < here.reads


async def test_blocks_that_move_leave_their_experts_on_the_host(tiny_model: TinyModel) -> None:
    path, dice = tiny_model("bailingmoe2", "f32"), random.Random(4)
    requests = [
        Request(tuple(range(5, 25)), max_tokens=30),
        Request(tuple(range(9, 14)), max_tokens=40, sampling=Sampling(1.0, seed=7)),
    ]
    expected = await plain(path, requests)
    async with hosted(path, "2=cpu:1%host,1=cpu:1%host,*=cpu:0", 16) as loaded:
        engine = loaded.engine
        await engine.move([1, 2], "cpu:0")
        assert "%host" not in str((await engine.stats()).placement)
        moves = random_moves(dice, await num_blocks(engine), ("cpu:0", "cpu:1"))
        found, _ = await moving(engine, requests, islice(moves, 6))
        assert bits(found) == one_each(expected)
        placement = (await engine.stats()).placement
        away = placement.blocks_on("cpu:1")
        assert placement.hosted == {1, 2}
        assert ("%host" in str(placement)) == bool(away & {1, 2})
        served = actor(engine._sites["cpu:1"].pager)._experts._residency._placed  # type: ignore[attr-defined]
        assert served == (away - {1, 2}) & expert_blocks(loaded.graph.blocks)


async def test_the_host_may_die_while_it_is_asked(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, dice = tiny_model("olmoe", "q8_0"), random.Random(6)
    requests = [
        Request(tuple(range(5 + i, 25 + i)), max_tokens=40, sampling=Sampling(1.0, seed=i))
        for i in range(3)
    ]
    expected = [one.bits for one in await plain(path, requests)]
    reaper = Reaper.installed(monkeypatch)
    async with hosted(path, num_experts=0) as loaded:
        for name in ("device cpu:0", "device cpu:1"):
            for late in (False, True):
                left = dice.randrange(3, 30)

                def dies(_: str, message: Any, name: str = name, late: bool = late) -> bool:
                    nonlocal left
                    left -= isinstance(message, AskExperts)
                    if left == 0:
                        left = -1
                        if name == "device cpu:1":  # whoever asked goes, in place of who answers
                            reaper.kill(name)
                            return False
                        reaper.late = late
                        return True
                    return False

                reaper.dies = dies
                assert [one.bits for one in await replies(loaded.engine, requests)] == expected
        assert reaper.num_deaths == 4


async def test_a_host_that_does_not_come_back_ends_replies(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else has these experts."""
    path = tiny_model("olmoe", "q8_0")
    reaper = Reaper.installed(monkeypatch)
    async with two_devices(path, placement="*=cpu:1%host") as loaded:
        await reply(loaded.engine, Request((7, 8), max_tokens=1))
        reaper.has_successor = False
        reaper.kill("device cpu:0")
        for _ in range(2):
            with pytest.raises(JitllmError, match="device cpu:0"):
                await reply(loaded.engine, Request((7, 8), max_tokens=1))


async def test_between_nodes_bytes_travel_themselves(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("dots1")
    requests = [Request(tuple(range(5, 25)), max_tokens=4)]
    expected = await plain(path, requests)
    told: list[AskExperts] = []
    answer = ExpertHost.answer

    async def noted(self: ExpertHost, compute: Any, message: AskExperts) -> Any:
        told.append(message)
        said = await answer(self, compute, message)
        assert isinstance(said, bytes)
        return said

    monkeypatch.setattr(ExpertHost, "answer", noted)
    monkeypatch.setattr(compose, "Host", lambda device, is_far: Host(device, is_far=True))
    async with hosted(path) as loaded:
        found = await replies(loaded.engine, requests)
    assert [one.bits for one in found] == [one.bits for one in expected]
    assert {type(message.data) for message in told} == {bytes}


async def test_replies_that_do_not_need_an_expert_go_on_without_it(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be read on the host ends the replies that are routed to it elsewhere."""
    path = tiny_model("qwen3moe", "q8_0")
    requests = short_requests()
    sound = await plain(path, requests)
    async with hosted(path, num_experts=0) as loaded:
        await check_one_expert_is_missed(loaded, monkeypatch, requests, sound)


async def test_an_expert_that_is_damaged_in_the_file_is_found_out(tiny_model: TinyModel) -> None:
    path = tiny_model("olmoe", "q8_0")
    async with hosted(path) as loaded:
        extents = [e.extent for e in loaded.header.experts]
        copy = path.with_name("damaged.jlm")
        copy.write_bytes(path.read_bytes())
    for extent in extents:
        overwrite(copy, extent.offset, b"damaged")
    async with hosted(copy) as loaded:
        with pytest.raises(PageError, match="checksum"):
            await reply(loaded.engine, Request((7, 8), max_tokens=1))


# --- what cannot be ---------------------------------------------------------------------------


async def refused(path: Path, kind: type[Exception], problem: str, **choices: Any) -> None:
    with pytest.raises(kind, match=problem):
        async with opened(path, **choices):
            pass


async def test_what_cannot_be_is_refused_when_the_model_is_opened(tiny_model: TinyModel) -> None:
    path = tiny_model("deepseek", "q8_0")
    both = {"devices": "cpu:0,cpu:1"}
    await refused(
        path,
        UsageError,
        "-experts blocks keeps",
        placement="*=cpu:1%host",
        experts="blocks",
        **both,
    )
    await refused(path, UsageError, "on the host experts are", placement="1=cpu:0%host", **both)
    await refused(
        path,
        PlacementError,
        "block 0 has no experts that the host computes",
        placement="0-1=cpu:1%host",
        placement_strict=True,
        **both,
    )


async def test_blocks_without_experts_are_noted(tiny_model: TinyModel) -> None:
    path = tiny_model("deepseek", "q8_0")
    async with hosted(path, "0-1=cpu:1%host,*=cpu:0") as loaded:
        assert loaded.notes == ("0-1=cpu:1%host: block 0 has no experts that the host computes",)
        assert str((await loaded.engine.stats()).placement).startswith("0=cpu:1,1=cpu:1%host,")
        # Where experts are stays as it is, whatever maps say later.
        await loaded.engine.place("2=cpu:1%host", strict=False)
        stats = await loaded.engine.stats()
        assert [d.what for d in stats.declines] == ["2=cpu:1%host"]
        assert "2=cpu:1," in str(stats.placement)
        with pytest.raises(PlacementError, match="block 2 has no experts that the host computes"):
            await loaded.engine.place("2=cpu:1%host", strict=True)
