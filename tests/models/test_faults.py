"""Files that fail while they are paged, and clients that leave: the engine goes on.

One request ends, and whatever it held is given back: leases, pins, pages of KV, its room in the
budget, and what the scheduler remembers.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jitllm.compose import Loaded
from jitllm.engine import Finish, Request
from jitllm.errors import ContextOverflow, PageError
from jitllm.formats.jlm import Extent
from jitllm.formats.reader import Reader
from tests.conftest import TinyModel
from tests.models.native import opened

PROMPT = (1, 259, 75, 260, 269)


@pytest.fixture
def whole(model: Path) -> bytes:
    """What the container holds before it is damaged."""
    return model.read_bytes()


@pytest.fixture
def model(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A container of three blocks that a test may damage."""
    return Path(shutil.copy(tiny_model("llama", "q8_0"), tmp_path / "m.jlm"))


@asynccontextmanager
async def paging(model: Path, **choices: Any) -> AsyncIterator[Loaded]:
    """An engine with room for one block, which holds nothing in the end."""
    async with opened(model, strict=True, maxmem_bytes=1, **choices) as loaded:
        yield loaded
        await check_nothing_is_held(loaded)


def actor(ref: Any) -> Any:
    """The actor behind the ref of an embedded runtime."""
    return ref._cell._actor


async def check_nothing_is_held(loaded: Loaded) -> None:
    engine: Any = loaded.engine
    site = engine._sites["cpu:0"]
    pager, device, scheduler = (actor(ref) for ref in (site.pager, site.device, engine._scheduler))
    async with asyncio.timeout(60):
        while scheduler._queues.replies:  # a cancelled request ends between two steps
            await engine.stats()
    stats = await engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert len(pager._leases) == 0
    assert sum(pager._residency._pins.values()) + sum(pager._residency._kept.values()) == 0
    assert not [name for name in pager._frames.reservations if "kv" in name]
    pager._residency.check()
    assert len(device._seats) == 0
    assert device._pages.num_free == device._pages.capacity
    device._pages.check()
    assert scheduler._queues.cancelled == set()
    assert stats.kv_bytes == 0


async def tokens_of(loaded: Loaded, num: int = 6) -> list[int]:
    """A reply; raises the error that it ended with."""
    tokens: list[int] = []
    async for delta in loaded.engine.generate(Request(PROMPT, max_tokens=num)):
        tokens += delta.tokens
        if delta.error is not None:
            assert delta.finish is Finish.ERROR
            raise delta.error
    assert len(tokens) == num
    return tokens


# --- files that fail --------------------------------------------------------------------------


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


class Fault:
    """Reads of one extent fail from the `after`-th on, while `is_on`."""

    def __init__(self, extent: Extent, after: int = 0) -> None:
        self.extent = extent
        self.is_on = True
        self.after = after
        self._read_once = Reader._read_once

    def install(self, patch: pytest.MonkeyPatch, read: Any) -> None:
        patch.setattr(Reader, "_read_once", lambda reader, *args: read(reader, *args))

    def hits(self, offset: int) -> bool:
        """Whether this read is one that fails."""
        inside = self.extent.offset <= offset < self.extent.end
        self.after -= inside
        return self.is_on and inside and self.after < 0

    def io_error(self, reader: Reader, into: memoryview, offset: int) -> int:
        """The disk cannot read this."""
        if self.hits(offset):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._read_once(reader, into, offset)

    def short_read(self, reader: Reader, into: memoryview, offset: int) -> int:
        """The file ends here."""
        return 0 if self.hits(offset) else self._read_once(reader, into, offset)


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("kind", "problem"), [("io_error", "read failed: Input/output error"), ("short_read", "short")]
)
@pytest.mark.parametrize("read_ahead", ["off", "on"])
async def test_a_read_that_fails_ends_one_request(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    block: int,
    after: int,
    kind: str,
    problem: str,
    read_ahead: str,
) -> None:
    async with paging(model, read_ahead=read_ahead) as loaded:
        sound = await tokens_of(loaded)
        extent = loaded.header.blocks[block]
        fault = Fault(extent, after)
        fault.install(monkeypatch, getattr(fault, kind))
        with pytest.raises(PageError, match=problem) as caught:
            await tokens_of(loaded)
        assert caught.value.path == str(model)
        assert extent.offset <= caught.value.offset < extent.end
        assert str(caught.value.offset) in str(caught.value)
        with pytest.raises(PageError, match=problem):
            await tokens_of(loaded)
        await check_nothing_is_held(loaded)
        fault.is_on = False
        assert await tokens_of(loaded) == sound


async def test_a_fault_in_the_middle_comes_after_the_tokens_before_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paging(model, read_ahead="off") as loaded:
        sound = await tokens_of(loaded)
        fault = Fault(loaded.header.blocks[1], after=3)
        fault.install(monkeypatch, fault.io_error)
        deltas = [d async for d in loaded.engine.generate(Request(PROMPT, max_tokens=6))]
        tokens = [token for delta in deltas for token in delta.tokens]
        assert tokens == sound[:3]
        assert [delta.finish for delta in deltas] == [None, None, None, Finish.ERROR]
        assert isinstance(deltas[-1].error, PageError)
        assert deltas[-1].usage is not None


async def test_a_file_that_is_cut_while_it_is_paged(model: Path, whole: bytes) -> None:
    async with paging(model) as loaded:
        sound = await tokens_of(loaded)
        extent = loaded.header.blocks[2]
        os.truncate(model, extent.offset + 5000)
        with pytest.raises(PageError, match="short read") as caught:
            await tokens_of(loaded)
        assert (caught.value.path, caught.value.offset) == (str(model), extent.offset + 5000)
        overwrite(model, 0, whole)
        assert await tokens_of(loaded) == sound


@pytest.mark.parametrize("block", [0, 2])
async def test_a_block_that_is_not_what_was_written(model: Path, whole: bytes, block: int) -> None:
    async with paging(model) as loaded:
        extent = loaded.header.blocks[block]
        at = extent.offset + 100
        overwrite(model, at, bytes(byte ^ 1 for byte in whole[at : at + 4]))
        for _ in range(2):
            with pytest.raises(PageError, match="checksum") as caught:
                await tokens_of(loaded)
            assert (caught.value.path, caught.value.offset) == (str(model), extent.offset)
        overwrite(model, 0, whole)
        assert len(await tokens_of(loaded)) == 6


async def test_everybody_in_a_failed_step_is_told(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paging(model) as loaded:
        sound = await tokens_of(loaded)
        fault = Fault(loaded.header.blocks[1], after=4)
        fault.install(monkeypatch, fault.io_error)
        waiting = [tokens_of(loaded) for _ in range(12)]  # more than a step has rows
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(r, PageError) or r == sound for r in results), results
        assert any(isinstance(r, PageError) for r in results)
        fault.is_on = False
        again = await asyncio.gather(*(tokens_of(loaded) for _ in range(12)))
        assert again == [sound] * 12


# --- requests that are refused, and clients that leave ----------------------------------------


async def test_a_prompt_beyond_the_context_is_refused_and_costs_nothing(model: Path) -> None:
    async with paging(model, ctx_tokens=8) as loaded:
        with pytest.raises(ContextOverflow, match="9 tokens and the context holds 8") as caught:
            async for _ in loaded.engine.generate(Request((1,) * 9)):
                pass
        assert (caught.value.num_tokens, caught.value.ctx_tokens) == (9, 8)
        await check_nothing_is_held(loaded)
        assert len(await tokens_of(loaded, 3)) == 3


async def test_clients_that_leave_at_any_moment_leave_nothing(model: Path) -> None:
    rng = random.Random(5)
    async with paging(model) as loaded:
        sound = await tokens_of(loaded)

        async def leave(turns: int) -> None:
            """Cancelled while it waits: before it is taken in, for a token, for its end."""
            task = asyncio.create_task(tokens_of(loaded, rng.randrange(1, 40)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

        async def stop_reading(num_deltas: int) -> None:
            """Closes the stream between two tokens."""
            async with aclosing(loaded.engine.generate(Request(PROMPT))) as stream:  # type: ignore[type-var]
                for _ in range(num_deltas):
                    await anext(stream)

        async def run_out_of_time(seconds: float) -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(seconds):
                    await tokens_of(loaded, 500)

        for turns in range(40):
            await leave(turns)
        everybody = [
            *(leave(rng.randrange(400)) for _ in range(20)),
            *(stop_reading(rng.randrange(4)) for _ in range(8)),
            *(run_out_of_time(rng.random() / 50) for _ in range(8)),
        ]
        rng.shuffle(everybody)
        await asyncio.gather(*everybody)
        await check_nothing_is_held(loaded)
        assert await tokens_of(loaded) == sound


async def test_closing_ends_what_runs(model: Path) -> None:
    async with opened(model, maxmem_bytes=1) as loaded:
        tasks = [asyncio.create_task(tokens_of(loaded, 400)) for _ in range(3)]
        while not (await loaded.engine.stats()).running:
            pass
    done, waiting = await asyncio.wait(tasks, timeout=60)
    assert not waiting
    assert all(task.exception() is not None for task in done)
