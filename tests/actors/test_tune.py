"""Fewer blocks are tried on a device while replies run, and stay so where that is faster."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from actors.messages.device import Step
from actors.messages.scheduler import SchedulerStatsRequest
from jitllm.engine import Request, SchedulerStats
from jitllm.schedule.seam_trial import SeamTrial, judge, seams
from tests.actors.movable_device import A, B, MovableDevice, moving, reply_to
from tests.actors.test_scheduler import all_of, tokens

CARD = B
REPLY = Request((1, 2, 3), max_tokens=100)


class Machine:
    """A clock that steps move on: seconds for each block, by the device that computes it."""

    def __init__(self, seconds: dict[str, float], noise: Callable[[], float]) -> None:
        self.now_s = 0.0
        self._seconds = seconds
        self._noise = noise

    def on_step(self, device: MovableDevice, step: Step) -> None:
        """A device computes a leg."""
        num_blocks = step.stop - step.start
        self.now_s += self._seconds[device.name] * num_blocks * self._noise()


async def tuned(
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[str, float],
    noise: Callable[[], float] = lambda: 1.0,
) -> SchedulerStats:
    """After so many replies that nothing is tried any more."""
    machine = Machine(seconds, noise)
    clock = SimpleNamespace(perf_counter=lambda: machine.now_s)
    monkeypatch.setattr("actors.stepper.time", clock)
    async with moving(placement="1111", with_memory=[CARD], tunes=True, page_tokens=0) as scene:
        for device in scene.devices.values():
            device.on_step = machine.on_step
        for _ in range(16):
            assert tokens(await all_of(scene.client, REPLY)) == reply_to(REPLY)
        stats: SchedulerStats = await scene.scheduler.ask(SchedulerStatsRequest())
        scene.check()
    return stats


async def test_a_slow_device_gives_its_blocks_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = await tuned(monkeypatch, {A: 0.1, CARD: 0.3})
    assert [(t.num_before, t.num_blocks, t.is_adopted) for t in stats.seam_trials] == [
        (3, 1, True),
        (1, 0, True),
    ]
    # Three blocks of 0.3 s, against one of them and two of 0.1 s, against three of those
    gains = [round(trial.gain, 6) for trial in stats.seam_trials]
    assert gains == [round(0.9 / 0.5, 6), round(0.5 / 0.3, 6)]
    assert str(stats.placement) == f"0-2={A},head={A}"


@pytest.mark.parametrize("host_s", [0.3, 0.1, 0.096])
async def test_what_is_not_faster_by_a_twentieth_goes_back(
    monkeypatch: pytest.MonkeyPatch, host_s: float
) -> None:
    stats = await tuned(monkeypatch, {A: host_s, CARD: 0.1})
    assert [trial.is_adopted for trial in stats.seam_trials] == [False]
    assert str(stats.placement) == f"0-2={CARD},head={CARD}"
    assert stats.moves == 6  # to the seam that is tried and back, three times


async def test_what_cannot_be_told_from_noise_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(1)
    speeds = [1.0]

    def noise() -> float:
        if dice.random() < 0.02:
            speeds.append(dice.choice((0.3, 1.0, 3.0)))
        return speeds[-1]

    stats = await tuned(monkeypatch, {A: 0.1, CARD: 0.2}, noise)
    assert stats.seam_trials
    assert not stats.seam_trials[-1].is_adopted
    assert stats.seam_trials[-1].spread > 0.1


async def test_whoever_moves_blocks_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({A: 0.1, CARD: 0.3}, lambda: 1.0)
    clock = SimpleNamespace(perf_counter=lambda: machine.now_s)
    monkeypatch.setattr("actors.stepper.time", clock)
    async with moving(placement="1111", with_memory=[CARD], tunes=True, page_tokens=0) as scene:
        for device in scene.devices.values():
            device.on_step = machine.on_step
        await all_of(scene.client, REPLY)
        await scene.client.place(f"0-2={CARD},head={CARD}")
        for _ in range(12):
            assert tokens(await all_of(scene.client, REPLY)) == reply_to(REPLY)
        stats = await scene.scheduler.ask(SchedulerStatsRequest())
        assert stats.seam_trials == ()
        assert str(stats.placement) == f"0-2={CARD},head={CARD}"
        scene.check()


def test_the_verdict_is_about_the_median_and_the_middle_half() -> None:
    assert judge(CARD, 4, 8, [1.06] * 6).is_adopted
    assert not judge(CARD, 4, 8, [1.05] * 6).is_adopted
    assert not judge(CARD, 4, 8, [1.06, 1.06, 1.06, 1.2, 1.2, 1.2]).is_adopted
    trial = judge(CARD, 4, 8, [1.0, 1.1, 1.2, 1.3, 9.0])
    assert (trial.gain, trial.spread) == (1.2, pytest.approx(0.2 / 1.2))
    assert str(SeamTrial("vulkan:0", 4, 8, 1.2, 0.02)).endswith("it stays so")


def test_seams_are_all_a_half_a_quarter_and_none() -> None:
    assert seams(18) == (18, 9, 4, 0)
    assert seams(3) == (3, 1, 0)
    assert seams(1) == (1, 0)
