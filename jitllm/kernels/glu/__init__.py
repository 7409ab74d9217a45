"""Gated activation of a feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import Buffer, Weight, written


@dataclass(frozen=True, slots=True)
class Glu:
    """dst = activation(gate) * up, elementwise f32 [rows, width]; dst may be gate.

    activation: "silu": x / (1 + exp(-x)). "gelu": the tanh approximation,
    0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x / (1 + exp(-2u)), where -2u is computed as
    x * fma(x * x, -2 sqrt(2/pi) 0.044715, -2 sqrt(2/pi)), constants rounded to f32.

    quantized: records of dst, as `Quantize` makes them. drops: dst itself is not written.
    """

    gate: Buffer
    up: Buffer
    dst: Buffer
    activation: str
    quantized: Buffer | None = None
    drops: bool = False

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Gate and up."""
        return (self.gate, self.up)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The product."""
        return written(self.dst, self.quantized, drops=self.drops)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """None."""
        return ()
