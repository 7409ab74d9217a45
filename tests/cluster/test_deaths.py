"""Device processes are killed at named points, also in the middle of moves: not a bit changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.cluster import Cluster
from jitllm.compose import Loaded
from jitllm.errors import JitllmError
from tests.cluster.mortal import Plan, mortal
from tests.cluster.test_engine import on_ray
from tests.cluster.test_moves import (
    CHOICES,
    FIRST,
    REQUESTS,
    SECOND,
    Bits,
    in_peace,
    one_reply,
    replying,
)
from tests.conftest import TinyModel
from tests.models.native import opened

SPLIT = "0-2=cpu:0,*=cpu:1"
POINTS = {
    "queued": (SPLIT, "device cpu:0|Open|before"),
    "prompt": (SPLIT, "device cpu:1|Step|before"),
    "decode": (SPLIT, "device cpu:0|Step|after"),
    "decode-ahead": ("*=cpu:0", "device cpu:0|Steps|after"),
    "prepare-room": ("*=cpu:0", "device cpu:1|Prepare|after"),
    "prepare-source": ("*=cpu:0", "device cpu:0|Pack|before"),
    "prepare-weights": ("*=cpu:0", "device cpu:1|Bring|before"),
    "prepare-history": ("*=cpu:0", "device cpu:1|Unpack|after"),
    "hand-over-source": ("*=cpu:0", "device cpu:0|Hand|after"),
    "hand-over": ("*=cpu:0", "device cpu:1|Adopt|after"),
}
PARKED_POINTS = {
    "park": "device cpu:1|Pack|after",
    "parked": "device cpu:0|Step|after",
    "resume": "device cpu:1|Restore|after",
    "resume-first": "device cpu:0|Restore|before",
}
QUICK = ("decode", "prepare-history", "hand-over")


async def killed_at(loaded: Loaded, point: str, plan: Plan, expected: list[Bits]) -> None:
    """A death at a point, which no reply shows; the model goes on."""
    engine, (placement, message) = loaded.engine, POINTS[point]
    await engine.place(f"{placement},head={placement[-5:]}")
    losses = (await engine.stats()).losses
    if point == "queued":
        plan.order(message)
    if point == "decode-ahead":  # which is for those who want no logits
        plan.order(message)
        assert await one_reply(engine, REQUESTS[3]) == expected[3]
    async with replying(engine, expected):
        if point in ("prompt", "decode"):
            plan.order(message)
        elif "-" in point and point != "decode-ahead":
            plan.order(message)
            with pytest.raises(JitllmError, match="lost"):
                await engine.move(range((await engine.stats()).placement.num_blocks), SECOND)
    assert not plan.is_open, f"nobody died at {point}"
    stats = await engine.stats()
    is_guest = message.startswith("device cpu:1") and placement != SPLIT
    assert stats.losses - losses == (not is_guest), point
    assert is_guest or stats.recovery_s > 0
    assert (stats.running, stats.kv_bytes, stats.lost) == (0, 0, ())


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(QUICK, id="some"),
        pytest.param(tuple(POINTS), id="all", marks=pytest.mark.slow),
    ],
)
async def test_a_device_that_is_killed_changes_no_reply(
    cluster: Cluster,
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    points: tuple[str, ...],
) -> None:
    plan = Plan(tmp_path / "plan")
    expected = await in_peace(tiny_model("gemma3", "q8_0"))
    monkeypatch.setattr("jitllm.compose.DeviceRecipe", mortal(plan))
    async with on_ray(tiny_model("gemma3", "q8_0"), **CHOICES) as loaded:
        for point in points:
            await killed_at(loaded, point, plan, expected)
        async with replying(loaded.engine, expected):
            for to in (SECOND, FIRST):
                await loaded.engine.place(f"*={to},head={to}")


PATIENT = replace(REQUESTS[0], max_tokens=400, name="patient")


async def parked_at(loaded: Loaded, point: str, plan: Plan, expected: Bits, other: Bits) -> None:
    """A death around a request that is parked: it goes on, and what was parked is not computed
    again."""
    engine, name = loaded.engine, PATIENT.name
    losses = (await engine.stats()).losses
    has_begun = asyncio.Event()
    task = asyncio.create_task(one_reply(engine, PATIENT, has_begun))
    await has_begun.wait()
    if point == "park":
        plan.order(PARKED_POINTS[point])
    [parked] = await engine.park(name, "memory" if point == "parked" else "disk")
    assert (parked.parked_bytes > 0) == (point != "park")
    if point != "park":
        plan.order(PARKED_POINTS[point])
    if point == "parked":
        assert await one_reply(engine, REQUESTS[1]) == other
    before = (await engine.stats()).steps
    await engine.resume(name)
    assert await task == expected
    assert not plan.is_open, f"nobody died at {point}"
    stats = await engine.stats()
    assert stats.losses - losses == 1
    assert (stats.running, stats.kv_bytes, stats.lost) == (0, 0, ())
    assert stats.parked_disk_bytes == stats.parked_memory_bytes == 0
    if point != "park":
        assert stats.steps - before == 400 - parked.generated_tokens


@pytest.mark.slow
async def test_a_request_outlives_the_devices_that_it_is_parked_of(
    cluster: Cluster, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(tmp_path / "plan")
    expected = await in_peace(tiny_model("gemma3", "q8_0"))
    async with opened(tiny_model("gemma3", "q8_0"), threads=1) as embedded:
        patient = await one_reply(embedded.engine, PATIENT)
    monkeypatch.setattr("jitllm.compose.DeviceRecipe", mortal(plan))
    choices: dict[str, Any] = {
        "placement": f"{SPLIT},head=cpu:1",
        "kv_cache": str(tmp_path),
        "share_prefixes": False,  # nothing is to be had but from where it was parked
    }
    async with on_ray(tiny_model("gemma3", "q8_0"), **CHOICES, **choices) as loaded:
        for point in PARKED_POINTS:
            await parked_at(loaded, point, plan, patient, expected[1])
        async with replying(loaded.engine, expected):
            await loaded.engine.place(f"*={SECOND},head={SECOND}")
