"""`jitllmd place` and `stats`: what they ask a server, what they say, and what they refuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from jitllm.api.app import create_app
from jitllm.cli.daemon.main import main
from jitllm.remote import ServerError
from jitllm.schedule.placement import Decline
from tests.api.fake import FakeEngine, FakeModels, served

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> list[tuple[str, Any]]:
    """A server that needs no socket; what was asked of it."""
    app, asked = create_app(FakeModels(served(engine))), []

    async def call(method: str, path: str, body: Any = None) -> Any:
        asked.append((f"{method} {path}", body))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            reply = await client.request(method, f"/jitllm/v1/{path}", json=body)
        if reply.status_code >= 400:
            raise ServerError(reply.status_code, reply.json()["error"]["message"])
        return reply.json()

    def get(server: object, path: str, **query: object) -> Any:
        if path.startswith("sessions/"):
            return {"model": "fake"}
        return asyncio.run(call("GET", path))

    def post(server: object, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return asyncio.run(call("POST", path, body))

    monkeypatch.setattr("jitllm.cli.daemon.remote.Server.get", get)
    monkeypatch.setattr("jitllm.cli.daemon.remote.Server.post", post)
    return asked


def place(capsys: Capture, *args: str) -> str:
    assert main(["place", "-model", "fake", *args]) == 0
    out: str = capsys.readouterr().out
    return out


def test_a_report_has_runs_devices_and_what_is_not_so(capsys: Capture, engine: FakeEngine) -> None:
    asyncio.run(engine.place("1-2=cpu:1!"))
    engine.declines = (Decline("9=cpu:1", "the model has blocks 0 to 3"),)
    lines = place(capsys).splitlines()
    cells = [line.split() for line in lines]
    assert "placement 0=cpu:0,1-2=cpu:1!,3=cpu:0,head=cpu:0   epoch 1" in lines
    assert ["1-2", "cpu:1", "2.00", "MiB", "pinned"] in cells
    assert ["head", "cpu:0", "1.00", "MiB"] in cells
    [device] = [line for line in lines if line.startswith("cpu:0 ")]
    assert device.split()[1:7] == ["1", "2", "+", "head", "2", "of"]
    assert "16 tokens" in device
    assert "* not so: 9=cpu:1: the model has blocks 0 to 3" in lines
    assert any(line.startswith("moves 1 ") for line in lines)


def test_a_session_is_placed_by_its_model(capsys: Capture) -> None:
    assert main(["place", "-session", "chatcmpl-1"]) == 0
    assert capsys.readouterr().out == place(capsys)


def test_a_move_says_what_it_took(capsys: Capture, near: list[Any]) -> None:
    first, *_ = place(capsys, "-move", "0:2,head", "-to", "cpu:1").splitlines()
    assert near == [("POST models/fake/placement", {"move": {"blocks": "0:2,head", "to": "cpu:1"}})]
    for said in (
        "to cpu:1   pause 2.50 ms   prepared in 500 ms",
        "history 3.00 MiB before, 1.00 KiB in the pause, 12 pages",
        "weights 1.00 MiB (1 from frames)",
        "7 tokens meanwhile",
    ):
        assert said in first


def test_a_map_is_gone_to(capsys: Capture) -> None:
    out = place(capsys, "-placement", "*=cpu:1,head=host", "-strict")
    assert "placement 0-3=cpu:1,head=cpu:0   epoch 1" in out
    assert out.startswith("moved blocks 0-3 to cpu:1")


def test_as_json_it_is_what_the_server_says(capsys: Capture) -> None:
    said = json.loads(place(capsys, "-move", "0", "-to", "cpu:1", "-json"))
    assert said["placement"] == "0=cpu:1,1-3=cpu:0,head=cpu:0"
    assert said["moved"][0]["pause_s"] == 0.0025


def test_a_lost_device_is_named(capsys: Capture, engine: FakeEngine) -> None:
    engine.lost = ("cpu:1",)
    assert "* LOST cpu:1: others compute its blocks\n" in place(capsys)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-move", "0:2"], "-move needs -to"),
        (["-to", "cpu:1"], "-to needs -move"),
        (["-move", "2:1", "-to", "cpu:1"], "-move '2:1' is empty"),
        (["-move", "x", "-to", "cpu:1"], "names no blocks"),
        (["-placement", "x"], "is no BLOCKS=DEVICE"),
        (["-placement", "0=cpu:0~"], "nothing to stream into"),
        (["-strict"], "-strict is about a -placement"),
        (["-move", "0", "-to", "cpu:1", "-placement", "0=cpu:1"], "give one of them"),
        (["-move", "0", "-to", "cpu:1", "-maxmem", "1G"], "give one of them"),
        (["-maxmem", "much"], "-maxmem 'much' is not a size"),
        (["-session", "s"], "give one of -model and -session"),
    ],
)
def test_a_command_line_that_means_nothing_asks_nobody(
    args: list[str], said: str, capsys: Capture, near: list[Any]
) -> None:
    assert main(["place", "-model", "fake", *args]) == 2
    assert said in capsys.readouterr().err
    assert near == []


def test_without_a_model_it_asks_for_one(capsys: Capture) -> None:
    assert main(["place"]) == 2
    assert "give one of -model and -session" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-move", "0", "-to", "cpu:7"], "cpu:7 is not attached"),
        (["-move", "9", "-to", "cpu:1"], "the model has blocks 0 to 3"),
        (["-move", "0", "-to", "cpu:0"], "on cpu:0 already"),
        (["-placement", "9=cpu:1", "-strict"], "the model has blocks 0 to 3"),
    ],
)
def test_what_a_server_refuses_is_said(args: list[str], said: str, capsys: Capture) -> None:
    assert main(["place", "-model", "fake", *args]) == 1
    assert said in capsys.readouterr().err


def test_stats_have_a_line_for_each_device_and_one_for_moves(
    capsys: Capture, engine: FakeEngine
) -> None:
    assert main(["stats"]) == 0
    assert "\nmoves " not in capsys.readouterr().out
    asyncio.run(engine.move([0, 1], "cpu:1"))
    assert main(["stats"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("cpu:")] == ["cpu:0", "cpu:1"]
    assert any(line.startswith("moves 1   of 2 blocks   pauses 2.50 ms") for line in lines)
