"""Blocks go home when a reply needs their room, and come back; no reply changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest

from actors.mailbox import Stopped
from actors.messages.device import (
    Abandon,
    Adopt,
    Bring,
    Close,
    Drop,
    Hand,
    Missing,
    Open,
    Pack,
    Prepare,
    Step,
    Steps,
    Unpack,
)
from actors.messages.scheduler import SchedulerStatsRequest
from actors.relocate import Mover
from jitllm.engine import Delta, Finish, Moved, Request, SchedulerStats
from jitllm.errors import JitllmError, OutOfPages
from jitllm.schedule.placement import Placement
from tests.actors.movable_device import A, B, Fault, Scene, moving, reply_to
from tests.actors.test_scheduler import all_of, tokens
from tests.null.model_device import PART_PAGES

CARD = B
"""A device with memory of its own: of two positions a page; A is the host."""
ALL_THERE = 4 * PART_PAGES
"""Three blocks and the head."""
LONG = Request((1, 2, 3), max_tokens=60)
SHORT = Request((7, 8), max_tokens=4)


def card(num_pages: int, **choices: Any) -> Any:
    """Everything is on a device with room for so many pages besides."""
    choices = {"relocates": True, "page_tokens": 0, **choices}
    budgets = {CARD: ALL_THERE + num_pages}
    return moving(placement="1111", with_memory=[CARD], budgets=budgets, **choices)


async def stats_of(scene: Scene) -> SchedulerStats:
    stats: SchedulerStats = await scene.scheduler.ask(SchedulerStatsRequest())
    return stats


async def all_there(scene: Scene) -> SchedulerStats:
    """Once every block is on the device, and nothing moves any more."""
    while True:
        stats = await stats_of(scene)
        last = stats.last_move
        if stats.placement.devices == (CARD,) and last and last.epoch == stats.placement.epoch:
            return stats


def check_reply(deltas: Sequence[Delta], request: Request) -> None:
    assert deltas[-1].error is None, deltas[-1].error
    assert tokens(deltas) == reply_to(request)


async def test_blocks_go_home_one_by_one_and_come_back_after_a_short_request() -> None:
    # 62 positions take 31 pages of each block: all of them 93 where there is room for 30; without
    # the last block 62 of 38, and the first one alone 31 of 46
    async with card(30) as scene:
        places = []
        deltas = []
        async for delta in scene.client.generate(LONG):
            deltas.append(delta)
            place = str((await stats_of(scene)).placement)
            places += [place] if place not in places else []
        check_reply(deltas, LONG)
        assert places == [
            f"0-2={CARD},head={CARD}",
            f"0-1={CARD},2={A},head={CARD}",
            f"0={CARD},1-2={A},head={CARD}",
        ]
        stats = await stats_of(scene)
        assert (stats.sent_home, stats.brought_back, stats.losses) == (2, 0, 0)
        check_reply(await all_of(scene.client, SHORT), SHORT)
        stats = await all_there(scene)
        assert (stats.sent_home, stats.brought_back) == (2, 2)
        scene.check()
        check_reply(await all_of(scene.client, LONG), LONG)


async def test_who_is_warned_makes_room_while_replies_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever needs the page before that is done waits for it."""
    live: list[bool] = []
    carry_out = Mover.carry_out

    async def watched(self: Mover, move: Any, *, is_live: bool = True, **more: Any) -> Moved:
        live.append(is_live)
        return await carry_out(self, move, is_live=is_live, **more)

    monkeypatch.setattr(Mover, "carry_out", watched)
    async with card(30, warns=True) as scene:
        for number in (2, 4):
            check_reply(await all_of(scene.client, LONG), LONG)
            assert (await stats_of(scene)).sent_home == number
            check_reply(await all_of(scene.client, SHORT), SHORT)
            stats = await all_there(scene)
            assert stats.brought_back == number
    assert live == [True] * 8


async def test_the_head_goes_with_the_last_block_and_comes_back_with_it() -> None:
    long = Request((1, 2, 3), max_tokens=100)  # 51 pages of each block
    async with card(20, context_tokens=256) as scene:
        check_reply(await all_of(scene.client, long), long)
        assert str((await stats_of(scene)).placement) == f"0-2={A},head={A}"
        check_reply(await all_of(scene.client, SHORT), SHORT)
        stats = await all_there(scene)
        assert (stats.sent_home, stats.brought_back) == (3, 3)
        scene.check()


async def test_what_is_kept_of_a_long_reply_stays_until_somebody_needs_less() -> None:
    """A conversation that goes on would need the same room again."""
    async with card(30) as scene:
        for _ in range(3):
            check_reply(await all_of(scene.client, LONG), LONG)
        stats = await stats_of(scene)
        assert (stats.sent_home, stats.brought_back) == (2, 0)


@pytest.mark.parametrize("has_host", [True, False])
async def test_without_relocation_the_reply_ends_with_an_error_and_others_go_on(
    has_host: bool,
) -> None:
    async with card(30, relocates=False) as scene:
        if not has_host:
            for name in [name for name in scene.route.sites if name != CARD]:
                del scene.route.sites[name]
        long, short = await asyncio.gather(*(all_of(scene.client, r) for r in (LONG, SHORT)))
        check_reply(short, SHORT)
        assert isinstance(long[-1].error, OutOfPages)
        assert long[-1].finish is Finish.ERROR
        assert ("-relocate on" if has_host else "-devices with cpu") in str(long[-1].error)
        said = tokens(long)
        assert said
        assert said == reply_to(LONG)[: len(said)]
        check_reply(await all_of(scene.client, SHORT), SHORT)
        stats = await stats_of(scene)
        assert (stats.sent_home, stats.moves) == (0, 0)
        scene.check()


async def test_a_history_that_ran_out_of_room_is_kept() -> None:
    """Whoever goes on from it, with a little more room, computes only what is missing."""
    async with card(30, relocates=False, page_tokens=2) as scene:
        long = await all_of(scene.client, LONG)
        assert isinstance(long[-1].error, OutOfPages)
        again = Request((*LONG.prompt, *tokens(long)), max_tokens=1)
        scene.devices[CARD].model.budget += 3
        deltas = await all_of(scene.client, again)
        check_reply(deltas, again)
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.cached_tokens >= len(again.prompt) - 2


async def test_a_pinned_block_stays_and_says_so() -> None:
    async with card(30) as scene:
        await scene.client.place(f"1-2={CARD}!")
        deltas = await all_of(scene.client, LONG)
        stats = await stats_of(scene)
        assert str(stats.placement) == f"0={A},1-2={CARD}!,head={CARD}"
        assert isinstance(deltas[-1].error, OutOfPages)
        check_reply(await all_of(scene.client, SHORT), SHORT)


async def test_whoever_says_where_blocks_are_is_believed() -> None:
    async with card(30) as scene:
        check_reply(await all_of(scene.client, LONG), LONG)
        await scene.client.move([0], A)
        check_reply(await all_of(scene.client, SHORT), SHORT)
        stats = await stats_of(scene)
        assert str(stats.placement) == f"0-2={A},head={CARD}"
        assert stats.brought_back == 0


@pytest.mark.parametrize("seed", range(20))
async def test_many_replies_in_little_room(seed: int) -> None:
    dice = random.Random(seed)
    requests = [
        Request(
            tuple(dice.choices(range(1, 9), k=dice.randint(1, 30))), max_tokens=dice.randint(1, 40)
        )
        for _ in range(12)
    ]
    choices = {"page_tokens": 2 * dice.randint(0, 1), "warns": seed % 2 > 0}
    async with card(dice.randint(2, 60), **choices) as scene:
        replies = await asyncio.gather(*(all_of(scene.client, request) for request in requests))
        for request, deltas in zip(requests, replies, strict=True):
            check_reply(deltas, request)
        check_reply(await all_of(scene.client, SHORT), SHORT)
        assert (await stats_of(scene)).losses == 0


# --- growing ----------------------------------------------------------------------------------


def growing(faults: Mapping[str, Sequence[Fault]] = {}, **choices: Any) -> Any:
    """Everything begins on the host, and is to go to the device."""
    target = Placement.all_on(CARD, 3)
    choices = {"relocates": True, "page_tokens": 0, "grows_to": target, **choices}
    return moving(faults, "0000", with_memory=[CARD], **choices)


async def test_a_block_goes_to_its_device_with_each_token() -> None:
    async with growing() as scene:
        places, deltas = [], []
        async for delta in scene.client.generate(LONG):
            if not deltas:
                assert str((await stats_of(scene)).placement) == f"0-2={A},head={A}"
            deltas.append(delta)
            places.append(str((await stats_of(scene)).placement))
        check_reply(deltas, LONG)
        assert list(dict.fromkeys(places)) == [
            f"0-2={A},head={A}",
            f"0={CARD},1-2={A},head={CARD}",
            f"0-1={CARD},2={A},head={CARD}",
            f"0-2={CARD},head={CARD}",
        ]
        stats = await stats_of(scene)
        assert (stats.moves, stats.sent_home, stats.brought_back) == (3, 0, 0)
        scene.check()


async def test_growth_ends_where_there_is_no_room_and_goes_on_when_there_is() -> None:
    budgets = {CARD: ALL_THERE + 8}
    async with growing(budgets=budgets) as scene:
        check_reply(await all_of(scene.client, LONG), LONG)
        assert str((await stats_of(scene)).placement) != f"0-2={CARD},head={CARD}"
        check_reply(await all_of(scene.client, SHORT), SHORT)
        await all_there(scene)
        scene.check()


async def test_pinned_blocks_begin_where_they_are_to_be() -> None:
    target = Placement((A, CARD, CARD), CARD, pinned=frozenset({1}), streamed=frozenset({1, 2}))
    begins = target.at_home(A, [CARD])
    assert str(begins) == f"0={A},1={CARD}!~,2={A},head={A}"


KINDS = (
    Open,
    Close,
    Step,
    Steps,
    Prepare,
    Missing,
    Bring,
    Pack,
    Unpack,
    Hand,
    Adopt,
    Drop,
    Abandon,
)


@pytest.mark.parametrize("how", ["dies", "dies after", "hangs"])
@pytest.mark.parametrize("name", [A, CARD])
@pytest.mark.parametrize("kind", KINDS)
async def test_whoever_dies_while_blocks_go_home_and_come_back(
    kind: type, name: str, how: str
) -> None:
    for number in (1, 2):
        faults = {name: [Fault(kind, number, how)]}
        budgets = {CARD: ALL_THERE + 30}
        choices: dict[str, Any] = {"relocates": True, "page_tokens": 0, "budgets": budgets}
        choices["warns"] = number > 1
        async with moving(faults, "1111", with_memory=[CARD], **choices) as scene:
            for request in (LONG, SHORT, LONG):
                check_reply(await all_of(scene.client, request), request)
        async with growing(faults, budgets=budgets) as scene:
            for request in (LONG, SHORT, LONG):
                check_reply(await all_of(scene.client, request), request)


@pytest.mark.parametrize("kind", [Step, Open, Unpack])
async def test_a_gpu_that_ends_takes_its_requests_along_where_that_is_wanted(kind: type) -> None:
    faults = {CARD: [Fault(kind, 3 if kind is Step else 1, "ends")]}
    where = "0000" if kind is Unpack else "0111"
    for gpus_fall_back in (True, False):
        async with moving(
            faults, where, with_memory=[CARD], gpus_fall_back=gpus_fall_back
        ) as scene:
            if kind is Unpack:  # it has nothing of the model yet
                asyncio.get_running_loop().create_task(scene.client.move([0], CARD))
            for _ in range(2):
                deltas = await all_of(scene.client, LONG)
                if gpus_fall_back or kind is Unpack:
                    check_reply(deltas, LONG)
                else:
                    assert isinstance(deltas[-1].error, Stopped)
                    assert CARD in str(deltas[-1].error)


@pytest.mark.parametrize("kind", [Prepare, Open])
async def test_where_the_host_has_no_room_either_the_reply_says_so(kind: type) -> None:
    faults = {A: [Fault(kind, number, "refuses") for number in range(1, 9)]}
    budgets = {CARD: ALL_THERE + 30}
    choices: dict[str, Any] = {"relocates": True, "page_tokens": 0, "budgets": budgets}
    async with moving(faults, "1111", with_memory=[CARD], **choices) as scene:
        deltas = await all_of(scene.client, LONG)
        assert isinstance(deltas[-1].error, OutOfPages)
        check_reply(await all_of(scene.client, SHORT), SHORT)
        scene.check()


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens(seed: int) -> None:
    """Little room, replies of any length, faults, blocks that somebody moves: no reply changes."""
    dice = random.Random(seed)
    faults: dict[str, list[Fault]] = {A: [], CARD: []}
    for _ in range(2):
        fault = Fault(dice.choice(KINDS), dice.randint(2, 20), dice.choice(("dies", "hangs")))
        faults[dice.choice((A, CARD))].append(fault)
    choices: dict[str, Any] = {
        "relocates": True,
        "page_tokens": 2 * dice.randint(0, 1),
        "budgets": {CARD: ALL_THERE + dice.randint(20, 60)},
        "warns": dice.random() < 0.7,
        "tunes": dice.random() < 0.3,
    }
    if dice.random() < 0.3:
        choices["grows_to"] = Placement.all_on(CARD, 3)
    where = "0000" if "grows_to" in choices else "1111"
    async with moving(faults, where, with_memory=[CARD], **choices) as scene:

        async def ask() -> None:
            for _ in range(4):
                prompt = tuple(dice.choices(range(1, 9), k=dice.randint(1, 20)))
                request = Request(prompt, max_tokens=dice.randint(1, 40))
                check_reply(await all_of(scene.client, request), request)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(ask())
            for _ in range(dice.randint(0, 2)):
                await asyncio.sleep(0.01)
                blocks = dice.sample(range(3), dice.randint(1, 3))
                with suppress(JitllmError):
                    await scene.client.move(blocks, dice.choice((A, CARD)))
        check_reply(await all_of(scene.client, SHORT), SHORT)
