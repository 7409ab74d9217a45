"""A model as lists of ops: what runs once a step, what runs for each block, what ends it.

Knows ops and buffers. Knows no architecture, no device and no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jitllm.kernels.op import PAGES, Buffer, Op, Weight


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one position of one block leaves behind: keys [kv_heads, k_dim], values
    [kv_heads, v_dim]. window: positions that are still looked at, 0 for all."""

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class Graph:
    """The ops of one model, in order.

    embed: token ids to the hidden state. tables: rotary tables, on every device in every step.
    blocks: one list a block; it reads and writes the hidden state and the block's KV (`kv`).
    head: hidden states to `logits`. Buffers are named, and a name is one buffer throughout:
    blocks reuse each other's.
    """

    width: int
    vocab: int
    context_length: int
    embed: tuple[Op, ...]
    tables: tuple[Op, ...]
    blocks: tuple[tuple[Op, ...], ...]
    kv: tuple[KvShape, ...]
    head: tuple[Op, ...]

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.blocks)

    @property
    def hidden(self) -> Buffer:
        """f32 [tokens, width]: what crosses from one block, or device, to the next."""
        return self.embed[0].writes[0]

    @property
    def logits(self) -> Buffer:
        """f32 [outputs, vocab]."""
        return self.head[-1].writes[0]

    def ops(self) -> Iterator[Op]:
        """Every op, in the order of a step on a single device."""
        yield from self.embed
        yield from self.tables
        for block in self.blocks:
            yield from block
        yield from self.head

    def buffers(self) -> tuple[Buffer, ...]:
        """All activations, once each, in order of first use; KV pages are no buffer of a graph."""
        found = dict.fromkeys(b for op in self.ops() for b in (*op.reads, *op.writes))
        return tuple(b for b in found if b != PAGES)

    def weights(self) -> tuple[Weight, ...]:
        """All weights, once each, in order of first use."""
        return tuple(dict.fromkeys(w for op in self.ops() for w in op.weights))

    def check(self) -> None:
        """A name is one buffer, and nothing is read that was not written."""
        buffers = self.buffers()
        assert len({b.name for b in buffers}) == len(buffers), "two buffers share a name"
        written: set[str] = set()
        for op in self.ops():
            unwritten = {b.name for b in op.reads} - written
            assert not unwritten, f"{type(op).__name__} reads {unwritten} before they are written"
            written |= {b.name for b in op.writes}
        assert len(self.kv) == len(self.blocks)
