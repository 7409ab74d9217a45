"""Handles move blocks: in this process and on a server, with the same answers and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import jitllm
from actors.messages.device import Adopt, Bring, Hand, Missing, Pack, Prepare, Unpack
from jitllm.api.app import create_app
from jitllm.api.service import Limits
from jitllm.config import EngineConfig
from jitllm.engine import EngineStats, Moved, Request
from jitllm.errors import JitllmError, UsageError
from jitllm.handle import Handle
from tests.api.fake import FakeEngine, FakeModels, served
from tests.api.server import Server, chat_model, running
from tests.conftest import TinyModel
from tests.models import native
from tests.models.deaths import Reaper, at
from tests.models.native import opened
from tests.models.test_moves import following

DEVICES = "cpu:0,cpu:1"
HOME = "0-2=cpu:0,head=cpu:0"
LONG = Request(tuple(range(5, 30)), max_tokens=200)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: TinyModel) -> Path:
    return chat_model(tiny_gguf("llama"), tmp_path_factory.mktemp("moving") / "tiny.jlm")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, container: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with running(folder, "-load", container, "-devices", DEVICES, "-threads", "2") as server:
        yield server


@pytest.fixture(params=["embedded", "http"])
async def model(
    request: pytest.FixtureRequest, server: Server, container: Path
) -> AsyncIterator[Handle]:
    if request.param == "http":
        connecting = jitllm.connect(server.url)
    else:
        connecting = jitllm.connect(container, config=EngineConfig(devices=DEVICES, threads=2))
    async with connecting as handle:
        await handle.place("*=cpu:0", strict=True)
        yield handle


async def followed(model: Handle, has_begun: asyncio.Event) -> list[int]:
    """The tokens of a reply; says when it has begun."""
    tokens: list[int] = []
    async for delta in model.generate("the in an", max_tokens=150, ignore_eos=True):
        tokens += delta.tokens
        has_begun.set()
    return tokens


async def test_blocks_move_during_a_reply_and_it_stays_the_same(model: Handle) -> None:
    has_begun = asyncio.Event()
    quiet = await followed(model, asyncio.Event())
    reply = asyncio.create_task(followed(model, has_begun))
    await has_begun.wait()
    there = await model.move([0, 2], to="cpu:1")
    back = await model.move("2", to="host")
    assert await reply == quiet
    assert isinstance(there, Moved)
    assert (there.blocks, there.to, there.placement) == (
        "blocks 0,2",
        "cpu:1",
        "0=cpu:1,1=cpu:0,2=cpu:1,head=cpu:0",
    )
    assert back.placement == "0=cpu:1,1-2=cpu:0,head=cpu:0"
    assert there.weight_bytes > 0
    assert (await model.stats()).last_move == back


async def test_a_map_is_gone_to_with_one_move_for_each_device(model: Handle) -> None:
    before = await model.stats()
    [moved] = await model.place("0-1=cpu:1!,9=cpu:1")
    after = await model.stats()
    assert moved.blocks == "blocks 0-1"
    assert str(after.placement) == "0-1=cpu:1!,2=cpu:0,head=cpu:0"
    assert [decline.what for decline in after.declines] == ["9=cpu:1"]
    assert after.moves == before.moves + 1
    assert after.moved_blocks == before.moved_blocks + 2
    assert [(use.name, use.blocks) for use in after.devices] == [("cpu:0", 1), ("cpu:1", 2)]
    assert await model.place("0-1=cpu:1!") == ()
    assert (await model.stats()).declines == ()


async def test_only_a_map_moves_what_is_pinned(model: Handle) -> None:
    await model.place("0=cpu:0!")
    with pytest.raises(JitllmError, match="pinned"):
        await model.move("0", to="cpu:1")
    assert await model.place("0=cpu:1!")
    assert str((await model.stats()).placement) == "0=cpu:1!,1-2=cpu:0,head=cpu:0"


@pytest.mark.parametrize(
    ("blocks", "to", "said"),
    [
        ("x", "cpu:1", "names no blocks"),
        ([-1], "cpu:1", "there is no block -1"),
        ([3], "cpu:1", "the model has blocks 0 to 2"),
        ([], "cpu:1", "no block is named"),
        ([0], "cpu:0", "on cpu:0 already"),
        ([0], "cpu:9", "cpu:9 is not attached"),
        ([0], "tpu", "tpu"),
    ],
)
async def test_a_move_that_cannot_be_is_refused(
    model: Handle, blocks: Any, to: str, said: str
) -> None:
    with pytest.raises(JitllmError, match=said):
        await model.move(blocks, to=to)
    assert str((await model.stats()).placement) == HOME


async def test_a_map_that_cannot_be_changes_nothing(model: Handle) -> None:
    for text, strict in (("0=cpu:9", False), ("0=cpu:1,7=cpu:1", True), ("0", False)):
        with pytest.raises(JitllmError):
            await model.place(text, strict=strict)
    both: Any = {"maxmem": "1G"}
    with pytest.raises(UsageError, match="give one of them"):
        await model.place("0=cpu:1", **both)
    assert str((await model.stats()).placement) == HOME


LOSSES = [("cpu:0", Pack), ("cpu:0", Hand)] + [
    ("cpu:1", kind) for kind in (Prepare, Missing, Bring, Unpack, Adopt)
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("device", "kind"), LOSSES)
@pytest.mark.parametrize("how", ["move", "placement"])
async def test_a_loss_during_a_move_is_a_conflict_with_its_reason(
    container: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    device: str,
    kind: type,
    late: bool,
) -> None:
    """The replies under way go on where they were, and the next move works."""
    reaper = Reaper.installed(monkeypatch)
    # Of two lengths, asked for again and again: there is always one with a history.
    requests = (LONG, replace(LONG, max_tokens=137))
    asked: dict[str, Any] = {"move": {"blocks": "0-1,head", "to": "cpu:1"}}
    if how == "placement":
        asked = {"placement": "0-1=cpu:1,head=cpu:1", "strict": True}
    async with opened(container, devices=DEVICES, threads=2) as loaded:
        model = replace(served(FakeEngine(), "tiny"), engine=loaded.engine, header=loaded.header)
        app = create_app(FakeModels(model), Limits())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            begun, is_over = [asyncio.Event() for _ in requests], asyncio.Event()

            async def asking(request: Request, seen: asyncio.Event) -> list[native.Reply]:
                replies = [await following(loaded.engine, request, seen)]
                while not is_over.is_set():
                    replies.append(await following(loaded.engine, request, seen))
                return replies

            asked_for = [
                asyncio.create_task(asking(*each)) for each in zip(requests, begun, strict=True)
            ]
            await asyncio.gather(*(seen.wait() for seen in begun))
            reaper.dies, reaper.late = at(device, kind, 1), late
            refused = await client.post("/jitllm/v1/models/tiny/placement", json=asked)
            assert refused.status_code == 409, refused.text
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("conflict_error", "placement")
            assert error["param"] == how
            assert f"device {device} was lost" in error["message"]
            assert "no block has moved" in error["message"]
            report = await client.get("/jitllm/v1/models/tiny/placement")
            assert report.json()["placement"] == HOME
            moved = await client.post("/jitllm/v1/models/tiny/placement", json=asked)
            assert moved.status_code == 200, moved.text
            assert moved.json()["placement"] == "0-1=cpu:1,2=cpu:0,head=cpu:1"
            is_over.set()
            replies = [await task for task in asked_for]
        assert reaper.num_deaths == 1
        for request, same in zip(requests, replies, strict=True):
            quiet = await native.reply(loaded.engine, request)
            assert {reply.bits for reply in same} == {quiet.bits}


async def test_a_snapshot_is_of_the_same_kinds_everywhere(model: Handle) -> None:
    await model.move("0", to="cpu:1")
    stats = await model.stats()
    assert isinstance(stats, EngineStats)
    assert stats.placement.blocks_on("cpu:1") == {0}
    assert stats.move_totals.pause_s >= stats.last_move.pause_s  # type: ignore[union-attr]
    assert sum(use.placed for use in stats.devices) == stats.pages.blocks
    assert {use.threads for use in stats.devices} == {1}
    assert all(use.placed_bytes > 0 for use in stats.devices)


def test_without_an_event_loop_blocks_move_too(server: Server) -> None:
    with jitllm.connect_sync(server.url) as model:
        model.place("*=cpu:0")
        assert model.move("1", to="cpu:1").blocks == "block 1"
        assert model.place("*=cpu:0")[0].blocks == "block 1"
        assert model.place(maxmem="1G").budget_bytes <= 1 << 30
