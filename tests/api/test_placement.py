"""Moves and maps through the control plane: the report, every refusal, and what stays the same."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from jitllm.api.health import Pulse
from jitllm.schedule.placement import Decline
from tests.api.conftest import until
from tests.api.fake import FakeEngine, FakeModels, served

PATH = "/jitllm/v1/models/fake/placement"


async def placed(client: httpx.AsyncClient, **body: Any) -> Any:
    reply = await client.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_a_report_says_where_everything_is(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await engine.place("1=cpu:1!,3=cpu:1")
    engine.declines = (Decline("9=cpu:1", "the model has blocks 0 to 3"),)
    said = (await client.get(PATH)).json()
    assert said["placement"] == "0=cpu:0,1=cpu:1!,2=cpu:0,3=cpu:1,head=cpu:0"
    assert said["epoch"] == 1
    assert [(run["what"], run["device"], run["pinned"]) for run in said["runs"]] == [
        ("0", "cpu:0", False),
        ("1", "cpu:1", True),
        ("2", "cpu:0", False),
        ("3", "cpu:1", False),
        ("head", "cpu:0", False),
    ]
    assert {run["weight_bytes"] for run in said["runs"]} == {1 << 20}
    assert [(d["name"], d["blocks"], d["has_head"]) for d in said["devices"]] == [
        ("cpu:0", 2, True),
        ("cpu:1", 2, False),
    ]
    assert said["devices"][1]["kv_pages"] == 6
    assert said["declines"] == [{"what": "9=cpu:1", "reason": "the model has blocks 0 to 3"}]
    assert said["last_move"] == {**said["last_move"], "pages": 12, "to": "cpu:1"}
    assert (said["moved"], said["lost"], said["moves"]) == ([], [], 1)


@pytest.mark.parametrize(
    ("blocks", "placement"),
    [
        ("0:2", "0-1=cpu:1,2-3=cpu:0,head=cpu:0"),
        ("0,2-3", "0=cpu:1,1=cpu:0,2-3=cpu:1,head=cpu:0"),
        ("1,head", "0=cpu:0,1=cpu:1,2-3=cpu:0,head=cpu:1"),
    ],
)
async def test_a_move_answers_with_what_it_took(
    client: httpx.AsyncClient, blocks: str, placement: str
) -> None:
    said = await placed(client, move={"blocks": blocks, "to": "cpu:1"})
    assert said["placement"] == placement
    [moved] = said["moved"]
    assert moved == said["last_move"]
    assert set(moved) == {
        *("blocks", "to", "placement", "epoch", "pause_s", "prepare_s", "bytes_before"),
        *("bytes_paused", "weight_bytes", "weights_from", "pages", "rounds", "tokens_meanwhile"),
    }
    assert said["move_totals"]["pause_s"] == moved["pause_s"]
    assert said["moves"] == 1


async def test_a_map_is_gone_to_and_what_cannot_be_is_declined(client: httpx.AsyncClient) -> None:
    said = await placed(client, placement="0-1=cpu:1!,7=cpu:1")
    assert said["placement"] == "0-1=cpu:1!,2-3=cpu:0,head=cpu:0"
    assert [decline["what"] for decline in said["declines"]] == ["7=cpu:1"]
    assert len(said["moved"]) == 1
    refused = await client.post(PATH, json={"placement": "0=cpu:0,7=cpu:1", "strict": True})
    assert refused.status_code == 409
    assert (await client.get(PATH)).json()["placement"] == said["placement"]


@pytest.mark.parametrize(
    ("body", "status", "param", "why"),
    [
        ({}, 400, "maxmem", "give one of them"),
        ({"maxmem": 1, "placement": "0=cpu:1"}, 400, "maxmem", "give one of them"),
        ({"strict": True, "maxmem": 1}, 400, "strict", "about a placement"),
        ({"move": {"blocks": "0:2"}}, 400, "move.to", "required"),
        ({"move": {"to": "cpu:1"}}, 400, "move.blocks", "required"),
        ({"move": {"blocks": "2:0", "to": "cpu:1"}}, 400, "move.blocks", "is empty"),
        ({"move": {"blocks": "a", "to": "cpu:1"}}, 400, "move.blocks", "names no blocks"),
        ({"move": {"blocks": "0", "to": "tpu"}}, 400, "move", "tpu"),
        ({"move": {"blocks": "0", "to": "cpu:7"}}, 409, "move", "cpu:7 is not attached"),
        ({"move": {"blocks": "4", "to": "cpu:1"}}, 409, "move", "the model has blocks 0 to 3"),
        ({"move": {"blocks": "0", "to": "cpu:0"}}, 409, "move", "on cpu:0 already"),
        ({"move": {"blocks": "3", "to": "cpu:1"}}, 409, "move", "pinned"),
        ({"move": "0:2"}, 400, "move", "dictionary"),
        ({"placement": "x"}, 400, "placement", "is no BLOCKS=DEVICE"),
        ({"placement": "0=cpu:1,0=cpu:0"}, 400, "placement", "names block 0 twice"),
        ({"placement": "0=cpu:7"}, 409, "placement", "cpu:7 is not attached"),
        ({"placement": ""}, 400, "placement", "at least 1"),
        ({"place": "0=cpu:1"}, 400, "place", "no field"),
    ],
)
async def test_what_cannot_be_is_refused_and_changes_nothing(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    body: dict[str, Any],
    status: int,
    param: str,
    why: str,
) -> None:
    await engine.place("3=cpu:0!")
    before = (await client.get(PATH)).json()
    refused = await client.post(PATH, json=body)
    assert refused.status_code == status, refused.text
    error = refused.json()["error"]
    assert error["param"] == param
    assert why in error["message"]
    assert (await client.get(PATH)).json() == before


async def test_a_model_that_there_is_not_moves_nowhere(client: httpx.AsyncClient) -> None:
    body = {"move": {"blocks": "0", "to": "cpu:1"}}
    reply = await client.post("/jitllm/v1/models/no/placement", json=body)
    assert reply.status_code == 404
    assert reply.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    "body", [{"move": {"blocks": "0", "to": "cpu:1"}}, {"placement": "*=cpu:1"}, {"maxmem": 1}]
)
async def test_a_model_that_is_being_unloaded_refuses(
    client: httpx.AsyncClient, app: FastAPI, models: FakeModels, body: dict[str, Any]
) -> None:
    before = (await client.get(PATH)).json()
    with app.state.service.leaving(models.list()[0]):
        refused = await client.post(PATH, json=body)
        assert refused.status_code == 409
        assert refused.json()["error"]["message"] == "fake is being unloaded"
        assert (await client.delete("/jitllm/v1/models/fake")).status_code == 409
    assert (await client.get(PATH)).json() == before
    await placed(client, **body)


async def test_a_move_that_an_unload_overtakes_says_so(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.move_gate = asyncio.Event()
    body = {"move": {"blocks": "0", "to": "cpu:1"}}
    move = asyncio.create_task(client.post(PATH, json=body))
    await until(lambda: engine.move_waiting)
    assert (await client.delete("/jitllm/v1/models/fake")).status_code == 200
    engine.move_gate.set()
    refused = await move
    assert refused.status_code == 409
    assert refused.json()["error"]["message"] == "fake was unloaded"


async def test_moves_are_metrics(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for blocks in ("0:2", "2"):
        await placed(client, move={"blocks": blocks, "to": "cpu:1"})
    engine.losses, engine.sent_home, engine.brought_back = 3, 5, 4
    page = (await client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    expected = {
        'jitllm_moves_total{model="fake"}': 2,
        'jitllm_moved_blocks_total{model="fake"}': 4,
        'jitllm_blocks_sent_home_total{model="fake"}': 5,
        'jitllm_blocks_brought_back_total{model="fake"}': 4,
        'jitllm_move_pause_seconds_count{model="fake"}': 2,
        'jitllm_move_pause_seconds_sum{model="fake"}': 0.005,
        'jitllm_move_prepare_seconds_sum{model="fake"}': 1.0,
        'jitllm_move_bytes_total{model="fake",phase="before"}': 6 << 20,
        'jitllm_move_bytes_total{model="fake",phase="paused"}': 2 << 10,
        'jitllm_move_pages_total{model="fake"}': 24,
        'jitllm_device_blocks{device="cpu:0",model="fake"}': 1,
        'jitllm_device_blocks{device="cpu:1",model="fake"}': 3,
        'jitllm_device_kv_bytes{device="cpu:1",model="fake"}': 3 << 20,
        'jitllm_device_losses_total{model="fake"}': 3,
    }
    assert {name: float(values[name]) for name in expected} == expected


async def test_a_lost_device_is_degraded_and_not_dead(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.losses, engine.lost = 4, ("cpu:1",)
    reply = await client.get("/healthz")
    assert reply.status_code == 200
    assert reply.json()["status"] == "degraded"
    state = reply.json()["models"]["fake"]
    assert state == "degraded: cpu:1 was lost; blocks are at 0-3=cpu:0,head=cpu:0"
    assert (await client.get(PATH)).json()["lost"] == ["cpu:1"]
    engine.is_dead = True
    assert (await client.get("/healthz")).json()["status"] == "failing"


async def test_a_device_that_came_back_leaves_a_model_whole(engine: FakeEngine) -> None:
    engine.losses = 1
    assert await Pulse(5, 60).state(served(engine)) == "ok"


async def test_the_document_says_what_a_placement_is(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert {"PlacementReply", "Run", "DeviceUse", "Moved", "MoveTotals", "Decline"} <= set(schemas)
    for kind in ("Moved", "DeviceUse", "MoveTotals", "PlacementReply"):
        assert all(
            {"type", "$ref", "anyOf"} & set(field) for field in schemas[kind]["properties"].values()
        )
