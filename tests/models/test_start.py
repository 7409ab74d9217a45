"""Opening a model reads its header and its dense region, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from jitllm.devices.memory import round_up
from jitllm.formats.jlm import Container
from tests.actors.containers import drop_from_page_cache
from tests.conftest import TinyModel
from tests.models.native import opened
from tests.models.served import counts_direct_reads, in_child, read_bytes, take_steps
from tests.models.shapes import Shape, write_container


def bytes_of_opening(path: str) -> tuple[int, int, int]:
    """What the kernel read to open a model, what the engine says, and what all blocks cost then.

    The second opening is measured: the first one brings programs and kernels into the page cache.
    """

    async def measure() -> tuple[int, int, int]:
        async with opened(Path(path)):
            pass
        before = read_bytes()
        async with opened(Path(path)) as loaded:
            opening = read_bytes() - before
            stated = (await loaded.engine.stats()).pages.bytes_read
            await take_steps(loaded.engine, 1)
            return opening, stated, read_bytes() - before - opening

    return asyncio.run(measure())


@pytest.mark.parametrize("name", ["deep", "gemma3", "llama"])
def test_opening_reads_the_header_and_the_dense_region(
    name: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    if not counts_direct_reads(tmp_path):
        pytest.skip("this filesystem has no direct reads that the kernel counts (tmpfs has none)")
    path = tmp_path / "model.jlm"
    if name == "deep":
        write_container(path, Shape(blocks=32))
    else:
        path = tiny_model(name)
    with Container.open(path) as container:
        header_bytes = container.bytes_read
        dense_bytes = round_up(container.header.dense.length)
        block_bytes = sum(round_up(extent.length) for extent in container.header.blocks)
        # The factors of the rotary frequencies shape the graph, so they are read before the rest.
        has_factors = any(tensor.role == "rope_freqs" for tensor in container.header.tensors)
    assert has_factors == (name == "llama")
    drop_from_page_cache(path)

    opening, stated, blocks = in_child(bytes_of_opening, path=path)
    assert opening == header_bytes + dense_bytes + (4096 if has_factors else 0)
    assert stated == dense_bytes
    assert blocks == block_bytes
