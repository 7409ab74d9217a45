"""Sequences with random queries, keys and values, computed step by step through KV pages.

Pages are poisoned with NaN and handed out in a shuffled order; what lies beyond a sequence's last
page is not in its table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitllm.jit.tiers import Tier
from jitllm.kernels.attention import Attention
from jitllm.kernels.attention.reference import attention
from jitllm.kernels.kv_write import KvWrite, page_bytes
from jitllm.kernels.kv_write.reference import Views, page_views, stored
from jitllm.kernels.op import Buffer
from tests.ops.harness import Rig

NUM_BLOCKS, BLOCK = 2, 1
"""Every page belongs to the second of two blocks, so that a page table has columns."""

Token = tuple[int, int]
"""A sequence's row and a position."""

KeyRange = tuple[int, int]
"""Half-open positions of a sequence."""


@dataclass(frozen=True)
class Case:
    """An attention shape and the lengths of the sequences that are computed with it."""

    heads: int = 4
    kv_heads: int = 1
    k_dim: int = 64
    v_dim: int = 64
    window: int = 0
    softcap: float = 0.0
    element: str = "f16"
    page_tokens: int = 64
    lengths: tuple[int, ...] = (70, 5)

    def __str__(self) -> str:
        dims = f"{self.k_dim}" if self.k_dim == self.v_dim else f"{self.k_dim}+{self.v_dim}"
        extras = f"-window{self.window}" * bool(self.window) + "-softcap" * bool(self.softcap)
        return f"{self.heads}of{self.kv_heads}x{dims}-{self.element}-p{self.page_tokens}{extras}"

    def with_pages(self, page_tokens: int) -> Case:
        """The same sequences in pages of another size."""
        return replace(self, page_tokens=page_tokens)

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.k_dim**-0.5)

    def tokens(self) -> list[Token]:
        """Every token, sequence by sequence."""
        return [(row, p) for row, length in enumerate(self.lengths) for p in range(length)]


class Histories:
    """The sequences of a case, their pages, and what was computed of them so far."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self.num_threads = 1
        rng = np.random.default_rng(seed)

        def draw(heads: int, dim: int) -> list[NDArray[np.float32]]:
            return [rng.standard_normal((n, heads, dim), np.float32) for n in case.lengths]

        self.q = [3 * q for q in draw(case.heads, case.k_dim)]
        self.k, self.v = draw(case.kv_heads, case.k_dim), draw(case.kv_heads, case.v_dim)
        pages = [-(-n // case.page_tokens) for n in case.lengths]
        order = rng.permutation(sum(pages)) + 1
        split = np.split(order, np.cumsum(pages)[:-1])
        # Page 0 stands in the other block's column and is never written.
        self.tables = [[int(p) for page in own for p in (0, page)] for own in split]
        self.pages = Rig(
            num_tokens=0, page_bytes=page_bytes(*self.layout), num_pages=sum(pages) + 1
        ).pool
        self.out = [np.full((n, case.heads, case.v_dim), np.nan, np.float32) for n in case.lengths]

    @property
    def layout(self) -> tuple[int, int, int, int, str]:
        """Arguments that say how a page lies."""
        c = self.case
        return c.kv_heads, c.k_dim, c.v_dim, c.page_tokens, c.element

    def step(
        self,
        tokens: Sequence[Token],
        tier: Tier,
        pieces: int = 1,
        launches: Sequence[Sequence[KeyRange]] = ((),),
    ) -> None:
        """Write and attend for some tokens in one step; each sequence's in order.

        launches: of attention, each with the keys [from, to) that it takes of every sequence; no
        others are there meanwhile. By default one takes all.
        """
        case = self.case

        def gather(source: list[NDArray[Any]]) -> NDArray[Any]:
            return np.stack([source[row][p].reshape(-1) for row, p in tokens])

        rig = Rig(
            num_tokens=len(tokens),
            arrays={"q": gather(self.q), "k": gather(self.k), "v": gather(self.v)},
            positions=np.array([p for _, p in tokens], np.int32),
            row_of=np.array([row for row, _ in tokens], np.int32),
            num_threads=self.num_threads,
            num_blocks=NUM_BLOCKS,
            page_tokens=case.page_tokens,
            kv_element=case.element,
            tables=self.tables,
        )
        rig.pool = self.pages
        q, k = Buffer("q", case.heads * case.k_dim), Buffer("k", case.kv_heads * case.k_dim)
        v, out = Buffer("v", case.kv_heads * case.v_dim), Buffer("out", case.heads * case.v_dim)
        dims = (case.kv_heads, case.k_dim, case.v_dim)
        rig.run(KvWrite(k, v, BLOCK, *dims), tier, pieces)
        attend = Attention(q, out, BLOCK, case.heads, *dims, case.scale, case.window, case.softcap)
        for ranges in launches:
            rig.ranges = list(ranges)
            with self.only(ranges):
                rig.run(attend, tier, pieces)
        for (row, p), values in zip(tokens, rig.value("out"), strict=True):
            self.out[row][p] = values.reshape(case.heads, case.v_dim)

    @contextmanager
    def only(self, ranges: Sequence[KeyRange]) -> Iterator[None]:
        """Within it, pages without a key of the ranges are poisoned."""
        size, hidden = self.case.page_tokens, {}
        for table, (start, stop) in zip(self.tables, ranges, strict=bool(ranges)):
            for index, page in enumerate(table[BLOCK::NUM_BLOCKS]):
                if (index + 1) * size <= start or index * size >= stop:
                    hidden[page] = self.pages[page].view.copy()
                    self.pages[page].view[:] = 0xFF
        yield
        for page, content in hidden.items():
            self.pages[page].view[:] = content

    def all_out(self) -> NDArray[np.float32]:
        """What was computed, f32 [all tokens, heads, v_dim]."""
        return np.concatenate(self.out)

    def views(self, row: int) -> list[Views]:
        """The matrices of every page of a sequence."""
        own = self.tables[row][BLOCK::NUM_BLOCKS]
        return [page_views(self.pages[p].view, *self.layout) for p in own]

    def expected(self) -> NDArray[np.float64]:
        """The reference's answer for all tokens."""
        case, out = self.case, []
        for row, length in enumerate(case.lengths):
            keys = stored(self.k[row], case.element).transpose(1, 0, 2)
            values = stored(self.v[row], case.element).transpose(1, 0, 2)
            for p in range(length):
                shape = (p, case.scale, case.window, case.softcap)
                out.append(attention(self.q[row][p], keys, values, *shape))
        return np.stack(out)


def computed(case: Case, tier: Tier, pieces: int = 1, seed: int = 0) -> Histories:
    """All sequences of a case in one step."""
    histories = Histories(case, seed)
    histories.step(case.tokens(), tier, pieces)
    return histories
