"""How long a warm `jitllm run` takes to its first token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

NUM_RUNS = 5


@pytest.mark.bench
def test_one_token_of_a_real_model(gemma_model: Path) -> None:
    seconds = [seconds_of_a_run(gemma_model) for _ in range(1 + NUM_RUNS)][1:]
    print(f"\nmedian {median(seconds):.2f} s of {', '.join(f'{s:.2f}' for s in sorted(seconds))}")
    assert median(seconds) < 3


def seconds_of_a_run(path: Path) -> float:
    """From nothing to the end of the process."""
    began_s = perf_counter()
    command = [sys.executable, "-m", "jitllm.cli.main", "run", path, "-n", "1", "Hello"]
    subprocess.run(command, check=True, capture_output=True)
    return perf_counter() - began_s
