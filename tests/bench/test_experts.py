"""Models that are larger than the memory that there is, against another engine and ourselves.

Each engine runs in a control group of its own. JITLLM_BENCH_SCALE (1) makes models, budgets and
groups smaller; JITLLM_PEER_BENCH names llama.cpp's `llama-bench`, JITLLM_BENCH_PAIRS the number of
pairs (4), JITLLM_BENCH_FOLDER where 13 GB find room (a temporary folder).
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import pytest

from jitllm.compose import open_engine
from jitllm.config import EngineConfig
from jitllm.engine import Request
from jitllm.formats.jlm import Container
from jitllm.units import format_rate, format_size
from tests.bench.groups import Group, memory_group
from tests.bench.paired import Ratio, compare
from tests.bench.random_gguf import Shape, write_models
from tests.models.served import _MAIN, ROOT, read_bytes

SCALE = float(os.environ.get("JITLLM_BENCH_SCALE", "1"))
PAIRS = int(os.environ.get("JITLLM_BENCH_PAIRS", "4"))
PEER = os.environ.get("JITLLM_PEER_BENCH")
THREADS = 2
GB = 10**9
FIXED_BYTES, PROCESS_BYTES = 150_000_000, 400_000_000
"""What does not get smaller with a model: scratch memory; the interpreter with its libraries."""

MIXTURE = Shape(blocks=max(round(36 * SCALE), 2), ffn_width=768, experts=64, used=8)
DENSE = Shape(blocks=max(round(72 * SCALE), 2), ffn_width=14336)
NUM_TOKENS = 16
PEER_FLAGS = ["--repack", "0"]
"""It may not make a copy of the weights for its kernels, as it does by itself: the group is too
small for one, and the system kills it."""

pytestmark = [pytest.mark.bench, pytest.mark.timeout(7200)]


def scaled(num_gb: float) -> int:
    """Bytes of a budget."""
    return int(num_gb * GB * SCALE + FIXED_BYTES * (1 - SCALE))


def group_bytes(num_gb: float) -> int:
    """Of a group."""
    return scaled(num_gb) + int(PROCESS_BYTES * (1 - SCALE))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory(dir=os.environ.get("JITLLM_BENCH_FOLDER")) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def mixture(folder: Path) -> tuple[Path, Path]:
    (folder / "mixture").mkdir()
    return write_models(folder / "mixture", MIXTURE)


# --- in a process of its own --------------------------------------------------------------------


async def decode(
    path: str, experts: Any, maxmem_bytes: int, num_tokens: int, warm_up: int
) -> dict[str, Any]:
    """Tokens one by one, after others: their rate, and what was read, by our count and the
    kernel's."""
    dice = random.Random(1)
    config = EngineConfig(experts=experts, maxmem_bytes=maxmem_bytes, threads=THREADS)
    loaded = await open_engine(Path(path), config)
    try:
        for num in (warm_up, num_tokens):
            before, kernel = (await loaded.engine.stats()).pages, read_bytes()
            began_s = perf_counter()
            # Random tokens, as the peer's benchmark has them: replies of random weights repeat
            # themselves, and so would their experts.
            tokens = tuple(dice.randrange(5, MIXTURE.vocab) for _ in range(num))
            request = Request(tokens, max_tokens=1, chunk_tokens=1)
            async for delta in loaded.engine.generate(request):
                assert delta.error is None, delta.error
            seconds = perf_counter() - began_s
        after, kernel = (await loaded.engine.stats()).pages, read_bytes() - kernel
        found: dict[str, Any] = {
            "decode": num_tokens / seconds,
            "bytes_read": after.bytes_read - before.bytes_read,
            "kernel_bytes": kernel,
            "seconds": seconds,
        }
        if before.experts and after.experts:
            found["reads"] = after.experts.reads - before.experts.reads
            found["hits"] = after.experts.hits - before.experts.hits
            found["wait_s"] = after.experts.wait_s - before.experts.wait_s
        return found
    finally:
        await loaded.close()


def decode_in_child(**arguments: Any) -> dict[str, Any]:
    """`decode`, called by name."""
    import asyncio

    return asyncio.run(decode(**arguments))


def ours(group: Group, path: Path, experts: str, maxmem_bytes: int) -> dict[str, Any]:
    arguments = {
        "path": str(path),
        "experts": experts,
        "maxmem_bytes": maxmem_bytes,
        "num_tokens": NUM_TOKENS,
        "warm_up": NUM_TOKENS,
    }
    call = json.dumps([__name__, "decode_in_child", arguments])
    output = group.run([sys.executable, "-c", _MAIN], input=call, cwd=str(ROOT))
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def peers(group: Group, path: Path) -> dict[str, float]:
    assert PEER
    flags = ["-t", THREADS, "-p", 0, "-n", NUM_TOKENS, "-r", 1, "-o", "json"]
    output = group.run([PEER, "-m", str(path), *PEER_FLAGS, *map(str, flags)])
    return {"decode": json.loads(output)[0]["avg_ts"]}


def rate(found: dict[str, Any]) -> dict[str, float]:
    return {"decode": found["decode"]}


# --- mixtures -----------------------------------------------------------------------------------


def test_a_mixture_reads_the_absent_experts(mixture: tuple[Path, Path]) -> None:
    _, container = mixture
    with Container.open(container) as opened:
        extents = [expert.extent for expert in opened.header.experts]
        size, each = opened.header.weight_bytes, extents[0].end - extents[0].offset
    with memory_group(group_bytes(3)) as group:
        found = ours(group, container, "apart", scaled(2))
    needed = found["reads"] * each
    print(
        f"\n{format_size(size)} under {format_size(scaled(2))}: {found['decode']:.2f} tok/s, "
        f"{found['hits'] / (found['hits'] + found['reads']):.1%} of experts were there, "
        f"{format_size(needed / NUM_TOKENS)} of absent experts a token, kernel's count over that "
        f"{found['kernel_bytes'] / needed:.4f}, {format_rate(needed / found['seconds'])}, "
        f"{found['wait_s'] / found['seconds']:.0%} of the time waited"
    )
    assert found["hits"] > 0
    assert 1.0 <= found["kernel_bytes"] / needed <= 1.02


def test_a_mixture_whose_experts_come_with_their_blocks(mixture: tuple[Path, Path]) -> None:
    """Apart against blocks."""
    _, container = mixture
    with memory_group(group_bytes(3)) as group:
        ratios = compare(
            lambda: rate(ours(group, container, "apart", scaled(2))),
            lambda: rate(ours(group, container, "blocks", scaled(2))),
            PAIRS,
        )
    show("apart over blocks", ratios)
    assert ratios[0].median >= 3 or SCALE < 1


@pytest.mark.skipif(not PEER, reason="JITLLM_PEER_BENCH is not set")
def test_a_mixture_against_the_peer(mixture: tuple[Path, Path]) -> None:
    against_the_peer(mixture, "apart", group_gb=3, least=3)


# --- dense models -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(folder: Path) -> tuple[Path, Path]:
    (folder / "dense").mkdir()
    return write_models(folder / "dense", DENSE)


def read_raw(path: str, num_bytes: int) -> float:
    """Bytes a second of a loop of direct reads, many in flight, over a file from its start."""
    from jitllm.devices.memory import HostMemory
    from jitllm.formats.reader import Reader

    piece = 64 << 20
    with Reader(path) as reader, HostMemory().reserve(piece) as span:
        began_s = perf_counter()
        for offset in range(0, num_bytes, piece):
            reader.read(offset, piece, span.view())
        return num_bytes / (perf_counter() - began_s)


def raw(group: Group, path: Path) -> float:
    arguments = {"path": str(path), "num_bytes": path.stat().st_size // (64 << 20) * (64 << 20)}
    call = json.dumps([__name__, "read_raw", arguments])
    output = group.run([sys.executable, "-c", _MAIN], input=call, cwd=str(ROOT))
    return float(output.splitlines()[-1])


def test_a_dense_model_reads_as_fast_as_the_disk(dense: tuple[Path, Path]) -> None:
    _, container = dense
    with memory_group(group_bytes(2.5)) as group:
        before = raw(group, container)
        found = ours(group, container, "auto", scaled(2))
        after = raw(group, container)
    useful = found["bytes_read"] / found["seconds"]
    print(
        f"\n{format_size(container.stat().st_size)} under {format_size(scaled(2))}: "
        f"{found['decode']:.2f} tok/s, {format_rate(useful)} read while decoding, a plain loop "
        f"{format_rate(before)} before and {format_rate(after)} after: "
        f"{useful / max(before, after):.2f}"
    )
    assert useful >= 0.85 * max(before, after) or SCALE < 1


@pytest.mark.skipif(not PEER, reason="JITLLM_PEER_BENCH is not set")
def test_a_dense_model_against_the_peer(dense: tuple[Path, Path]) -> None:
    against_the_peer(dense, "auto", group_gb=2.5, least=1.5)


def against_the_peer(
    models: tuple[Path, Path], experts: str, *, group_gb: float, least: float
) -> None:
    """Both engines alternate, in groups of so much memory."""
    source, container = models
    with memory_group(group_bytes(group_gb)) as group:
        ratios = compare(
            lambda: rate(ours(group, container, experts, scaled(2))),
            lambda: peers(group, source),
            PAIRS,
        )
    show("over the peer", ratios)
    assert ratios[0].median >= least or SCALE < 1


def show(what: str, ratios: list[Ratio]) -> None:
    for ratio in ratios:
        print(f"\n{what}, {ratio}")
