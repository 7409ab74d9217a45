"""How much memory keys and values really take, for processes of their own: the kernel is asked."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jitllm.compose import Loaded
from jitllm.devices.memory import PAGE_BYTES
from jitllm.engine import Request
from jitllm.kernels.kv_write import page_bytes
from jitllm.memory.columns import Columns
from jitllm.memory.page_memory import VirtualPages
from tests.models.native import Reply, opened


def columns_of(loaded: Loaded) -> Columns:
    """What a page set of a model takes."""
    config, shapes = loaded.config, loaded.graph.kv
    return Columns(
        [
            page_bytes(kv.kv_heads, kv.k_dim, kv.v_dim, config.page_size_tokens, config.kv_type)
            for kv in shapes
        ]
    )


@dataclass(frozen=True)
class LongReply:
    """A reply to a long prompt. digest: of its bits. set_bytes, num_blocks: what a page set takes.

    peak_bytes: most memory that was behind the pages while it ran. bytes_read: of pages, in all.
    """

    digest: str
    num_blocks: int
    set_bytes: int
    peak_bytes: int
    bytes_read: int
    spilled_bytes: int


def long_reply(
    path: str, num_tokens: int, max_tokens: int, choices: dict[str, Any]
) -> dict[str, Any]:
    """A `LongReply` to so many tokens, as plain values. choices: an `EngineConfig`'s."""
    return asdict(asyncio.run(_long_reply(Path(path), num_tokens, max_tokens, choices)))


async def _long_reply(
    path: Path, num_tokens: int, max_tokens: int, choices: dict[str, Any]
) -> LongReply:
    async with opened(path, max_batch=1, **choices) as loaded:
        vocab = loaded.graph.vocab
        prompt = tuple(7 + (at * at * 31 + at * 17) % (vocab - 7) for at in range(num_tokens))
        reply, spilled_bytes = Reply(), 0
        columns = columns_of(loaded)
        num_sets = -(-(num_tokens + max_tokens) // loaded.config.page_size_tokens)
        with _watched(num_sets * columns.stride_bytes) as peak:
            async for delta in loaded.engine.generate(
                Request(prompt, max_tokens=max_tokens, logits=True)
            ):
                reply.add(delta)
                spilled_bytes = (await loaded.engine.stats()).kv_spill.num_bytes or spilled_bytes
        stats = await loaded.engine.stats()
    return LongReply(
        digest=hashlib.sha256(repr(reply.bits).encode()).hexdigest(),
        num_blocks=len(columns),
        set_bytes=columns.stride_bytes,
        peak_bytes=max(peak),
        bytes_read=stats.kv_spill.bytes_read,
        spilled_bytes=spilled_bytes,
    )


@contextmanager
def _watched(num_bytes: int) -> Iterator[list[int]]:
    """Resident bytes of the first `num_bytes` of all page sets, looked at again and again."""
    (memory,) = (one for one in gc.get_objects() if isinstance(one, VirtualPages))
    address = memory.address(0, 0)
    seen, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            seen.append(_resident_bytes(address, num_bytes))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def _resident_bytes(address: int, num_bytes: int) -> int:
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    there = (ctypes.c_ubyte * -(-num_bytes // PAGE_BYTES))()
    assert mincore(address, num_bytes, there) == 0
    return PAGE_BYTES * (bytes(there).count(1))
