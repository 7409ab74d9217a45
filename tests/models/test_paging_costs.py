"""Page-ins are the optimum of a cyclic scan, and the kernel counts the same bytes."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jitllm.formats.jlm import Container
from tests.models.native import opened
from tests.models.served import (
    Reading,
    counts_direct_reads,
    fixed_bytes,
    in_child,
    settled,
    take_steps,
)
from tests.models.shapes import Shape, write_container

NUM_BLOCKS = 8
SETTINGS: dict[str, Any] = {"ctx_tokens": 256, "threads": 1}


def num_steps(num_blocks: int) -> int:
    """A multiple of N-1, after which the pattern of a cyclic scan repeats."""
    return 4 * (num_blocks - 1)


def read_in_steps(path: str, maxmem_bytes: int, read_ahead: str, steps: int) -> dict[str, Any]:
    """What `steps` steps read, after as many others. Runs in a process of its own."""

    async def measure() -> dict[str, Any]:
        settings = {**SETTINGS, "maxmem_bytes": maxmem_bytes, "read_ahead": read_ahead}
        async with opened(Path(path), **settings) as loaded:
            warm_up = await take_steps(loaded.engine, steps)
            before = await settled(loaded.engine)
            tokens = await take_steps(loaded.engine, steps)
            after = await settled(loaded.engine)
            assert tokens == warm_up
            return {**asdict(after.since(before)), "tokens": tokens}

    return asyncio.run(measure())


@cache
def fixed_part(path: Path, steps: int) -> int:
    return int(in_child(fixed_bytes, path=path, num_steps=steps, **SETTINGS))


def measured(path: Path, frames: int, read_ahead: str) -> tuple[Reading, list[int]]:
    """What a budget of `frames` of the largest extents makes a steady decode read."""
    with Container.open(path) as container:
        extents = container.header.blocks
    steps = num_steps(len(extents))
    budget = fixed_part(path, steps) + frames * max(extent.length for extent in extents)
    found = in_child(
        read_in_steps, path=path, maxmem_bytes=budget, read_ahead=read_ahead, steps=steps
    )
    return Reading(found["page_ins"], found["bytes_read"], found["kernel_bytes"]), found["tokens"]


def optimum(num_blocks: int, frames: int) -> float:
    """Page-ins of a scan of `num_blocks` blocks when `frames` of them are kept."""
    return num_blocks * (num_blocks - frames) / (num_blocks - 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paging")
    return write_container(folder / "model.jlm", Shape(blocks=NUM_BLOCKS))


@pytest.mark.parametrize("read_ahead", ["off", "on", "auto"])
@pytest.mark.parametrize("frames", [1, NUM_BLOCKS // 2, NUM_BLOCKS - 1])
def test_a_budget_costs_the_optimum_of_a_cyclic_scan(
    path: Path, frames: int, read_ahead: str
) -> None:
    reading, _ = measured(path, frames, read_ahead)
    kept = frames if read_ahead == "off" else frames - 1
    allowed = 1.01 * num_steps(NUM_BLOCKS) * min(optimum(NUM_BLOCKS, kept), NUM_BLOCKS)
    assert 0 < reading.page_ins <= allowed


def test_what_fits_is_read_once(path: Path) -> None:
    for read_ahead in ("off", "on"):
        reading, _ = measured(path, NUM_BLOCKS, read_ahead)
        assert (reading.page_ins, reading.bytes_read) == (0, 0)


def test_a_budget_changes_no_token(path: Path) -> None:
    replies = [measured(path, frames, "on")[1] for frames in (1, 3, NUM_BLOCKS)]
    assert replies[0] == replies[1] == replies[2]


@pytest.mark.parametrize("read_ahead", ["off", "on"])
def test_the_kernel_counts_the_same_bytes(path: Path, read_ahead: str) -> None:
    need_counted_reads(path)
    reading, _ = measured(path, 3, read_ahead)
    assert reading.bytes_read > 0
    assert reading.kernel_bytes == pytest.approx(reading.bytes_read, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("read_ahead", ["off", "on"])
def test_a_real_model_costs_the_same(gemma_model: Path, read_ahead: str) -> None:
    """Its blocks differ in size: room for F of the largest may hold one more of the others."""
    need_counted_reads(gemma_model)
    reading, _ = measured(gemma_model, 9, read_ahead)
    kept = 9 if read_ahead == "off" else 8
    assert 0 < reading.page_ins <= 1.01 * num_steps(18) * optimum(18, kept)
    assert reading.kernel_bytes == pytest.approx(reading.bytes_read, rel=0.001)


def need_counted_reads(path: Path) -> None:
    if not counts_direct_reads(path.parent):
        pytest.skip("this filesystem has no direct reads that the kernel counts (tmpfs has none)")
