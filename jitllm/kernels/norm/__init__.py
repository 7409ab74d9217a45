"""Root-mean-square normalisation, whole rows or head by head, with an optional residual."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import Buffer, Weight, written


@dataclass(frozen=True, slots=True)
class Norm:
    """dst = x / sqrt(mean(x^2) + eps) * weight (+ add), per segment of `segment` elements.

    src, dst: f32 [rows, width]; dst may be src. weight: f32 vector of `segment` elements, the same
    for every segment of a row. segment divides width: the whole row, or a head.
    add: residual [rows, width], added after the weight; may be dst.

    Arithmetic: 16 lanes; lane l takes elements l, l+16, .. of the segment: acc = fma(x, x, acc); a
    ragged end contributes to its lanes only; the lanes are summed as the fixed tree `hsum`.
    r = 1 / sqrt(sum / segment + eps), all f32 and correctly rounded; y = (x * r) * weight; + add.

    quantized: records of dst, as `Quantize` makes them, where a segment is a row. drops: dst
    itself is not written.
    """

    src: Buffer
    dst: Buffer
    weight: Weight
    eps: float
    segment: int
    add: Buffer | None = None
    quantized: Buffer | None = None
    drops: bool = False

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Input and residual."""
        return (self.src,) if self.add is None else (self.src, self.add)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The normalised rows."""
        return written(self.dst, self.quantized, drops=self.drops)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The gain."""
        return (self.weight,)
