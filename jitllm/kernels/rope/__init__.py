"""Rotary position embedding, in place."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import Buffer, Const, Weight


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate pairs of the first `num_rotated` elements of every head of `x` by `table`'s angles.

    x: f32 [tokens, heads * head_dim], in place. table: f32 [tokens, num_rotated] (`rope_table`).
    Pair i is elements (2i, 2i+1) where `interleaved`, else (i, i + num_rotated/2):
    (a, b) -> (a cos - b sin, a sin + b cos), each as fma(a, cos, -(b * sin)), fma(a, sin, b * cos).
    Elements beyond `num_rotated` are left alone.
    position_scale: f32 factors; then every element of the head is multiplied by
    position_scale[min(position // scale_positions, last)] (attention temperature by length).
    """

    x: Buffer
    table: Buffer
    head_dim: int
    num_rotated: int
    interleaved: bool
    position_scale: Const | None = None
    scale_positions: int = 1

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Heads and angles."""
        return (self.x, self.table)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The heads."""
        return (self.x,)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """None."""
        return ()
