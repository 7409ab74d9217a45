"""A context that outgrows a Vulkan device: its blocks go to the host, and come back later."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors import seats
from jitllm.compose import Loaded
from jitllm.devices.runner import SeatMemory
from jitllm.devices.vulkan.runner import VulkanRunner
from jitllm.engine import Delta, EngineStats, Request, Sampling
from jitllm.errors import OutOfPages, OverBudget, UsageError
from jitllm.schedule import sequence
from tests.conftest import TinyModel
from tests.models.native import Reply, opened, replies, reply
from tests.models.test_soak import REQUESTS as SOAKED
from tests.models.test_soak import SOAK_S, Soak, one_reply
from tests.ops.vulkan import needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]

CPU, GPU = "cpu:0", "vulkan:0"
PROMPT = (1, 259, 75, 260, 269, 270, 271, 300, 12, 13)
LONG = Request(PROMPT * 40, max_tokens=60)
SHORT = Request(PROMPT, max_tokens=5)
MANY = (
    Request(PROMPT, max_tokens=150),
    Request(PROMPT[3:] * 4, max_tokens=140, sampling=Sampling(temperature=0.8, seed=3)),
    Request(PROMPT[:7] * 3, max_tokens=120, sampling=Sampling(repeat_penalty=1.3)),
    Request(PROMPT[1:], max_tokens=130),
)
MAX_DIFFERENCE = 5e-4
MAX_QUANTISED = 0.3
CHOICES: dict[str, Any] = {
    "page_size_tokens": 16,
    "max_batch": 4,
    "prompt_chunk_tokens": 64,
    "threads": 1,
    "kv_type": "f32",
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is given back is overwritten, on either side."""
    monkeypatch.setenv("JITLLM_POISON", "1")


@asynccontextmanager
async def with_room(
    model: Path, room_bytes: int, *, devices: str = f"{CPU},{GPU}", **more: Any
) -> AsyncIterator[Loaded]:
    """Everything is on the GPU, which has so much room beside the model."""
    async with opened(model, devices=GPU, **CHOICES) as loaded:
        (use,) = (await loaded.engine.stats()).devices
    budget = use.scratch_bytes + use.placed_bytes + room_bytes
    choices = {"devices": f"{devices}={budget}", "placement": f"*={GPU}", **CHOICES, **more}
    async with opened(model, strict=True, **choices) as loaded:
        yield loaded


async def on_the_host(model: Path, requests: Sequence[Request]) -> list[Reply]:
    """Each alone."""
    async with opened(model, devices=CPU, **CHOICES) as loaded:
        return [await reply(loaded.engine, request) for request in requests]


def check(found: Sequence[Reply], expected: Sequence[Reply]) -> None:
    """Of F32 weights all is the same, within what two kinds of device differ by."""
    assert [reply.ids for reply in found] == [reply.ids for reply in expected]
    for got, want in zip(found, expected, strict=True):
        assert np.abs(got.logits - want.logits).max() <= MAX_DIFFERENCE


def check_quantised(found: Sequence[Reply], expected: Sequence[Reply]) -> None:
    """Activations are rounded to bytes: logits are in a band until another token is the likeliest
    one, which has the same history too."""
    for got, want in zip(found, expected, strict=True):
        assert len(got.ids) == len(want.ids)
        differ = (i for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)) if a != b)
        same = next(differ, len(want.ids))
        assert same >= min(len(want.ids), 16)
        rows = slice(0, same + 1)
        assert np.abs(got.logits[rows] - want.logits[rows]).max() <= MAX_QUANTISED


async def all_back(loaded: Loaded) -> EngineStats:
    """Once everything is on the GPU again."""
    while True:
        stats = await loaded.engine.stats()
        if stats.placement.devices == (GPU,) and stats.brought_back == stats.sent_home:
            return stats
        await asyncio.sleep(0.01)


async def test_blocks_go_home_one_by_one_and_come_back_after_a_short_request(
    tiny_model: TinyModel,
) -> None:
    """Blocks take half a megabyte, and keys and values of the long reply 460 KiB in each."""
    model = tiny_model("llama", "q8_0")
    expected = await on_the_host(model, [LONG, SHORT])
    async with with_room(model, 320 << 10) as loaded:
        found = await reply(loaded.engine, LONG)
        stats = await loaded.engine.stats()
        assert str(stats.placement) == f"0={GPU},1-2={CPU},head={GPU}"
        assert (stats.sent_home, stats.brought_back) == (2, 0)
        assert stats.steps == -(-len(LONG.prompt) // 64) + 60 - 1  # nothing was computed again
        short = await reply(loaded.engine, SHORT)
        stats = await all_back(loaded)
        assert (stats.sent_home, stats.brought_back) == (2, 2)
        again = await reply(loaded.engine, LONG)
        assert (await loaded.engine.stats()).devices[1].kv_bytes == 0
    check_quantised([found, short, again], [*expected, expected[0]])


@pytest.mark.parametrize("relocate", ["on", "off"])
async def test_many_replies_that_outgrow_it_together(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, relocate: str
) -> None:
    """They are promised little, and become long. Where no block goes home, some of them wait."""
    for module in (sequence, seats):
        monkeypatch.setattr(module, "MIN_PROMISED_TOKENS", 16)
    model = tiny_model("llama")
    expected = await on_the_host(model, MANY)
    async with with_room(model, 1 << 20, relocate=relocate) as loaded:
        found = await replies(loaded.engine, MANY)
        stats = await loaded.engine.stats()
    assert stats.steps < sum(len(reply.ids) for reply in found)  # they ran together
    assert (stats.sent_home > 0) == (relocate == "on")
    assert (stats.park_totals.slices > 0) == (relocate == "off")
    assert stats.losses == 0
    check(found, expected)


async def test_blocks_that_pass_through_do_so_again_when_they_are_back(
    tiny_model: TinyModel,
) -> None:
    model = tiny_model("llama", "q8_0")
    expected = await on_the_host(model, [LONG])
    async with with_room(model, -(200 << 10), placement=f"*={GPU}~") as loaded:
        found = await reply(loaded.engine, LONG)
        assert (await loaded.engine.stats()).sent_home > 0
        await reply(loaded.engine, SHORT)
        stats = await all_back(loaded)
    assert str(stats.placement) == f"0-2={GPU}~,head={GPU}"
    check_quantised([found], expected)


async def test_without_relocation_the_reply_ends_with_an_error_and_its_history_is_kept(
    tiny_model: TinyModel,
) -> None:
    """It names the ways out; others go on, and who continues what was said computes the rest."""
    model = tiny_model("llama", "q8_0")
    expected = await on_the_host(model, [LONG, SHORT])
    said: list[int] = []
    last = Delta()
    async with with_room(model, 900 << 10, relocate="off") as loaded:
        engine = loaded.engine
        others = asyncio.create_task(reply(engine, SHORT))
        async for delta in engine.generate(Request(PROMPT * 25, max_tokens=200)):
            said += delta.tokens
            last = delta
        assert isinstance(last.error, OutOfPages)
        for word in ("on vulkan:0 needs", "-relocate on", "vulkan:0=SIZE", "-vram SIZE"):
            assert word in str(last.error)
        check_quantised([await others], expected[1:])
        history = (*PROMPT * 25, *said)
        rest = [
            delta async for delta in engine.generate(Request(history[: len(history) // 16 * 16]))
        ]
        assert rest[-1].usage is not None
        stats = await engine.stats()
    assert said
    assert rest[-1].usage.cached_tokens >= len(history) // 16 * 16 - 16
    assert (stats.sent_home, stats.moves) == (0, 0)
    assert str(stats.placement) == f"0-2={GPU},head={GPU}"


async def test_a_seat_needs_room_too(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is none for what kernels read of a request, a block goes home before it runs."""
    model = tiny_model("llama")
    expected = await on_the_host(model, [SHORT])
    refusals = [OverBudget("history of a reply", 4 << 10, 0)]
    seat = VulkanRunner.seat

    def refusing(self: VulkanRunner, *args: Any, **more: Any) -> SeatMemory:
        if refusals:
            raise refusals.pop()
        return seat(self, *args, **more)

    monkeypatch.setattr(VulkanRunner, "seat", refusing)
    async with with_room(model, 1 << 20) as loaded:
        found = await reply(loaded.engine, SHORT)
        stats = await all_back(loaded)
    assert stats.sent_home == 1
    check([found], expected)


async def test_who_wants_no_fallback_gets_no_relocation_unasked(tiny_model: TinyModel) -> None:
    model = tiny_model("llama", "q8_0")
    async with with_room(model, 320 << 10, gpu_fallback=False) as loaded:
        with pytest.raises(OutOfPages, match="-relocate on"):
            await reply(loaded.engine, LONG)
        assert (await loaded.engine.stats()).moves == 0


@pytest.mark.parametrize(
    ("flag", "choices"),
    [
        ("-relocate on", {"relocate": "on"}),
        ("-gpu-grow", {"gpu_grow": True}),
        ("-tune-seam", {"tune_seam": True}),
    ],
)
async def test_without_a_host_it_cannot_be_asked_for(
    tiny_model: TinyModel, flag: str, choices: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=rf"{flag}: the host is not in -devices {GPU}; add cpu"):
        async with opened(tiny_model("llama"), devices=GPU, **choices):
            pass


async def test_blocks_go_to_the_device_one_by_one(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    requests = [Request(PROMPT * 4, max_tokens=120)]
    expected = await on_the_host(model, requests)
    choices: dict[str, Any] = {"placement": f"0={GPU}!,*={GPU}", "gpu_grow": True, **CHOICES}
    async with opened(model, devices=f"{CPU},{GPU}", move_share=0.99, **choices) as loaded:
        engine, found, places = loaded.engine, Reply(), []
        async for delta in engine.generate(replace(requests[0], logits=True)):
            found.add(delta)
            places.append(str((await engine.stats()).placement))
        stats = await all_back(loaded)
    assert places[0] == f"0={GPU}!,1-2={CPU},head={CPU}"
    assert f"0={GPU}!,1={GPU},2={CPU},head={GPU}" in places
    assert (stats.moves, stats.sent_home, stats.brought_back) == (2, 0, 0)
    check([found], expected)


async def test_a_seam_is_tried_while_replies_run(tiny_model: TinyModel) -> None:
    """Software is slower than the host, so what is tried is likely to stay; but it need not."""
    model = tiny_model("llama")
    requests = [Request(PROMPT, max_tokens=400)]
    expected = await on_the_host(model, requests)
    choices: dict[str, Any] = {"placement": f"*={GPU}", "tune_seam": True, **CHOICES}
    async with opened(model, devices=f"{CPU},{GPU}", move_share=0.99, **choices) as loaded:
        found = []
        while not (stats := await loaded.engine.stats()).seam_trials:
            found.append(await reply(loaded.engine, requests[0]))
    assert (stats.seam_trials[0].num_before, stats.seam_trials[0].num_blocks) == (3, 1)
    assert stats.moves >= 6
    check(found, expected * len(found))


@dataclass
class GpuSoak(Soak):
    """As long as ids are the same, logits are as near as they are between two kinds of device."""

    replies: list[Reply] = field(default_factory=list)

    async def reply_again_and_again(self, name: str) -> None:
        while not self.is_over:
            number = self.dice.randrange(len(SOAKED))
            asked = replace(SOAKED[number], name=name, logits=True)
            got, want = await one_reply(self.engine, asked), self.replies[number]
            differ = (i for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)) if a != b)
            rows = slice(0, next(differ, len(want.ids)) + 1)
            assert np.abs(got.logits[rows] - want.logits[rows]).max() <= MAX_DIFFERENCE
            self.counts["same"] += got.ids == want.ids
            self.counts["replies"] += 1

    async def run(self, num_blocks: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name in self.sessions:
                tasks.create_task(self.reply_again_and_again(name))
            tasks.create_task(self.park_and_resume())
            tasks.create_task(self.come_and_leave())
            await asyncio.sleep(SOAK_S)
            self.is_over = True


@pytest.mark.timeout(SOAK_S * 4 + 120)
async def test_blocks_go_and_come_while_much_else_happens(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sequence, seats):
        monkeypatch.setattr(module, "MIN_PROMISED_TOKENS", 16)
    model = tiny_model("llama")
    expected = await on_the_host(model, SOAKED)
    more: dict[str, Any] = {"kv_cache": str(tmp_path), "fairness": 50, "move_share": 0.9}
    async with with_room(model, 1 << 20, **more) as loaded:
        empty = (await loaded.engine.stats()).devices[1]
        names = tuple(f"session {number}" for number in range(4))
        soak = GpuSoak(loaded.engine, [], (), names, replies=expected)
        await soak.run(3)
        await reply(loaded.engine, LONG)  # for which a block goes, if none had to before
        await reply(loaded.engine, Request((1,), max_tokens=1))
        end = await all_back(loaded)
        print(f"{dict(soak.counts)}, {end.sent_home} blocks went home; {end.park_totals}")
        use = end.devices[1]
        assert os.listdir(tmp_path) == []
    assert soak.counts["replies"] >= len(names)
    assert soak.counts["same"] > soak.counts["replies"] * 3 // 4
    assert end.sent_home > 0
    assert (end.losses, end.park_totals.failures) == (0, 0)
    assert (end.running, end.waiting, end.parked, end.kv_bytes) == (0, 0, 0, 0)
    assert (use.placed, use.placed_bytes) == (empty.placed, empty.placed_bytes)
