from __future__ import annotations

import re
from pathlib import Path

import pytest

from jitllm.cli.convert import default_output
from jitllm.cli.progress import Progress
from jitllm.devices.cpus import NumaNode
from jitllm.devices.vulkan.found import FoundVulkan
from jitllm.jit import threads, tiers
from jitllm.memory.budget import HostRoom
from tests.cli.fake import Jitllm


def test_cache_shows_and_clears(
    jitllm: Jitllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = jitllm("cache", "-json").json
    assert report == {
        "directory": str(tmp_path / "jitllm"),
        "entries": 0,
        "bytes": 0,
        "removed": 0,
    }
    objects = tmp_path / "jitllm" / "objects"
    objects.mkdir(parents=True)
    (objects / "a.o").write_bytes(bytes(100))
    assert jitllm("cache").out.startswith("1 kernel, 100 B, in ")
    assert jitllm("cache", "clear", "--json").json["removed"] == 1
    assert list(objects.iterdir()) == []
    assert jitllm("cache", "shrink").code == 2


def test_hardware(jitllm: Jitllm) -> None:
    report = jitllm("hardware", "--json").json
    assert [tier["name"] for tier in report["tiers"]] == [tier.name for tier in tiers.TIERS]
    assert report["tier"] == tiers.choose().name
    assert report["cores"]["threads"] >= 1
    assert report["memory"]["budget_bytes"] <= report["memory"]["usable_bytes"]
    out = jitllm("hardware").out
    assert f"tier {report['tier']}" in out
    assert _unmeasured(report["memory"]["explanation"]) in _unmeasured(out)


def test_hardware_lists_the_devices_of_this_machine(
    jitllm: Jitllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "default_threads", lambda: 4)
    monkeypatch.setattr("jitllm.memory.host.numa_nodes", lambda mask, root: ())
    monkeypatch.setattr("jitllm.devices.vulkan.found.find_vulkan", FoundVulkan)
    devices = jitllm("hardware", "-json").json["devices"]
    assert [(d["name"], d["cores"]) for d in devices] == [(f"cpu:{i}", 4) for i in range(4)]
    assert [d["declined"] for d in devices] == [None, *["only when named"] * 3]
    assert all(0 < d["free_bytes"] <= d["total_bytes"] for d in devices)
    lines = [line for line in jitllm("hardware").out.splitlines() if line.startswith("device ")]
    assert [_unmeasured(line).split(maxsplit=2) for line in lines[:1]] == [
        ["device", "cpu:0", "the host, 4 cores, SIZE free of SIZE; taken by -devices auto"]
    ]
    assert lines[1].startswith("device cpu:1 to cpu:3")
    assert lines[1].endswith("not taken: only when named")
    assert len(lines) == 2


def test_hardware_lists_numa_nodes(jitllm: Jitllm, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = [NumaNode(i, frozenset({i}), 8, (i + 1) << 30, 9 << 30) for i in range(2)]
    monkeypatch.setattr("jitllm.memory.host.numa_nodes", lambda mask, root: sockets)
    monkeypatch.setattr("jitllm.memory.budget.probe", lambda *root: HostRoom(5 << 30, "made up"))
    out = jitllm("hardware").out
    for socket in ("NUMA node 0, 8 cores, 1.00 GiB free", "NUMA node 1, 8 cores, 2.00 GiB free"):
        assert f"{socket} of 9.00 GiB; taken by -devices auto" in out


def _unmeasured(text: str) -> str:
    """Without sizes: what is available changes from one moment to the next."""
    return re.sub(r"[\d.]+ [KMGT]iB", "SIZE", text)


def test_hardware_says_why_a_tier_is_missing(
    jitllm: Jitllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "cpu_flags", lambda: frozenset(tiers.AVX2.needs))
    out = jitllm("hardware").out
    assert "no: the processor lacks avx_vnni" in out
    assert "yes, and the one that is used" in out


@pytest.mark.parametrize(
    ("source", "output"),
    [("a/b.gguf", "a/b.jlm"), ("b-00002-of-00003.gguf", "b.jlm"), ("b.v1.gguf", "b.v1.jlm")],
)
def test_the_container_lies_beside_its_source(source: str, output: str) -> None:
    assert default_output(Path(source)) == Path(output)


def test_progress_in_a_log_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with Progress(clock=lambda: now) as progress:
        for done in range(41):
            progress("compiling kernels", done, 40)
            now += 0.25
        progress("reading weights", 0, 3 << 20)
        now += 6
        progress("reading weights", 3 << 20, 3 << 20)
    assert capsys.readouterr().err.splitlines() == [
        "compiling kernels 20/40",
        "compiling kernels 40/40",
        "reading weights 3.00 MiB of 3.00 MiB, 512.00 KiB/s",
    ]


def test_progress_on_a_terminal_is_a_bar_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    now = 0.0
    with Progress(clock=lambda: now) as progress:
        for done in range(11):
            progress("compiling kernels", done, 10)
            now += 0.2
    err = capsys.readouterr().err
    assert "compiling kernels" in err
    assert "10/10" in err or "9/10" in err


@pytest.mark.parametrize("flags", [(), ("-json",)])
@pytest.mark.parametrize("verb", ["cache", "hardware"])
def test_a_user_without_a_home_has_no_cache(
    jitllm: Jitllm, monkeypatch: pytest.MonkeyPatch, verb: str, flags: tuple[str, ...]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    done = jitllm(verb, *flags)
    assert done.code == 0
    if flags:
        found = done.json.get("cache", done.json)
        assert found["directory"] is None
    else:
        assert "$XDG_CACHE_HOME" in done.out
