"""The command line over the real engine, on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.fake import Jitllm
from tests.conftest import TinyModel

COMMAND = [sys.executable, "-m", "jitllm.cli.main"]


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


def test_a_budget_costs_pages_and_changes_nothing(jitllm: Jitllm, model: Path) -> None:
    info = jitllm("info", model, "-json").json
    free = jitllm("run", model, "-n", "12", "-json", "Hello there").json
    budget = free["pages"]["fixed_bytes"] + info["largest_block_bytes"]
    tight = jitllm("run", "-n", "12", "-maxmem", str(budget), model, "Hello there", "--json").json
    assert len(free["ids"]) == 12
    assert free["pages"]["page_ins_per_token"] == 0
    assert tight["ids"] == free["ids"]
    assert tight["text"] == free["text"]
    assert tight["pages"]["frames"] == 1
    assert tight["pages"]["page_ins"] > free["pages"]["page_ins"] == info["blocks"]
    # Every step reads every block; of all that was read, one page-in filled the one frame.
    num_steps = len(tight["ids"])
    assert tight["pages"]["page_ins"] == num_steps * info["blocks"]
    assert tight["pages"]["page_ins_per_token"] == info["blocks"] - 1 / num_steps


def test_keys_and_values_beyond_a_budget_are_said_and_change_nothing(
    jitllm: Jitllm, model: Path, tmp_path: Path
) -> None:
    asked = (model, "-n", "100", "-page-size", "16", "-ignore-eos", "Hello there")
    budget = ("-kv-budget", "100K", "-kv-cache", tmp_path, "-kv-cache-max", "0")
    free = jitllm("run", *asked, "-json").json
    tight = jitllm("run", *asked, *budget, "-json")
    spill = tight.json["kv_spill"]
    assert tight.json["ids"] == free["ids"]
    assert free["kv_spill"] == {"num_bytes": 0, "bytes_read": 0, "bytes_written": 0}
    assert spill["bytes_read"] > spill["bytes_written"] >= spill["num_bytes"] > 0
    [line] = [line for line in tight.err.splitlines() if line.startswith("keys ")]
    assert line.endswith(" written")


def test_a_prompt_is_computed_once_whatever_becomes_of_the_process(
    model: Path, tmp_path: Path
) -> None:
    """One is killed in its reply, when what it has computed may be on its way to disk."""
    words = "Once upon a time there was a model that forgot nothing at all"
    command = [*COMMAND, "run", str(model), "-kv-cache", str(tmp_path), "-json", "-ignore-eos"]

    def answer(text: str) -> Any:
        done = subprocess.run([*command, "-n", "6", text], capture_output=True, check=True)
        return json.loads(done.stdout)

    first = answer(words)
    assert (first["cached_tokens"], first["prefixes"]["whole"]) == (0, 0)
    again = answer(words)
    assert again["ids"] == first["ids"]
    assert again["cached_tokens"] == len(again["prompt_ids"])
    assert again["prefixes"]["whole"] == 1
    other = f"{words}, and then"
    child = subprocess.Popen([*command[:-2], "-n", "400", other], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read(len(other) + 1)
    child.kill()
    child.wait()
    child.stdout.close()
    longer = answer(other)
    assert longer["cached_tokens"] >= len(first["prompt_ids"]) // 16 * 16
    assert longer["prefixes"]["damaged"] == 0
    command = [*COMMAND, "run", str(model), "-json", "-ignore-eos"]  # which remembers nothing
    assert answer(other)["ids"] == longer["ids"]


def test_a_budget_below_everything_runs_and_says_so(jitllm: Jitllm, model: Path) -> None:
    done = jitllm("run", model, "-n", "2", "-maxmem", "400K", "Hello")
    assert done.code == 0
    assert "* OVER BUDGET by" in done.err


def test_every_step_size_scores_alike(jitllm: Jitllm, model: Path, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(" ".join(str(3 + 7 * i % 300) for i in range(40)))
    scores, logits = [], []
    for step in ("512", "7", "1"):
        out = tmp_path / f"{step}.npz"
        args = ("-ids", tmp_path / "ids", "-step", step, "-out", out, "-json")
        scores.append(jitllm("score", model, *args).json["nll"])
        with np.load(out) as arrays:
            logits.append(arrays["logits"].copy())
    assert scores[0] == scores[1] == scores[2]
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])
    shifted = logits[0].astype(np.float64)
    logprobs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    ids = [int(word) for word in (tmp_path / "ids").read_text().split()]
    expected = [-logprobs[at, token_id] for at, token_id in enumerate(ids[1:])]
    assert scores[0] == pytest.approx(expected, abs=1e-4)


def test_speed(jitllm: Jitllm, model: Path) -> None:
    report = jitllm("speed", model, "-p", "32", "-n", "8", "-r", "1", "-json").json
    assert report["prefill_tok_s"] > 0
    assert report["decode_tok_s"] > 0


DEVICES = ("-devices", "cpu:0,cpu:1", "-threads", "2", "-placement", "0=cpu:1,2=cpu:1,9=cpu:1")
PLACED = "0=cpu:1,1=cpu:0,2=cpu:1,head=cpu:0"


def test_a_run_says_where_it_was_computed(jitllm: Jitllm, model: Path) -> None:
    alone = jitllm("run", model, "-n", "12", "-json", "Hello there").json
    placed = jitllm("run", model, "-n", "12", "-json", *DEVICES, "Hello there").json
    assert placed["ids"] == alone["ids"]
    assert placed["placement"] == PLACED
    assert placed["declines"] == ["9=cpu:1: the model has blocks 0 to 2"]
    assert [(d["name"], d["blocks"], d["threads"]) for d in placed["devices"]] == [
        ("cpu:0", 1, 1),
        ("cpu:1", 2, 1),
    ]
    said = jitllm("run", model, "-n", "2", *DEVICES, "Hello").err.splitlines()
    assert f"place    {PLACED}   cpu:0 with 1 thread   cpu:1 with 1 thread" in said
    assert "place    * not so: 9=cpu:1: the model has blocks 0 to 2" in said


def test_speed_is_measured_where_the_flags_say(jitllm: Jitllm, model: Path) -> None:
    report = jitllm("speed", model, "-p", "8", "-n", "4", "-r", "1", "-json", *DEVICES).json
    assert report["placement"] == PLACED
    assert report["decode_tok_s"] > 0


def test_a_placement_that_cannot_be_met_is_refused_if_it_must_be(
    jitllm: Jitllm, model: Path
) -> None:
    done = jitllm("run", model, "-n", "2", *DEVICES, "-placement-strict", "Hello")
    assert done.code == 1
    assert "9=cpu:1: the model has blocks 0 to 2" in done.err
    done = jitllm("run", model, "-n", "2", "-devices", "cpu:0", "-placement", "0=cpu:1", "Hello")
    assert done.code == 1
    assert "cpu:1 is not attached" in done.err


def test_a_short_run_imports_no_array_library_and_no_screen(model: Path) -> None:
    """And a second one compiles nothing: it does not even load the compiler's own front end."""
    program = (
        "import sys; from jitllm.cli.main import main;"
        f"code = main(['run', {str(model)!r}, '-n', '1', 'Hello']);"
        "print('|', *sorted({m.split('.')[0] for m in sys.modules})); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JITLLM_DEBUG": "1"},
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split("|")[1].split())
    assert loaded & {"rich", "jinja2", "numba", "pytest"} == set()


def test_ctrl_c_does_not_wait_for_the_compiler(model: Path, tmp_path: Path) -> None:
    def num_compiled() -> int:
        return sum(len(files) for _, _, files in os.walk(tmp_path))

    command = [*COMMAND, "run", model, "-n", "1", "Hello"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as child:
        while not num_compiled() and child.poll() is None:
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert "Traceback" not in errors
    few = num_compiled()
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)
    assert num_compiled() > few
