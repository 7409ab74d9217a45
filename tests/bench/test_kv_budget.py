"""What a budget of keys and values costs the tokens of a long history, beside the disk's own rate.

Real weights (`gemma_model`), one engine with a tenth of the keys and values in memory and one with
all of them. Run alone on a quiet machine.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from jitllm.compose import Loaded
from jitllm.engine import Request
from jitllm.memory.spill import NUM_IN_FLIGHT, READ_BYTES
from tests.bench.paired import compare
from tests.models.kv_memory import columns_of
from tests.models.native import opened

pytestmark = pytest.mark.bench

HISTORY, NUM_TOKENS, PAIRS = 8000, 64, 6


async def decoded(loaded: Loaded, prompt: tuple[int, ...]) -> dict[str, float]:
    """Tokens a second, and what they read. Of the prompt little has to be computed again."""
    before = (await loaded.engine.stats()).kv_spill.bytes_read
    seconds = 0.0
    async for delta in loaded.engine.generate(Request(prompt, max_tokens=NUM_TOKENS)):
        if delta.usage is not None:
            seconds = delta.usage.decode_s
    read = (await loaded.engine.stats()).kv_spill.bytes_read - before
    return {"tokens": (NUM_TOKENS - 1) / seconds, "read": read / NUM_TOKENS}


def disk_rate(folder: Path) -> float:
    """Bytes a second of direct reads of a file, as many at once as pages are read."""
    count = 64
    path = folder / "raw"
    path.write_bytes(os.urandom(count * READ_BYTES))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        os.fsync(fd)
        into = [mmap.mmap(-1, READ_BYTES) for _ in range(count)]
        for view in into:
            view.write(bytes(READ_BYTES))
        with ThreadPoolExecutor(NUM_IN_FLIGHT) as readers:
            began_s = perf_counter()
            list(readers.map(lambda n: os.preadv(fd, [into[n]], n * READ_BYTES), range(count)))
            return count * READ_BYTES / (perf_counter() - began_s)
    finally:
        os.close(fd)
        path.unlink()


def test_tokens_of_a_history_that_is_ten_times_its_budget(
    gemma_model: Path, tmp_path: Path
) -> None:
    prompt = tuple(7 + (at * at * 31 + at * 17) % 200_000 for at in range(HISTORY))
    with asyncio.Runner() as runner:

        def engine(**choices: Any) -> Any:
            context = opened(gemma_model, maxmem_bytes=2 << 30, max_batch=1, **choices)
            return context, runner.run(context.__aenter__())

        free_context, free = engine()
        kv_bytes = columns_of(free).stride_bytes * HISTORY // free.config.page_size_tokens
        tight_context, tight = engine(kv_budget_bytes=kv_bytes // 10, kv_cache=str(tmp_path))
        try:
            [read, tokens] = compare(
                lambda: runner.run(decoded(tight, prompt)),
                lambda: runner.run(decoded(free, prompt)) | {"read": 1.0},
                PAIRS,
            )
        finally:
            runner.run(tight_context.__aexit__(None, None, None))
            runner.run(free_context.__aexit__(None, None, None))
    rate = disk_rate(tmp_path)
    print(f"\n{tokens}\n{read.a / 1e6:.2f} MB a token, {read.a * tokens.a / 1e9:.2f} GB/s", end="")
    print(f"; direct reads of the disk {rate / 1e9:.2f} GB/s")
    assert read.a > 0
