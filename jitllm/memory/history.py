"""How keys and values travel: a piece of a sequence's history, and the copies that make it.

A piece has, for each of some blocks in order, the positions [start, stop) as one page of
n = stop - start positions, laid out as `kernels.kv_write` says. So neither side knows the other's
page size, and none of what an element is. All positions travel, also those below a block's window:
a set of pages may be shared by a sequence that ends earlier and still looks at them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jitllm.kernels.kv_write import Matrix, page_bytes, page_matrices
from jitllm.memory.pages import KvPages
from jitllm.models.graph import KvShape


@dataclass(frozen=True, slots=True)
class History:
    """The history of one model's sequences. shapes: of each block. kv_element: f16, f32 or q8_0."""

    shapes: Sequence[KvShape]
    kv_element: str

    def num_bytes(self, blocks: Iterable[int], num_tokens: int) -> int:
        """Bytes of a piece of so many positions."""
        return sum(self._block_bytes(block, num_tokens) for block in blocks)

    def copies(
        self,
        pages: KvPages,
        sequence: int,
        blocks: Iterable[int],
        start: int,
        stop: int,
        address: int,
        *,
        out: bool,
        first: int = 0,
        last: int = 1 << 62,
    ) -> array[int]:
        """Records of `kernels.copy` between a piece at `address` and a sequence's pages.

        out: from the pages to the piece; else into the pages. Positions outside of [first, last)
        are passed over. Raises `ValueError` where pages are not held.
        """
        table = array("Q")
        for block in blocks:
            for position, num_tokens in _pieces(
                max(start, first), min(stop, last), pages.page_tokens
            ):
                page = pages.page(sequence, position // pages.page_tokens, block)
                in_page = (page, pages.page_tokens, position % pages.page_tokens)
                in_piece = (address, stop - start, position - start)
                table.extend(self._records(block, num_tokens, in_page, in_piece, out=out))
            address += self._block_bytes(block, stop - start)
        return table

    def _records(
        self,
        block: int,
        num_tokens: int,
        in_page: tuple[int, int, int],
        in_piece: tuple[int, int, int],
        *,
        out: bool,
    ) -> Iterator[int]:
        """Copies of positions that lie in one page, one of each of its matrices.

        in_page, in_piece: address, positions of the whole, and the first one that is copied.
        """
        source, destination = (in_page, in_piece) if out else (in_piece, in_page)
        (from_, source_tokens, skipped), (into, tokens, at) = source, destination
        is_whole = num_tokens == source_tokens == tokens  # then its rows follow one another
        for num_rows, size in self._matrices(block):
            yield from (into + at * size, tokens * size)
            yield from (from_ + skipped * size, source_tokens * size)
            if is_whole:
                yield from (1, num_rows * num_tokens * size)
            else:
                yield from (num_rows, num_tokens * size)
            from_ += num_rows * source_tokens * size
            into += num_rows * tokens * size

    def _matrices(self, block: int) -> tuple[Matrix, ...]:
        shape = self.shapes[block]
        return page_matrices(shape.kv_heads, shape.k_dim, shape.v_dim, self.kv_element)

    def _block_bytes(self, block: int, num_tokens: int) -> int:
        shape = self.shapes[block]
        return page_bytes(shape.kv_heads, shape.k_dim, shape.v_dim, num_tokens, self.kv_element)


def _pieces(start: int, stop: int, page_tokens: int) -> Iterator[tuple[int, int]]:
    """(first position, number of positions) of the parts of [start, stop) in each page."""
    while start < stop:
        end = min(start - start % page_tokens + page_tokens, stop)
        yield start, end - start
        start = end
