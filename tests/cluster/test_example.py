"""The example program of a cluster runs as it is, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import TinyModel

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "on_ray.py"


def test_a_handle_of_a_model_on_a_cluster(tiny_model: TinyModel) -> None:
    command = [sys.executable, str(EXAMPLE), str(tiny_model("llama")), "hello"]
    done = subprocess.run(
        [*command, "--max-tokens", "8"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "8 tokens, on a cluster"
