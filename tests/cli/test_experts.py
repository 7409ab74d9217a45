"""What reports, servers and metrics say about phases, and about experts that come one by one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.api.server import running
from tests.cli.fake import Jitllm
from tests.conftest import TinyModel

NUM_TOKENS = 12


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("olmoe", "q8_0")


def test_a_report_counts_experts_and_phases(jitllm: Jitllm, model: Path) -> None:
    command = ("run", model, "-n", str(NUM_TOKENS), "Hello there")
    whole = jitllm(*command, "-experts", "blocks", "-json").json["pages"]
    assert whole["experts"] is None
    done = jitllm(*command, "-experts", "apart", "-maxmem", "1M", "-json")
    pages = done.json["pages"]
    experts, phases = pages["experts"], pages["phases"]
    assert experts["hits"] + experts["reads"] > 0
    assert experts["hit_rate"] == experts["hits"] / (experts["hits"] + experts["reads"])
    assert experts["wait_s"] > 0
    assert experts["held_bytes"] <= experts["room_bytes"]
    assert list(phases) == ["load", "prompt", "decode"]
    assert sum(phase["bytes_read"] for phase in phases.values()) == pages["bytes_read"]
    assert sum(phase["requests"] for phase in phases.values()) == (
        1 + pages["page_ins"] + experts["reads"]
    )
    assert (phases["load"]["requests"], phases["load"]["faults"]) == (1, 0)
    assert phases["decode"]["tokens"] == NUM_TOKENS - 1
    decode = phases["decode"]
    assert decode["faults"] > 0
    assert decode["bytes_per_token"] == decode["bytes_read"] / (NUM_TOKENS - 1)
    assert decode["bytes_per_second"] == decode["bytes_read"] / decode["seconds"]
    labels = [line.split()[0] for line in done.err.splitlines()]
    assert labels.count("experts") == 2  # how many fit, and how many were there
    at = labels.index("load")
    assert labels[at - 1 : at + 4] == ["pages", "load", "prompt", "decode", "experts"]


def test_a_way_of_paging_that_there_is_not_is_refused(jitllm: Jitllm, model: Path) -> None:
    done = jitllm("run", model, "-experts", "together", "Hello")
    assert done.code == 2
    assert "-experts 'together' is not available; choose auto or apart or blocks" in done.err


def test_a_server_says_the_same(model: Path, tmp_path: Path) -> None:
    flags = ("-load", model, "-id", "tiny", "-maxmem", "1M", "-experts", "apart")
    with running(tmp_path, *flags) as server:
        asked = {"model": "tiny", "prompt": "Hello", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        body = json.dumps(asked).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
        urllib.request.urlopen(request).read()

        jitllmd = [sys.executable, "-m", "jitllm.cli.daemon.main", "stats", "-addr", server.url]
        shown = subprocess.run(jitllmd, check=True, capture_output=True, text=True).stdout
        found = subprocess.run([*jitllmd, "-json"], check=True, capture_output=True, text=True)
        pages = json.loads(found.stdout)["models"][0]["pages"]
        assert not json.loads(found.stdout)["models"][0]["fits"]
        experts, decode = pages["experts"], pages["phases"]["decode"]
        assert experts["reads"] > 0
        assert decode["tokens"] == NUM_TOKENS - 1
        assert re.search(r"^experts [0-9.]+% of [0-9]+ were there", shown, re.MULTILINE)
        assert re.search(r"^  decode +read [0-9.]+ .* a token$", shown, re.MULTILINE)

        metrics = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
        values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
        assert float(values['jitllm_expert_reads_total{model="tiny"}']) == experts["reads"]
        assert float(values['jitllm_expert_hits_total{model="tiny"}']) == experts["hits"]
        name = 'jitllm_phase_read_bytes_total{model="tiny",phase="decode"}'
        assert float(values[name]) == decode["bytes_read"]
        held = float(values['jitllm_host_resident_bytes{model="tiny"}'])
        assert held >= pages["fixed_bytes"] + experts["held_bytes"]
