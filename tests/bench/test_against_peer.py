"""Whole models against another engine's own benchmark.

Set JITLLM_PEER_BENCH to llama.cpp's `llama-bench`, JITLLM_BENCH_GGUF to a GGUF file, and
JITLLM_BENCH_PAIRS to the number of pairs (10).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.paired import compare, jitllm_speed, llama_bench

PEER, SOURCE = os.environ.get("JITLLM_PEER_BENCH"), os.environ.get("JITLLM_BENCH_GGUF")
PAIRS = int(os.environ.get("JITLLM_BENCH_PAIRS", "10"))
THREADS = "2"

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not PEER or not SOURCE, reason="JITLLM_PEER_BENCH and JITLLM_BENCH_GGUF are not set"
    ),
]


@pytest.mark.parametrize(("prompt", "decode"), [(512, 128)])
def test_prefill_and_decode_against_the_peer(tmp_path: Path, prompt: int, decode: int) -> None:
    """Both engines alternate; the numbers are shown, not judged."""
    assert SOURCE
    assert PEER
    model = tmp_path / "model.jlm"
    jitllm = [sys.executable, "-m", "jitllm.cli.main"]
    subprocess.run([*jitllm, "convert", SOURCE, str(model)], check=True, capture_output=True)
    ours = [*jitllm, "speed", str(model), "-threads", THREADS]
    peer = [PEER, "-m", SOURCE, "-t", THREADS]
    for ratio in compare(
        lambda: jitllm_speed(ours, prompt, decode), lambda: llama_bench(peer, prompt, decode), PAIRS
    ):
        print(f"\npp{prompt} tg{decode} {ratio}")
        assert ratio.pairs == PAIRS
