"""Matrix products in which every row meets the matrices of its own experts."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import Buffer, Weight


@dataclass(frozen=True, slots=True)
class ExpertMatMul:
    """dst[t, slot] = weight of the expert in that slot of token t, times src[t] or src[t, slot].

    The arithmetic of a row is that of `kernels/matmul`, whatever the company of tokens and experts.

    weight: one matrix for each expert; rows and columns are multiples of 32. used: experts of a
    token. table: from `kernels/dispatch`. src: Q8 records for quantised formats, f32 for float
    formats; [tokens, cols], read by all experts of a token, or [tokens, used * cols], a segment for
    each of them. dst: f32 [tokens, used * rows]. Only experts in the table are looked at.
    """

    src: Buffer
    dst: Buffer
    weight: Weight
    table: Buffer
    used: int

    @property
    def pairs_per_row(self) -> int:
        """How many pairs read the same row of src."""
        return self.used if self.src.width == self.weight.cols else 1

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Activations, and which of them meet which expert."""
        return (self.src, self.table)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The products."""
        return (self.dst,)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The matrices of all experts."""
        return (self.weight,)
