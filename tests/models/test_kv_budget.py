"""A budget of keys and values costs reads, and changes no bit of any reply."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from jitllm.engine import Engine, Outputs, Request, Sampling
from jitllm.errors import JitllmError, PlacementError, UsageError
from tests.conftest import TinyModel
from tests.models.kv_memory import LongReply, columns_of, long_reply
from tests.models.native import Reply, opened, replies, reply
from tests.models.served import in_child
from tests.models.shapes import Shape, write_container

PROMPT = tuple(7 + (at * at * 31 + at * 17) % 300 for at in range(300))
REQUESTS = (
    Request(PROMPT, max_tokens=60),
    Request(PROMPT[:200], max_tokens=40, chunk_tokens=30),
    Request(PROMPT[50:180], max_tokens=80, sampling=Sampling(temperature=0.8, seed=3)),
    Request(PROMPT[:90], max_tokens=0, outputs=Outputs.ALL),
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever leaves memory is overwritten, so that a look at it would show."""
    monkeypatch.setenv("JITLLM_POISON", "1")


async def quiet(
    path: Path, page_tokens: int, requests: Sequence[Request], **choices: Any
) -> tuple[Any, int]:
    """Bits of each reply alone, without a budget; what a page set takes."""
    async with opened(path, page_size_tokens=page_tokens, threads=1, **choices) as loaded:
        set_bytes = columns_of(loaded).stride_bytes
        return [(await reply(loaded.engine, one)).bits for one in requests], set_bytes


@pytest.mark.parametrize(
    ("name", "page_tokens", "kv_type"),
    [
        *product(["llama", "gemma3", "mistral3"], [4, 16, 64], ["f16"]),
        *product(["llama", "gemma3"], [16], ["q8_0"]),
    ],
)
async def test_replies_alone_and_together_are_what_they_are_without_a_budget(
    name: str, page_tokens: int, kv_type: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model(name)
    expected, set_bytes = await quiet(path, page_tokens, REQUESTS, kv_type=kv_type)
    budget_bytes = max(40 // page_tokens, 1) * set_bytes
    choices = {"kv_budget_bytes": budget_bytes, "kv_cache": str(tmp_path), "kv_type": kv_type}
    async with opened(path, page_size_tokens=page_tokens, threads=2, **choices) as loaded:
        engine = loaded.engine
        for _ in range(2):  # the second time prefixes are there, and some of them in the file
            for asked, bits in zip(REQUESTS, expected, strict=True):
                assert (await reply(engine, asked)).bits == bits
        together = await replies(engine, REQUESTS * 2)
        assert [one.bits for one in together] == expected * 2
        stats = await engine.stats()
        assert stats.kv_spill.bytes_read > 0
        assert stats.kv_bytes == 0
    assert os.listdir(tmp_path) == []


async def test_experts_and_keys_and_values_are_brought_in_one_step(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("qwen3moe")
    expected, set_bytes = await quiet(path, 16, REQUESTS)
    choices = {"kv_budget_bytes": 3 * set_bytes, "kv_cache": str(tmp_path), "maxmem_bytes": 1}
    async with opened(path, page_size_tokens=16, threads=2, **choices) as loaded:
        together = await replies(loaded.engine, REQUESTS)
        assert [one.bits for one in together] == expected
        assert (await loaded.engine.stats()).kv_spill.bytes_read > 0


@pytest.mark.parametrize(("name", "num_read"), [("llama", 19 - 8), ("gemma3", 0)])
async def test_a_step_reads_what_is_not_in_memory(
    tiny_model: TinyModel, tmp_path: Path, name: str, num_read: int
) -> None:
    """Steps that differ in nothing but how many they are. Of 19 sets 8 may stay; where six of seven
    blocks have a short window, all of the seventh one have room."""
    path = tiny_model(name)
    _, set_bytes = await quiet(path, 16, ())
    choices = {"kv_budget_bytes": 10 * set_bytes, "kv_cache": str(tmp_path)}
    read = []
    for max_tokens in (3, 13):  # positions up to 300 are written: none takes a page more
        async with opened(path, page_size_tokens=16, **choices) as loaded:
            await reply(loaded.engine, Request(PROMPT[:289], max_tokens=max_tokens))
            read.append((await loaded.engine.stats()).kv_spill.bytes_read)
    assert read[1] - read[0] == 10 * num_read * set_bytes


async def test_a_conversation_goes_on_with_what_was_put_away(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("gemma3")
    turns = (Request(PROMPT[:200], max_tokens=20), Request(PROMPT, max_tokens=20))
    expected, set_bytes = await quiet(path, 16, turns)
    choices = {"kv_budget_bytes": 4 * set_bytes, "kv_cache": str(tmp_path)}
    async with opened(path, page_size_tokens=16, **choices) as loaded:
        assert (await reply(loaded.engine, turns[0])).bits == expected[0]
        assert (await loaded.engine.stats()).kv_spill.num_bytes > 0
        cached = 0
        async for delta in loaded.engine.generate(turns[1]):
            if delta.usage is not None:
                cached = delta.usage.cached_tokens
        assert cached >= 100
        assert (await reply(loaded.engine, turns[1])).bits == expected[1]


DEVICES = ("cpu:0", "cpu:1")


@pytest.mark.parametrize(("seed", "kv_type"), [(0, "f16"), (1, "f16"), (2, "q8_0")])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_blocks_move_with_what_was_put_away(
    name: str, seed: int, kv_type: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model(name)
    asked = [replace(one, max_tokens=100) for one in REQUESTS[:3]]
    expected, set_bytes = await quiet(path, 16, asked, kv_type=kv_type)
    choices: dict[str, Any] = {
        "devices": ",".join(DEVICES),
        "page_sizes": ((DEVICES[0], 16), (DEVICES[1], 4)),
        "threads": 2,
        "move_share": 0.99,
        "kv_budget_bytes": 6 * set_bytes,
        "kv_cache": str(tmp_path),
        "kv_type": kv_type,
    }
    dice, num_moves = random.Random(seed), 0
    async with opened(path, strict=True, **choices) as loaded:
        engine = loaded.engine
        tasks = [asyncio.create_task(reply(engine, one)) for one in asked]
        while not all(task.done() for task in tasks):
            blocks = [b for b in range(loaded.graph.num_blocks) if dice.random() < 0.5]
            if blocks:
                await _moved(engine, blocks, dice.choice(DEVICES))
                num_moves += 1
            await asyncio.sleep(0.01)
        assert [(await task).bits for task in tasks] == expected
        assert (await engine.stats()).kv_spill.bytes_read > 0
    assert num_moves > 3


async def _moved(engine: Engine, blocks: list[int], to: str) -> None:
    with suppress(PlacementError):  # they are there
        await engine.move(blocks, to)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
async def test_parked_requests_come_back_to_a_budget(
    tiny_model: TinyModel, tmp_path: Path, kv_type: str
) -> None:
    path = tiny_model("llama")
    asked = replace(REQUESTS[0], max_tokens=120, name="long")
    expected, set_bytes = await quiet(path, 16, [asked], kv_type=kv_type)
    choices = {"kv_budget_bytes": 4 * set_bytes, "kv_cache": str(tmp_path), "kv_type": kv_type}
    async with opened(path, page_size_tokens=16, **choices) as loaded:
        whole = Reply()
        async for delta in loaded.engine.generate(replace(asked, logits=True)):
            whole.add(delta)
            if len(whole.ids) in (20, 50, 80):
                await loaded.engine.park("long")
                await loaded.engine.resume("long")
        stats = await loaded.engine.stats()
        assert whole.bits == expected[0]
        assert stats.park_totals.resumes == 3
        assert stats.kv_spill.bytes_read > 0


def failing(code: int, call: Any, num_times: int) -> Any:
    """A system call that fails so many times, and works after that."""
    left = [num_times]

    def attempt(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(code, os.strerror(code))
        return call(*arguments)

    return attempt


SHORT = [Request(PROMPT[start : start + 30], max_tokens=30) for start in (100, 150)]
FOR_EVER = 1 << 30


async def test_a_full_disk_ends_the_reply_that_needs_it_and_no_other(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("llama")
    expected, set_bytes = await quiet(path, 16, [REQUESTS[0], *SHORT])
    choices = {"kv_budget_bytes": 12 * set_bytes, "kv_cache": str(tmp_path)}
    async with opened(path, page_size_tokens=16, **choices) as loaded:
        engine = loaded.engine
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwrite", failing(errno.ENOSPC, os.pwrite, FOR_EVER))
            long = asyncio.create_task(reply(engine, REQUESTS[0]))
            shorts = await replies(engine, SHORT)
            with pytest.raises(JitllmError, match="needs .* and its disk has .* free"):
                await long
            assert [one.bits for one in shorts] == expected[1:]
        assert (await reply(engine, REQUESTS[0])).bits == expected[0]


def on_disk_of(num_bytes: int) -> Any:
    """`os.pwrite` to files on a disk that takes no more in a file than this."""
    write = os.pwrite

    def attempt(fd: int, data: Any, offset: int) -> int:
        try:
            is_new = os.lseek(fd, offset, os.SEEK_DATA) > offset
        except OSError:  # there is none from there on
            is_new = True
        if is_new and os.fstat(fd).st_blocks * 512 + len(data) > num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, offset)

    return attempt


async def test_what_is_only_kept_makes_room_on_a_full_disk(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reply ends because the disk is full of prefixes of earlier ones."""
    path = tiny_model("llama")
    requests = [Request(PROMPT[at : at + 200], max_tokens=10) for at in (0, 50, 100)]
    expected, set_bytes = await quiet(path, 16, requests)
    choices = {"kv_budget_bytes": 6 * set_bytes, "kv_cache": str(tmp_path)}
    async with opened(path, page_size_tokens=16, **choices) as loaded:
        monkeypatch.setattr(os, "pwrite", on_disk_of(14 * set_bytes))
        for request, bits in zip(requests, expected, strict=True):
            assert (await reply(loaded.engine, request)).bits == bits


@pytest.mark.parametrize("num_times", [1, 3, FOR_EVER])
async def test_what_cannot_be_read_is_computed_again(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_times: int
) -> None:
    """A few times; and nobody else hears of it."""
    path = tiny_model("llama")
    expected, set_bytes = await quiet(path, 16, [REQUESTS[0], *SHORT])
    choices = {"kv_budget_bytes": 12 * set_bytes, "kv_cache": str(tmp_path)}
    async with opened(path, page_size_tokens=16, **choices) as loaded:
        engine = loaded.engine
        first = await reply(engine, REQUESTS[0])
        assert (await engine.stats()).kv_spill.num_bytes > 0  # of a prefix that is kept
        with monkeypatch.context() as broken:
            broken.setattr(os, "preadv", failing(errno.EIO, os.preadv, num_times))
            long = asyncio.create_task(reply(engine, REQUESTS[0]))
            shorts = await replies(engine, SHORT)
            if num_times == FOR_EVER:
                with pytest.raises(JitllmError, match="beyond -kv-budget in .*Input/output error"):
                    await long
            else:
                assert (await long).bits == expected[0]
            assert [one.bits for one in shorts] == expected[1:]
        assert (await reply(engine, REQUESTS[0])).bits == first.bits == expected[0]


async def test_steps_that_follow_each_other_by_themselves_end_where_a_read_fails(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("llama")
    expected, set_bytes = await quiet(path, 16, [REQUESTS[0]])
    choices = {"kv_budget_bytes": 4 * set_bytes, "kv_cache": str(tmp_path)}
    async with opened(path, page_size_tokens=16, **choices) as loaded:
        whole = Reply()
        async for delta in loaded.engine.generate(REQUESTS[0]):
            whole.add(delta)
            if len(whole.ids) in (10, 40):
                monkeypatch.setattr(os, "preadv", failing(errno.EIO, os.preadv, 1))
    assert tuple(whole.ids) == expected[0][: len(whole.ids)]
    assert len(whole.ids) == REQUESTS[0].max_tokens


async def test_a_budget_that_holds_nothing_or_has_no_store_is_an_error(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="-kv-budget needs a folder .*; name one with -kv-cache"):
        async with opened(tiny_model("llama"), kv_budget_bytes=1 << 20):
            pass
    with pytest.raises(UsageError, match=r"-kv-budget 100 B does not hold 64 positions .* least"):
        async with opened(tiny_model("llama"), kv_budget_bytes=100, kv_cache=str(tmp_path)):
            pass
    (tmp_path / "file").write_text("in the way")
    folder = str(tmp_path / "file")
    with pytest.raises(JitllmError, match="cannot go to .*; name another folder"):
        async with opened(tiny_model("llama"), kv_budget_bytes=1 << 20, kv_cache=folder):
            pass


@pytest.mark.parametrize(
    ("name", "num_tokens", "max_tokens"),
    [
        ("random", 3008, 60),
        pytest.param("random", 24000, 60, marks=pytest.mark.slow),
        pytest.param("gemma", 8000, 12, marks=pytest.mark.slow),
    ],
)
def test_a_tenth_of_the_memory_holds_a_long_prompt(
    name: str,
    num_tokens: int,
    max_tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """What the kernel says is resident, against the budget; and the same bits. A token reads what
    is not resident, and nothing else."""
    monkeypatch.delenv("JITLLM_POISON")  # it keeps what was given back
    if name == "gemma":
        path = request.getfixturevalue("gemma_model")
    else:
        path = write_container(tmp_path / "long.jlm", Shape(blocks=2, width=128, context=24576))
    asked = {"path": path, "num_tokens": num_tokens}
    config = {"maxmem_bytes": 1 << 30, "share_prefixes": False}
    whole = LongReply(**in_child(long_reply, **asked, max_tokens=max_tokens, choices=config))
    kv_bytes = -(-num_tokens // 64) * whole.set_bytes
    assert whole.peak_bytes >= kv_bytes * 0.99
    assert whole.absent_bytes == 0
    budget = {"kv_budget_bytes": kv_bytes // 10, "kv_cache": str(tmp_path / "spilled")}
    short, tight = (
        LongReply(**in_child(long_reply, **asked, max_tokens=n, choices={**config, **budget}))
        for n in (6, max_tokens)  # positions of one page
    )
    print(f"{num_tokens} tokens, {kv_bytes} bytes: {tight}")
    assert tight.digest == whole.digest
    assert tight.spilled_bytes > 0.85 * kv_bytes
    assert tight.peak_bytes <= kv_bytes // 10 + whole.set_bytes
    num_more = max_tokens - 6
    assert tight.bytes_read - short.bytes_read == num_more * tight.absent_bytes > 0
