"""Blocks move between the host and a Vulkan device while replies go on."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.device import Device
from jitllm.cli.agreement import Agreement
from jitllm.compose import Loaded
from jitllm.engine import Request
from jitllm.errors import PlacementError
from jitllm.schedule.step import Span
from tests.conftest import TinyModel
from tests.models.native import Reply, opened, reply
from tests.models.test_moves import PROMPT, following, moving, num_blocks, random_moves
from tests.models.test_moves import REQUESTS as LONG
from tests.ops.vulkan import needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]

CPU, GPU = "cpu:0", "vulkan:0"
REQUESTS = tuple(replace(request, max_tokens=50) for request in LONG)
MAX_DIFFERENCES = {"f32": 0.01, "q8_0": 0.3, "q4_k": 0.3}
"""Of a logit, between a reply that moves and one on the host, by weight type. Keys and values are
half floats, and an activation that is rounded to another byte weighs more than that."""


@pytest.fixture(
    scope="module", params=[("llama", "q8_0"), ("gemma3", "f32"), ("llama-q", "q4_k")], ids="-".join
)
def model(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Path:
    return tiny_model(*request.param)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is given back is overwritten, on either side."""
    monkeypatch.setenv("JITLLM_POISON", "1")


@asynccontextmanager
async def both(model: Path, devices: str = f"{CPU},{GPU}", **choices: Any) -> AsyncIterator[Loaded]:
    choices = {
        "page_sizes": ((CPU, 16), (GPU, 4)),
        "placement": f"*={CPU}",
        "threads": 1,
        "move_share": 0.99,
        "strict": True,
        **choices,
    }
    async with opened(model, devices=devices, **choices) as loaded:
        yield loaded


async def quiet(model: Path, requests: Sequence[Request] = REQUESTS) -> list[Reply]:
    """Each alone, on the host."""
    async with opened(model, devices=CPU, threads=1, page_size_tokens=16) as loaded:
        return [await reply(loaded.engine, request) for request in requests]


def check(model: Path, replies: Sequence[Reply], expected: Sequence[Reply]) -> None:
    """Logits are in a band as long as the ids are the same, which they are for most of the way."""
    most = MAX_DIFFERENCES[model.stem.rsplit("-", 1)[1]]
    num_same = 0
    for got, want in zip(replies, expected, strict=True):
        assert len(got.ids) == len(want.ids)
        differ = (i for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)) if a != b)
        same = next(differ, len(want.ids))
        rows = slice(0, same + 1)  # the first one that differs has the same history too
        assert np.abs(got.logits[rows] - want.logits[rows]).max() <= most
        num_same += same
    assert num_same > len(replies) * len(expected[0].ids) // 2


@pytest.mark.parametrize(
    "placement", [f"0=vulkan:0,*={CPU}", f"0={CPU},*={GPU},head={CPU}", f"*={CPU},head={GPU}"]
)
async def test_a_route_through_both_gives_the_same_answer(model: Path, placement: str) -> None:
    expected = await quiet(model)
    async with both(model, placement=placement) as loaded:
        check(model, [await reply(loaded.engine, request) for request in REQUESTS], expected)


async def test_all_blocks_go_there_and_back_again_and_again(model: Path) -> None:
    """Away from the host while replies stand still: it would have ended them meanwhile."""
    expected = await quiet(model)
    async with both(model, placement=f"*={GPU}") as loaded:
        engine, done = loaded.engine, []
        blocks = range(await num_blocks(engine))
        seen = [asyncio.Event() for _ in REQUESTS]
        tasks = [
            asyncio.create_task(following(engine, request, event))
            for request, event in zip(REQUESTS, seen, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in seen))
        for _ in range(2):
            done.append(await engine.move(blocks, CPU, head=True))
            done.append(await engine.move(blocks, GPU, head=True, is_live=False))
        replies = [await task for task in tasks]
        stats = await engine.stats()
    check(model, replies, expected)
    assert stats.moves == len(done)
    assert all(moved.pages > 0 for moved in done)
    assert stats.steps < sum(len(reply.ids) for reply in replies)  # they were computed together


async def test_random_blocks_with_holes_go_anywhere(model: Path) -> None:
    expected = await quiet(model)
    dice = random.Random(1)
    async with both(model, placement=f"*={GPU}") as loaded:
        moves = random_moves(dice, await num_blocks(loaded.engine), (GPU, CPU))
        replies, _ = await moving(loaded.engine, REQUESTS, islice(moves, 4))
    for same in zip(*replies, strict=False):
        check(model, same, expected)


async def test_nothing_is_computed_again(model: Path) -> None:
    async with both(model, placement=f"*={GPU}") as loaded:
        blocks = range(await num_blocks(loaded.engine))
        moves = [(blocks, to, True) for _ in range(3) for to in (CPU, GPU)]
        (replies,), _ = await moving(loaded.engine, REQUESTS[:1], moves)
        stats = await loaded.engine.stats()
    # The first token comes with the prompt.
    assert stats.steps == sum(len(reply.ids) for reply in replies)


# --- what `jitllm verify` says, of several sessions at once --------------------------------------

BAND = 5e-4
"""Of float weights with keys and values of full width."""
SESSIONS = tuple(Request(PROMPT * n, max_tokens=60 - 10 * n, chunk_tokens=7) for n in range(1, 5))
"""They begin at different positions, and none of them ends while another one begins."""


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int, int]]:
    """How often each (sequence, position, block) was computed, on whatever device."""
    counts: Counter[tuple[int, int, int]] = Counter()
    begin, describe = Device.__init__, Device._describe

    def counting(self: Device, runner: Any, *rest: Any, **more: Any) -> None:
        begin(self, runner, *rest, **more)
        run, self.spans = runner.run, ()  # type: ignore[attr-defined]

        def counted(start: int, stop: int, **how: bool) -> None:
            counts.update(
                (span.sequence, position, block)
                for span in self.spans  # type: ignore[attr-defined]
                for position in range(span.start, span.stop)
                for block in range(start, stop)
            )
            run(start, stop, **how)

        runner.run = counted

    def noting(self: Device, spans: tuple[Span, ...], wants_logits: tuple[int, ...] = ()) -> None:
        self.spans = spans  # type: ignore[attr-defined]
        describe(self, spans, wants_logits)

    monkeypatch.setattr(Device, "__init__", counting)
    monkeypatch.setattr(Device, "_describe", noting)
    return counts


@pytest.mark.parametrize(
    ("name", "kv_type", "band"),
    [("llama", "f32", BAND), ("gemma3", "f32", BAND), ("llama", "q8_0", 50 * BAND)],
)
async def test_sessions_stay_in_the_band_while_blocks_move(
    name: str,
    kv_type: str,
    band: float,
    tiny_model: TinyModel,
    computed: Counter[tuple[int, int, int]],
) -> None:
    """Random blocks, four sessions at different positions; no token is computed again. A byte of a
    key that is rounded to another one weighs more than all else that devices differ by."""
    path, dice = tiny_model(name), random.Random(5)
    whole = {"kv_type": kv_type, "share_prefixes": False}
    async with opened(path, devices=CPU, threads=1, **whole) as loaded:
        expected = [await reply(loaded.engine, request) for request in SESSIONS]
    computed.clear()
    async with both(path, placement=f"*={GPU}", **whole) as loaded:
        count = await num_blocks(loaded.engine)
        moves = islice(random_moves(dice, count, (GPU, CPU)), 6)
        replies, done = await moving(loaded.engine, SESSIONS, moves)
        stats = await loaded.engine.stats()
    assert stats.moves == len(done) == 6
    assert sum(moved.tokens_meanwhile > 0 for moved in done) > 1  # replies went on meanwhile
    num_positions = 0
    for request, same, want in zip(SESSIONS, replies, expected, strict=True):
        num_positions += len(same) * (len(request.prompt) + request.max_tokens - 1)
        for found in same:
            agreement = Agreement(band)
            for position, rows in enumerate(zip(want.logits, found.logits, strict=True)):
                agreement.add(position, *(row.tolist() for row in rows))
            assert agreement.problem == ""
            assert found.ids == want.ids
    assert set(computed.values()) == {1}
    assert len(computed) == num_positions * count


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_verify_reports_that_band(name: str, tiny_model: TinyModel) -> None:
    flags = ("-devices", GPU, "-kv-type", "f32", "-n", "24", "-dlogit", str(BAND), "-migrate")
    command = [sys.executable, "-m", "jitllm.cli.main", "verify", str(tiny_model(name)), *flags]
    done = subprocess.run([*command, "-json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["worst_dlogit"] <= BAND


async def test_a_move_without_room_is_refused_with_numbers(tiny_model: TinyModel) -> None:
    async with both(tiny_model("llama"), f"{CPU},{GPU}=13M") as loaded:
        blocks = range(await num_blocks(loaded.engine))
        with pytest.raises(PlacementError, match=r"no room for .* on vulkan:0: .* MiB are missing"):
            await loaded.engine.move(blocks, GPU, head=True)
        await loaded.engine.move([1], GPU)
        stats = await loaded.engine.stats()
        assert str(stats.placement) == f"0={CPU},1={GPU},2={CPU},head={CPU}"
        assert len((await reply(loaded.engine, REQUESTS[0])).ids) == 50


async def test_blocks_of_a_mixture_come_and_go_whole(tiny_model: TinyModel) -> None:
    """The host has experts one by one, the device all of those of its blocks."""
    path = tiny_model("olmoe", "f32")
    requests = REQUESTS[:2]
    expected = await quiet(path, requests)
    async with both(path, experts="apart") as loaded:
        engine = loaded.engine
        n = await num_blocks(engine)
        moves = [(range(n), GPU, True), ([1], CPU, False), (range(n), CPU, True)]
        replies, _ = await moving(engine, requests, moves[:2])
        for blocks, to, head in moves[2:]:
            chosen = [b for b in blocks if (await engine.stats()).placement.blocks[b] != to]
            await engine.move(chosen, to, head=head)
        last = [await reply(engine, request) for request in requests]
        assert [one.bits for one in last] == [one.bits for one in expected]
        experts = (await engine.stats()).pages.experts
        assert experts is not None
        assert experts.reads > 0
    for same, want in zip(replies, expected, strict=True):
        check(path, same, [want] * len(same))
