"""Memory that a budget leaves out is not taken, and the page cache holds nothing of a container."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitllm.formats.jlm import Container
from tests.models.native import opened
from tests.models.served import (
    cached_bytes,
    counts_direct_reads,
    fixed_bytes,
    in_child,
    peak_bytes,
    reset_peak,
    take_steps,
)
from tests.models.shapes import Shape, write_container

GIB = 1 << 30
LARGE = Shape(blocks=16, width=2048, ffn_width=8704, context=256)
NUM_STEPS = 2


def peak_of_a_run(path: str, maxmem_bytes: int, read_ahead: str) -> int:
    """The most memory that was resident after the model was loaded, in a process of its own."""

    async def measure() -> int:
        config = {"maxmem_bytes": maxmem_bytes, "read_ahead": read_ahead, "ctx_tokens": 256}
        async with opened(Path(path), **config) as loaded:
            reset_peak()
            await take_steps(loaded.engine, NUM_STEPS)
            return peak_bytes()

    return asyncio.run(measure())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A container with more than 1 GiB of blocks, gone after the tests."""
    folder = tmp_path_factory.mktemp("large")
    if shutil.disk_usage(folder).free < 4 * GIB:
        pytest.skip("less than 4 GiB are free for temporary files")
    yield write_container(folder / "large.jlm", LARGE)
    shutil.rmtree(folder)


@pytest.mark.slow
def test_memory_falls_by_what_a_budget_leaves_out(large: Path) -> None:
    with Container.open(large) as container:
        sizes = [extent.length for extent in container.header.blocks]
    assert sum(sizes) >= GIB
    fixed = int(in_child(fixed_bytes, path=large, num_steps=NUM_STEPS, ctx_tokens=256))

    def peak(frames: int, read_ahead: str = "off") -> int:
        budget = fixed + frames * max(sizes)
        return int(in_child(peak_of_a_run, path=large, maxmem_bytes=budget, read_ahead=read_ahead))

    whole = peak(len(sizes))
    assert whole > sum(sizes)
    for frames, read_ahead in ((1, "off"), (4, "on"), (8, "auto")):
        left_out = sum(sizes) - frames * max(sizes)
        saved = whole - peak(frames, read_ahead)
        print(f"{frames} frames, {read_ahead}: {saved / left_out:.3f} of what is left out")
        assert saved >= 0.95 * left_out
    if counts_direct_reads(large.parent):
        assert cached_bytes(large) == 0


@pytest.mark.parametrize("frames", [1, 8])
def test_the_page_cache_holds_nothing_of_a_container(tmp_path: Path, frames: int) -> None:
    if not counts_direct_reads(tmp_path):
        pytest.skip("this filesystem has no direct reads: its files may live in the page cache")
    path = write_container(tmp_path / "model.jlm", Shape(blocks=8))
    assert cached_bytes(path) == 0

    with Container.open(path) as container:
        assert container.check() == []
        budget = frames * max(extent.length for extent in container.header.blocks)
    budget += in_child(fixed_bytes, path=path, num_steps=NUM_STEPS, ctx_tokens=256)
    in_child(peak_of_a_run, path=path, maxmem_bytes=budget, read_ahead="on")
    assert cached_bytes(path) == 0


def test_the_page_cache_can_be_seen(tmp_path: Path) -> None:
    """The test above can fail: what was just written or read in the ordinary way is there."""
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    assert cached_bytes(path) >= 100_000
