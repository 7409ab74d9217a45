"""`jitllm verify` over real devices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from jitllm.cli import verify
from tests.cli.fake import Jitllm
from tests.conftest import TinyModel
from tests.ops.vulkan import needs_vulkan

SECOND = ("-devices", "cpu:0,cpu:1", "-placement", "*=cpu:1,head=cpu:1", "-threads", "2")


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


def test_a_second_cpu_has_the_same_bits_also_while_blocks_move(jitllm: Jitllm, model: Path) -> None:
    for more in ((), ("-migrate",)):
        found = jitllm("verify", model, *SECOND, "-n", "40", "-json", *more).json
        assert found["problem"] == ""
        assert found["dlogit"] == [0] * 40
        assert len(found["ids"]) == 40
        assert len(found["placements"]) >= 4 if more else found["placements"] == []


@pytest.mark.vulkan
@needs_vulkan
def test_a_gpu_agrees_also_while_blocks_move(jitllm: Jitllm, model: Path) -> None:
    flags = ("-devices", "vulkan:0", "-kv-type", "f32", "-n", "24", "-dlogit", "5e-4")
    done = jitllm("verify", model, *flags, "-migrate", "-prefill", "30", "Hello there")
    assert done.code == 0, done.err
    assert "24 positions   disagreements 0" in done.out
    assert "prompt of 30 at once and one by one: equal; twice the same: yes" in done.out
    places = [line for line in done.out.splitlines() if line.startswith("moved: ")]
    assert any("cpu:0" in line for line in places)
    assert any("vulkan:0" in line for line in places)


def test_a_device_that_took_nothing_is_a_failure(jitllm: Jitllm, model: Path) -> None:
    for flags in (("-devices", "cpu"), (*SECOND[:2], "-placement", "*=cpu:0,head=cpu:0")):
        done = jitllm("verify", model, *flags, "-n", "2")
        assert done.code == 1
        assert "no device but the CPU took a block" in done.err


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda row: [math.nan, *row[1:]], "not a number"),
        (lambda row: [max(row) + 1, *row[1:]], "another token is likeliest at 4 positions"),
        (lambda row: [row[0] - 0.5, *row[1:]], "a logit is off by 0.5"),
    ],
)
def test_a_device_that_disagrees_is_a_failure(
    jitllm: Jitllm, model: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, why: str
) -> None:
    add = verify.Agreement.add
    monkeypatch.setattr(verify.Agreement, "add", lambda self, at, a, b: add(self, at, a, spoil(b)))
    done = jitllm("verify", model, *SECOND, "-n", "4", "-dlogit", "0.1")
    assert done.code == 1
    assert why in done.err


@pytest.mark.parametrize(
    ("devices", "whole"),
    [
        ("vulkan:0", "vulkan:0,cpu:0"),
        ("gpu", "gpu,cpu:0"),
        ("cpu:1", "cpu:1,cpu:0"),
        ("far/cpu:0", "far/cpu:0,cpu:0"),
        ("vulkan:0,CPU", "vulkan:0,CPU"),
        ("auto", "auto"),
        ("all", "all"),
    ],
)
def test_blocks_have_a_cpu_to_move_to(devices: str, whole: str) -> None:
    assert verify._with_host(devices) == whole


def test_a_prompt_with_what_is_no_number_is_a_failure(
    jitllm: Jitllm, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = verify._logits

    async def spoilt(*args: Any) -> list[Any]:
        return [[math.nan, *row[1:]] for row in await logits(*args)]

    monkeypatch.setattr(verify, "_logits", spoilt)
    done = jitllm("verify", model, *SECOND, "-n", "4", "-prefill", "6")
    assert done.code == 1
    assert "a logit of position 0 of a prompt is not a number" in done.err


def test_a_device_with_nothing_but_the_head_is_compared(jitllm: Jitllm, model: Path) -> None:
    flags = (*SECOND[:2], "-placement", "*=cpu:0,head=cpu:1", "-threads", "2", "-n", "4")
    found = jitllm("verify", model, *flags, "-json").json
    assert found["devices"] == ["cpu:1: 0 blocks + head"]
    assert found["dlogit"] == [0] * 4


@pytest.mark.parametrize(
    "flags",
    [("-n", "0"), ("-prefill", "-1"), ("-dlogit", "-0.5"), ("-dlogit", "nan"), ("-dlogit", "inf")],
)
def test_nothing_to_compare_is_a_wrong_command_line(
    jitllm: Jitllm, model: Path, flags: tuple[str, ...]
) -> None:
    assert jitllm("verify", model, *flags).code == 2
