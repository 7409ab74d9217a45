"""f32 activations to groups of 32 signed bytes with an f32 scale."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import Buffer, Weight


@dataclass(frozen=True, slots=True)
class Quantize:
    """dst[r, group] = the 64-byte record (`kernels/layout.py`) of src[r, 32 elements].

    amax = max |x| of the group; scale = amax / 127; inverse = 127 / amax, or 0 where amax is 0;
    q = round to nearest even of (x * inverse), clamped to [-127, 127]. The sums are exact integer
    sums of q; the f32 sums are float(sum) * scale. src's padding is zero, so it adds nothing.
    """

    src: Buffer
    dst: Buffer

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """f32 rows."""
        return (self.src,)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """Records."""
        return (self.dst,)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """None."""
        return ()
