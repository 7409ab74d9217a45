"""The control plane, health and metrics."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from jitllm.api import control
from jitllm.api.health import Pulse
from tests.api.conftest import Caller, until
from tests.api.fake import FakeEngine, FakeModels, served

TEXT = {"model": "fake", "prompt": "Hi", "temperature": 0}
API = "/jitllm/v1"


async def test_models_are_listed_and_described(client: httpx.AsyncClient) -> None:
    [model] = (await client.get(f"{API}/models")).json()["models"]
    assert (model["id"], model["arch"], model["blocks"]) == ("fake", "fake", 4)
    assert model["weight_bytes"] == 5 << 20
    described = (await client.get(f"{API}/models/fake")).json()
    assert described["stats"]["pages"]["frames"] == 4
    assert described["config"] == {"attention.head_count": 4}
    assert (await client.get(f"{API}/models/no")).status_code == 404


async def test_models_are_loaded_and_unloaded(
    client: httpx.AsyncClient, models: FakeModels
) -> None:
    body = {"path": "/m/second.jlm", "id": "second/one"}
    loaded = await client.post(f"{API}/models", json=body)
    assert loaded.status_code == 201
    assert loaded.json()["path"] == "/m/second.jlm"
    assert (await client.post(f"{API}/models", json=body)).status_code == 400
    reply = await client.post("/v1/completions", json=TEXT | {"model": "second/one"})
    assert reply.status_code == 200
    engine: Any = models.loaded["second/one"].engine
    gone = await client.delete(f"{API}/models/second/one")
    assert gone.json() == {"id": "second/one", "unloaded": True}
    assert engine.is_closed
    assert (await client.delete(f"{API}/models/second/one")).status_code == 404


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("path", {}),
        ("path", {"path": "/m/nowhere"}),
        ("path", {"path": "/m/\0.jlm"}),
        ("maxmem", {"path": "/m/x.jlm", "maxmem": "a lot"}),
        ("maxmem", {"path": "/m/x.jlm", "maxmem": -1}),
        ("ctx", {"path": "/m/x.jlm", "ctx": 0}),
        ("kv_type", {"path": "/m/x.jlm", "kv_type": "f8"}),
    ],
)
async def test_a_bad_load_names_the_field(
    client: httpx.AsyncClient, field: str, body: dict[str, Any]
) -> None:
    reply = await client.post(f"{API}/models", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


async def test_a_model_in_use_is_not_unloaded(
    client: httpx.AsyncClient, call: Caller, engine: FakeEngine
) -> None:
    engine.gate, engine.free = asyncio.Event(), 1
    request = call("/v1/completions", TEXT)
    task = request.start()
    await until(lambda: engine.running)
    refused = await client.delete(f"{API}/models/fake")
    assert refused.status_code == 409
    assert "by 1 request;" in refused.json()["error"]["message"]
    assert not engine.is_closed
    done = await client.delete(f"{API}/models/fake", params={"force": "true"})
    assert done.status_code == 200
    await task
    assert request.messages[0]["status"] == 200
    assert engine.is_closed


async def test_a_model_that_others_use_is_not_unloaded(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_IDLE_TIMEOUT_S", 0.05)
    engine.running = 1  # of nobody who came through this server
    refused = await client.delete(f"{API}/models/fake")
    assert refused.status_code == 409
    assert "in use by other programs; drain it" in refused.json()["error"]["message"]
    assert not engine.is_closed
    unloading = asyncio.create_task(client.delete(f"{API}/models/fake"))
    await asyncio.sleep(0)
    engine.running = 0
    assert (await unloading).status_code == 200
    assert engine.is_closed


async def test_a_dead_model_is_unloaded(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_dead = True
    assert (await client.delete(f"{API}/models/fake")).status_code == 200


@pytest.mark.parametrize("name", ["fake", "also"])
async def test_a_model_that_drains_takes_no_more_requests(
    client: httpx.AsyncClient, models: FakeModels, engine: FakeEngine, name: str
) -> None:
    models.loaded["fake"] = replace(models.loaded["fake"], aliases=("also",))
    drained = await client.post(f"{API}/models/{name}/drain", json={})
    assert drained.json() == {"id": "fake", "draining": True}
    for stream in (False, True):
        refused = await client.post("/v1/completions", json=TEXT | {"stream": stream})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) > 0
    again = await client.post(f"{API}/models/{name}/drain", json={"draining": False})
    assert again.json() == {"id": "fake", "draining": False}
    assert (await client.post("/v1/completions", json=TEXT)).status_code == 200
    assert (await client.post(f"{API}/models/no/drain", json={})).status_code == 404


async def test_a_model_elsewhere_in_the_cluster_is_listed_and_drains_before_an_alias(
    client: httpx.AsyncClient, models: FakeModels, engine: FakeEngine
) -> None:
    assert (await client.get(f"{API}/models")).json()["cluster"] == []
    models.elsewhere["theirs"] = False
    models.loaded["fake"] = replace(models.loaded["fake"], aliases=("theirs",))
    [listed] = (await client.get(f"{API}/models")).json()["cluster"]
    assert (listed["id"], listed["is_here"]) == ("theirs", False)
    assert (await client.post(f"{API}/models/theirs/drain", json={})).status_code == 200
    assert models.elsewhere == {"theirs": True}
    assert not engine.is_draining


async def test_a_budget_is_changed_live(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    path = f"{API}/models/fake/placement"
    assert (await client.get(path)).json()["pages"]["budget_bytes"] == 64 << 20
    for maxmem in ("200M", 200 << 20):
        placed = await client.post(path, json={"maxmem": maxmem})
        assert placed.json()["pages"]["budget_bytes"] == 200 << 20
    for maxmem in ("lots", -5, 2**64, None, 1.5):
        refused = await client.post(path, json={"maxmem": maxmem})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "maxmem"


async def test_stats_and_devices(client: httpx.AsyncClient) -> None:
    stats = (await client.get(f"{API}/stats")).json()
    assert stats["server"]["sessions"] == 0
    assert stats["models"][0]["tier"] == "plain"
    assert (await client.get(f"{API}/devices")).json()["devices"][0]["name"] == "cpu:0"


async def test_sessions_can_be_asked_by_model(client: httpx.AsyncClient) -> None:
    assert (await client.get(f"{API}/sessions", params={"model": "fake"})).status_code == 200
    assert (await client.get(f"{API}/sessions", params={"model": "no"})).status_code == 404
    assert (await client.get(f"{API}/sessions/no")).status_code == 404


async def test_metrics_count_requests_and_show_engines(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.cached_tokens = 2
    await client.post("/v1/completions", json=TEXT | {"n": 2})
    reply = await client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    values = dict(
        line.rsplit(" ", 1) for line in reply.text.splitlines() if not line.startswith("#")
    )
    label = '{model="fake"}'
    expected = {
        "jitllm_models_loaded": 1,
        "jitllm_sessions": 0,
        f"jitllm_generates_total{label}": 2,
        f"jitllm_tokens_generated_total{label}": 24,
        f"jitllm_tokens_prefilled_total{label}": 6,
        f"jitllm_prompt_positions_restored_total{label}": 4,
        f"jitllm_prompt_positions_computed_total{label}": 2,
        f"jitllm_requests_in_flight{label}": 0,
        f"jitllm_prefill_seconds_count{label}": 2,
        f"jitllm_prefill_seconds_sum{label}": 0.5,
        f"jitllm_decode_seconds_sum{label}": 1,
        f"jitllm_host_resident_bytes{label}": 5 << 20,
        f"jitllm_page_budget_bytes{label}": 64 << 20,
        f"jitllm_page_ins_total{label}": 4,
        f"jitllm_page_read_bytes_total{label}": 4 << 20,
        f"jitllm_steps_total{label}": engine.steps,
    }
    assert {name: float(values[name]) for name in expected} == expected


async def test_health_fails_with_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for path in ("/healthz", "/health"):
        said = (await client.get(path)).json()
        assert said == {"status": "ok", "models": {"fake": "ok"}, "notes": []}
    engine.is_dead = True
    reply = await client.get("/healthz")
    assert reply.status_code == 503
    assert reply.json()["models"]["fake"] == "dead: the scheduler is gone"
    assert (await client.get("/metrics")).status_code == 200
    assert (await client.get(f"{API}/stats")).json()["models"] == []


async def test_an_engine_with_work_and_no_steps_is_stuck() -> None:
    now_s, engine = 0.0, FakeEngine()
    model, pulse = served(engine), Pulse(5, 60, lambda: now_s)
    assert await pulse.state(model) == "ok"
    now_s = 1000.0
    engine.running = 1  # it has only just come
    assert await pulse.state(model) == "ok"
    now_s = 1059.0
    assert await pulse.state(model) == "ok"
    now_s = 1061.0
    assert await pulse.state(model) == "no step for 61 s"
    engine.steps += 1
    assert await pulse.state(model) == "ok"


async def test_an_engine_that_does_not_answer_is_not_waited_for() -> None:
    class Mute(FakeEngine):
        async def stats(self) -> Any:
            await asyncio.Event().wait()

    assert await Pulse(0.01, 60).state(served(Mute())) == "no answer within 0.01 s"


async def test_the_openapi_document_shows_our_errors(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    responses = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(responses) == {"200", "4XX", "5XX"}
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
