"""Cosines and sines of rotary angles, once per step and frequency set."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import Buffer, Const, Weight


@dataclass(frozen=True, slots=True)
class RopeTable:
    """dst[t] = [cos(p f_0) .. cos(p f_(n-1)), sin(p f_0) .. sin(p f_(n-1))] * scale.

    p = positions[t]. frequencies: n f64 radians per position (scaling already folded in).
    dst: f32 [tokens, 2n]. The angle is reduced and its sine and cosine are evaluated in f64, so
    the f32 results are right to an ulp for positions up to 2^24; then times f32 `scale`.
    """

    dst: Buffer
    frequencies: Const
    scale: float = 1.0

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """No buffer: positions come from the step context."""
        return ()

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The table."""
        return (self.dst,)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """None."""
        return ()
