"""The example client runs as it is, with nothing but the standard library beside jitllm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.api.server import running
from tests.conftest import TinyModel

ROOT = Path(__file__).resolve().parents[2]


def test_a_client_asks_several_things_at_once(tmp_path: Path, tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    with running(tmp_path, "-load", model, "-id", "small", "-threads", "1") as server:
        done = subprocess.run(
            # -S: no package that was installed is seen
            [sys.executable, "-S", ROOT / "examples" / "client.py", server.url, "the", "in", "an"],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONPATH": str(ROOT)},
            check=False,
        )
    assert done.returncode == 0, done.stderr
    first, *replies, last = done.stdout.splitlines()
    assert first == f"small on {server.url}"
    assert len(replies) == 3
    assert all("ms queued" in reply for reply in replies)
    assert "steps" in last
