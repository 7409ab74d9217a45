"""`jitllmd`: its command line, how it finds a server, and how models share memory."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.messages.manager import Health, Listed, Neighbour, NodeListed, Working
from jitllm.api.models import Load
from jitllm.cli.daemon.main import VERBS, main
from jitllm.cli.daemon.shelf import Shelf, shares
from jitllm.config import EngineConfig
from jitllm.devices.choose import AvailableDevice
from jitllm.errors import UsageError
from jitllm.memory.host import HostReport
from jitllm.remote import base_url, split_address
from tests.api.fake import FakeEngine, Tokenizer, header
from tests.cli.fake import VOCAB

Capture = pytest.CaptureFixture[str]


def test_without_arguments_it_says_what_there_is(capsys: Capture) -> None:
    assert main([]) == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: jitllmd VERB")
    assert all(verb in err for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: Capture) -> None:
    assert main([verb, "-help"]) == 0
    out = capsys.readouterr().out
    assert f"jitllmd {verb}" in out
    assert "Examples:" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["swerve"], "did you mean serve?"),
        (["serve", "-lod", "x"], "did you mean -load?"),
        (["serve", "-xyzzy"], "see jitllmd serve -help"),
        (["serve", "-id", "a"], "more -id than -load"),
        (["serve", "-max-queue", "-2"], "-max-queue -2 is too small"),
        (["serve", "-max-batch", "0"], "-max-batch 0 is too small"),
        (["serve", "-max-body", "huge"], "-max-body 'huge' is not a size"),
        (["serve", "-drain", "-1"], "-drain -1 makes no sense"),
        (["serve", "-addr", "127.0.0.1:99999"], "has no port"),
        (["models", "a", "-unload", "b"], "give one of them"),
        (["sessions", "a", "-cancel", "b"], "give one of them"),
        (["sessions", "-park", "a", "-resume", "a"], "-park and -resume are different things"),
        (["sessions", "a", "-resume", "b"], "give one of them"),
        (["sessions", "-park", "a", "-to", "tape"], "choose disk or memory"),
        (["sessions", "-to", "disk"], "-to is about a -park"),
        (["serve", "-fairness", "101"], "-fairness 101 is too large; the most is 100"),
        (["place", "-model", "a", "-maxmem", "much"], "-maxmem 'much' is not a size"),
        (["stats", "-interval", "10"], "the least is 250"),
        (["stats", "-addr", "ftp://x"], "is no address"),
    ],
)
def test_a_command_line_that_means_nothing(args: list[str], said: str, capsys: Capture) -> None:
    assert main(args) == 2
    err = capsys.readouterr().err
    assert err.startswith("jitllmd: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", ["models", "sessions", "stats", "devices"])
def test_where_no_server_is_the_message_says_what_to_do(verb: str, capsys: Capture) -> None:
    assert main([verb, "-addr", "127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert "no server answers at http://127.0.0.1:1" in err
    assert "jitllmd serve" in err


REASON = ["NOT", "TAKEN", "BECAUSE"]


@pytest.mark.parametrize(
    ("devices", "rows"),
    [
        ("cpu:1", [("cpu:0", "not in -devices"), ("cpu:1", ""), ("cpu:2", "only when named")]),
        ("auto", [("cpu:0", ""), ("cpu:1 to cpu:2", "only when named")]),
        (
            "metal",
            [
                ("cpu:0", "-devices metal: no such device here; there is cpu:0 to cpu:2"),
                ("cpu:1 to cpu:2", "-devices metal: no such device here; there is cpu:0 to cpu:2"),
            ],
        ),
    ],
)
def test_devices_say_why_they_were_not_taken(
    devices: str,
    rows: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setattr("jitllm.memory.host.numa_nodes", lambda mask, root: ())
    shelf = Shelf(EngineConfig(devices=devices, threads=3), lambda: nullcontext(print))
    found = {"devices": asyncio.run(shelf.devices())}
    monkeypatch.setattr("jitllm.cli.daemon.devices.Server.get", lambda server, path: found)
    assert main(["devices"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "NAME",
        "KIND",
        "CORES",
        "FREE",
        "OF",
        "MODELS",
        "NOT",
        "TAKEN",
        "BECAUSE",
    ]
    assert len(lines) == len(rows)
    for line, (name, reason) in zip(lines, rows, strict=True):
        assert line.startswith(f"{name} ")
        assert line.endswith(reason)


class FakeMember:
    """Of a cluster of two nodes, on which somebody else has a model too."""

    name, node_id, is_in_reach = "here:1:aa", "a", True

    def __init__(self) -> None:
        self.health = Health()
        self.drained: dict[str, bool] = {}

    async def nodes(self) -> tuple[NodeListed, ...]:
        device = AvailableDevice("cpu", 0, num_cores=8, free_bytes=3 << 30)
        shares = [device, replace(device, ordinal=1, on_request=True)]
        far = HostReport(8, (), tuple(shares), "a far processor", "avx512")
        return (NodeListed("here", "a", far), NodeListed("there", "b", far))

    async def models(self) -> tuple[Listed, ...]:
        nobody: Any = None

        def device(name: str, node: str, node_id: str) -> Neighbour:
            return Neighbour(name, node, node_id, nobody, nobody)

        ours = (device("cpu:0", "here", "a"), device("there/cpu:1", "there", "b"))
        theirs = (device("cpu:0", "there", "b"),)
        found = []
        for name, member, devices in (("mine", self.name, ours), ("theirs", "there:2:bb", theirs)):
            working = Working(nobody, devices, nobody, ())
            found.append(Listed(name, Path("/m.jlm"), member, "ready", "*=cpu:0", working))
        return (*found, Listed("next", Path("/n.jlm"), "there:2:bb"))

    async def drain(self, name: str, *, is_draining: bool) -> None:
        self.drained[name] = is_draining


async def test_a_server_on_a_cluster_shows_its_nodes_and_the_models_of_others() -> None:
    member: Any = FakeMember()
    shelf = Shelf(EngineConfig(threads=1), lambda: nullcontext(print), "auto", member)
    devices = {device["name"]: device for device in await shelf.devices()}
    assert {name: device["models"] for name, device in devices.items()} == {
        "cpu:0": ["mine"],
        "there/cpu:0": ["theirs"],
        "there/cpu:1": ["mine"],
    }
    far, near = devices["there/cpu:0"], devices["cpu:0"]
    assert (near["node"], near["cores"], near["declined"]) == ("here", 1, None)
    assert (far["node"], far["cores"], far["free_bytes"]) == ("there", 8, 3 << 30)
    assert (far["processor"], far["tier"]) == ("a far processor", "avx512")
    assert far["declined"] == "not in -devices"
    models = {model["id"]: model for model in await shelf.cluster()}
    assert {name: model["is_here"] for name, model in models.items()} == {
        "mine": True,
        "theirs": False,
        "next": False,
    }
    assert models["mine"]["devices"] == ["here/cpu:0", "there/cpu:1"]
    assert (models["next"]["state"], models["next"]["devices"]) == ("loading", [])
    await shelf.drain("theirs", True)
    assert member.drained == {"theirs": True}


async def test_what_is_wrong_with_a_cluster_is_a_note() -> None:
    member: Any = FakeMember()
    shelf = Shelf(EngineConfig(threads=1), lambda: nullcontext(print), "auto", member)
    assert shelf.notes() == []
    member.health = Health(("there",))
    assert shelf.notes() == ["the node there has left the cluster"]
    member.is_in_reach = False
    assert shelf.notes()[1:] == [
        "the manager of the cluster is out of reach: nobody finds our models"
    ]
    assert await shelf.cluster() == []  # and what is here goes on
    assert {device["node"] for device in await shelf.devices()} == {""}


def test_all_models_of_a_cluster_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    member: Any = FakeMember()
    shelf = Shelf(EngineConfig(), lambda: nullcontext(print), "auto", member)
    found = {"models": [], "cluster": asyncio.run(shelf.cluster())}
    monkeypatch.setattr("jitllm.cli.daemon.models.Server.get", lambda server, path: found)
    assert main(["models"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[-3:] == [
        ["mine", "ready", "this", "server", "*=cpu:0"],
        ["theirs", "ready", "there:2:bb", "*=cpu:0"],
        ["next", "loading", "there:2:bb"],
    ]


def test_without_its_packages_the_server_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve"]) == 1
    assert 'pip install "jitllm[server]"' in capsys.readouterr().err


def test_without_ray_the_server_names_it(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "actors.cluster", raising=False)
    assert main(["serve", "-addr", "127.0.0.1:0", "-ray", "local"]) == 1
    assert "pip install 'jitllm[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ray", "code", "said"),
    [
        ("127.0.0.1:1", 1, "no Ray cluster answers at '127.0.0.1:1'"),
        ("nonsense", 2, "no address of a Ray cluster; write HOST:PORT"),
        ("", 2, "no address of a Ray cluster"),
        ("ray://127.0.0.1:10001", 2, "no address of a Ray cluster"),
        ("a b:70000", 1, "no Ray cluster answers"),
    ],
)
def test_where_no_cluster_is_the_message_says_what_to_do(
    ray: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    monkeypatch.setattr("actors.cluster._membership", None)  # other tests may be part of one
    assert main(["serve", "-addr", "127.0.0.1:0", "-ray", ray]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "local" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("addr", "url"),
    [
        ("localhost:8080", "http://localhost:8080"),
        (":9", "http://127.0.0.1:9"),
        ("box", "http://box:8080"),
        ("", "http://127.0.0.1:8080"),
        ("::1", "http://[::1]:8080"),
        ("[::1]:9", "http://[::1]:9"),
        ("https://box/path?x", "https://box"),
    ],
)
def test_addresses_as_people_write_them(addr: str, url: str) -> None:
    assert base_url(addr) == url


@pytest.mark.parametrize("addr", ["x:y", "x:", "x:70000", "x:-1", "x:\u0661"])
def test_an_address_without_a_port_is_refused(addr: str) -> None:
    with pytest.raises(UsageError):
        split_address(addr)


def test_shares_are_in_proportion_and_never_too_much() -> None:
    assert shares(100, [1, 3]) == [25, 75]
    assert shares(10, [1, 1, 1]) == [3, 3, 3]
    assert shares(10, [0]) == [0]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[FakeEngine]]:
    """Engines in the order of opening, each with the budget that it was given."""
    engines: list[FakeEngine] = []

    async def open_engine(
        path: Path, config: EngineConfig, *, progress: Any, name: str | None, **_: Any
    ) -> Any:
        engine = FakeEngine(budget_bytes=config.maxmem_bytes or 8000)
        engines.append(engine)
        return SimpleNamespace(
            name=name or path.stem,
            engine=engine,
            tokenizer=Tokenizer(),
            chat=None,
            header=header(),
            graph=SimpleNamespace(vocab=VOCAB),
            config=SimpleNamespace(maxmem_bytes=engine.budget_bytes),
            notes=("it is slow here",),
            close=engine.close,
        )

    monkeypatch.setitem(
        sys.modules,
        "jitllm.compose",
        SimpleNamespace(open_engine=open_engine),  # type: ignore[arg-type]
    )
    monkeypatch.delattr("jitllm.compose", raising=False)
    return lambda: engines


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.jlm"
    path.write_bytes(b"\0" * (5 << 20))  # as much as the fake's weights
    return path


@pytest.mark.parametrize("maxmem_bytes", [None, 8000])
async def test_models_share_a_budget(
    opened: Callable[[], list[FakeEngine]], model: Path, maxmem_bytes: int | None
) -> None:
    shelf = Shelf(EngineConfig(maxmem_bytes=maxmem_bytes), lambda: nullcontext(print))
    await shelf.load(Load(path=model))
    assert [engine.budget_bytes for engine in opened()] == [8000]
    await shelf.load(Load(path=model, id="b"))
    assert [engine.budget_bytes for engine in opened()] == [4000, 4000]
    await shelf.load(Load(path=model, id="own", maxmem_bytes=1000))
    assert [engine.budget_bytes for engine in opened()] == [4000, 4000, 1000]
    await shelf.place("b", 2000)
    await shelf.unload("own")
    assert [engine.budget_bytes for engine in opened()[:2]] == [6000, 2000]
    await shelf.close()
    assert all(engine.is_closed for engine in opened())


async def test_names_are_unique_and_files_are_aliases(
    opened: Callable[[], list[FakeEngine]], model: Path
) -> None:
    shelf = Shelf(EngineConfig(), lambda: nullcontext(print))
    first = await shelf.load(Load(path=model, id="first"))
    assert first.aliases == ("model",)
    assert shelf.get("model") is shelf.get("first") is first
    second = await shelf.load(Load(path=model, id="second"))
    assert second.aliases == ()
    for taken in ("first", "model"):
        with pytest.raises(UsageError, match="taken"):
            await shelf.load(Load(path=model, id=taken))
    assert len(opened()) == 2


async def test_what_is_slow_is_said_once(
    opened: Callable[[], list[FakeEngine]], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(EngineConfig(), lambda: nullcontext(print), "auto")
    await shelf.load(Load(path=model))
    await shelf.load(Load(path=model, id="b"))
    assert caplog.messages == ["it is slow here"]
    assert shelf.notes() == ["it is slow here"]
    assert {served.where["runtime"] for served in shelf.list()} == {"ray"}


async def test_two_loads_at_once_do_not_take_the_same_name(
    opened: Callable[[], list[FakeEngine]], model: Path
) -> None:
    shelf = Shelf(EngineConfig(), lambda: nullcontext(print))
    done = await asyncio.gather(
        *(shelf.load(Load(path=model)) for _ in range(2)), return_exceptions=True
    )
    assert sum(isinstance(one, UsageError) for one in done) == 1
    assert len(opened()) == 1


async def test_the_garbage_collector_leaves_models_alone_while_they_are_there(
    opened: Callable[[], list[FakeEngine]], model: Path
) -> None:
    """And finds what a model leaves behind in cycles."""
    shelf = Shelf(EngineConfig(), lambda: nullcontext(print))
    await shelf.load(Load(path=model, id="a"))
    await shelf.load(Load(path=model, id="b"))
    assert gc.get_freeze_count() > 0
    engine: Any = opened().pop(0)
    engine.myself = engine
    gone = weakref.ref(engine)
    del engine
    gc.freeze()
    await shelf.unload("a")
    assert gone() is None
    assert gc.get_freeze_count() > 0
    await shelf.close()
    assert gc.get_freeze_count() == 0
