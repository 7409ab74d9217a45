"""How much memory keys and values really take, for processes of their own: the kernel is asked."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

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
    absent_bytes: what a token looks at and was not in memory all the time that tokens were decoded.
    """

    digest: str
    num_blocks: int
    set_bytes: int
    peak_bytes: int
    bytes_read: int
    spilled_bytes: int
    absent_bytes: int


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
        with Watch(columns, num_sets) as watch:
            async for delta in loaded.engine.generate(
                Request(prompt, max_tokens=max_tokens, logits=True)
            ):
                reply.add(delta)
                # Steps are ahead of what is known here; the last one gives all pages back.
                watch.is_decoding = 1 < len(reply.ids) < max_tokens // 2
                spilled_bytes = (await loaded.engine.stats()).kv_spill.num_bytes or spilled_bytes
        stats = await loaded.engine.stats()
    return LongReply(
        digest=hashlib.sha256(repr(reply.bits).encode()).hexdigest(),
        num_blocks=len(columns),
        set_bytes=columns.stride_bytes,
        peak_bytes=watch.peak_bytes,
        bytes_read=stats.kv_spill.bytes_read,
        spilled_bytes=spilled_bytes,
        absent_bytes=_absent_bytes(loaded, watch.resident, num_tokens),
    )


def _absent_bytes(loaded: Loaded, resident: NDArray[np.bool_], position: int) -> int:
    """Bytes of the pages that a position sees, less those that are resident [sets, blocks]."""
    page_tokens, columns = loaded.config.page_size_tokens, columns_of(loaded)
    found = 0
    for block, kv in enumerate(loaded.graph.kv):
        first = max(position + 1 - kv.window, 0) // page_tokens if kv.window else 0
        num_seen = position // page_tokens + 1 - first
        num_absent = max(num_seen - int(resident[:, block].sum()), 0)
        found += num_absent * columns.num_bytes((block,))
    return found


class Watch:
    """Looks again and again at which memory is behind the first `num_sets` of all page sets.

    resident: pages [sets, blocks] of which something was there whenever it looked while
    `is_decoding`: what is written last is not whole.
    """

    def __init__(self, columns: Columns, num_sets: int) -> None:
        (memory,) = (one for one in gc.get_objects() if isinstance(one, VirtualPages))
        self._address, self._num_bytes = memory.address(0, 0), num_sets * columns.stride_bytes
        self._first_pages = [offset // PAGE_BYTES for offset in columns.offsets]
        self.resident = np.ones((num_sets, len(columns)), np.bool_)
        self.peak_bytes = 0
        self.is_decoding = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            is_decoding = self.is_decoding
            there = self._look()
            self.peak_bytes = max(self.peak_bytes, PAGE_BYTES * int(there.sum()))
            if is_decoding and self.is_decoding:
                there = there.reshape(len(self.resident), -1)
                self.resident &= np.logical_or.reduceat(there, self._first_pages, axis=1)

    def _look(self) -> NDArray[np.bool_]:
        """Of every system page."""
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        there = np.zeros(self._num_bytes // PAGE_BYTES, np.uint8)
        assert mincore(self._address, self._num_bytes, there.ctypes.data) == 0
        return (there & 1).astype(np.bool_)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
