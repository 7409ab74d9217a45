"""What a second thread is worth: decode, and the plain read loop of the same runs.

Set JITLLM_BENCH_GGUF to a GGUF file, JITLLM_BENCH_PAIRS to the number of pairs (10).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.bench.paired import compare, jitllm_speed
from tests.bench.test_against_peer import converted

SOURCE = os.environ.get("JITLLM_BENCH_GGUF")
PAIRS = int(os.environ.get("JITLLM_BENCH_PAIRS", "10"))

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not SOURCE, reason="JITLLM_BENCH_GGUF is not set"),
]


def test_two_threads_against_one(tmp_path: Path) -> None:
    """Decoding can gain what reading gains."""
    assert SOURCE
    model = converted(Path(SOURCE), tmp_path / "model.jlm")
    command = [sys.executable, "-m", "jitllm.cli.main", "speed", str(model), "-threads"]
    for ratio in compare(
        lambda: jitllm_speed([*command, "2"], prompt=0, decode=128, times=2),
        lambda: jitllm_speed([*command, "1"], prompt=0, decode=128, times=2),
        PAIRS,
    ):
        print(f"\ntwo threads over one, {ratio}")
