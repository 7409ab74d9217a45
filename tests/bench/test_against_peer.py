"""Whole models against another engine's own benchmark.

Set JITLLM_PEER_BENCH to llama.cpp's `llama-bench`, JITLLM_BENCH_GGUF to a GGUF file, and
JITLLM_BENCH_PAIRS to the number of pairs (10).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from tests.bench.paired import compare, jitllm_speed, llama_bench
from tests.bench.random_gguf import Shape, write_models

PEER, SOURCE = os.environ.get("JITLLM_PEER_BENCH"), os.environ.get("JITLLM_BENCH_GGUF")
PAIRS = int(os.environ.get("JITLLM_BENCH_PAIRS", "10"))
THREADS = "2"

ONE_BILLION = Shape(16, 8192, heads=32, kv_heads=8, head_width=64, vocab=32_000)
"""1.04 billion weights, with an output head of its own: 622 MB in Q4_K."""

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PEER, reason="JITLLM_PEER_BENCH is not set"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, converted."""
    if not SOURCE:
        pytest.skip("JITLLM_BENCH_GGUF is not set")
    return converted(Path(SOURCE), tmp_path_factory.mktemp("bench") / "model.jlm")


@pytest.mark.parametrize(
    ("prompt", "decode", "depth", "times"),
    [(512, 0, 0, 1), (48, 0, 0, 9), (0, 128, 0, 1), (0, 128, 4096, 3)],
    ids=str,
)
def test_a_model_against_the_peer(
    model: Path, prompt: int, decode: int, depth: int, times: int
) -> None:
    """Both engines alternate; the numbers are shown, not judged. times: what is short is done so
    often for one sample."""
    against_the_peer(Path(SOURCE or ""), model, prompt, decode, depth, times)


@pytest.mark.parametrize(("prompt", "decode"), [(512, 0), (0, 64)], ids=["prefill", "decode"])
@pytest.mark.parametrize("weight_type", ["Q4_K", "Q8_0", "Q4_0", "Q6_K"])
def test_a_billion_weights_against_the_peer(
    weight_type: str, prompt: int, decode: int, tmp_path: Path
) -> None:
    """A llama of 16 blocks with random weights, the same file for both engines.

    Prompts and decoding apart: what is compared lies closer together in time, and the rate of
    memory changes by the minute.
    """
    shape = replace(ONE_BILLION, weight_type=GGMLQuantizationType[weight_type])
    source, model = write_models(tmp_path, shape)
    against_the_peer(source, model, prompt, decode)


def converted(source: Path, model: Path) -> Path:
    """`source` as a container."""
    command = [sys.executable, "-m", "jitllm.cli.main", "convert", str(source), str(model)]
    subprocess.run(command, check=True, capture_output=True)
    return model


def against_the_peer(
    source: Path, model: Path, prompt: int, decode: int, depth: int = 0, times: int = 1
) -> None:
    """Show the ratios of one amount of work."""
    ours = [sys.executable, "-m", "jitllm.cli.main", "speed", str(model), "-threads", THREADS]
    peer = [str(PEER), "-m", str(source), "-t", THREADS]
    for ratio in compare(
        lambda: jitllm_speed(ours, prompt, decode, depth, times),
        lambda: llama_bench(peer, prompt, decode, depth, times),
        PAIRS,
    ):
        print(f"\n{model.stem} pp{prompt} tg{decode} d{depth} {ratio}")
        assert ratio.pairs == PAIRS
