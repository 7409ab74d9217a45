"""Token ids to hidden states: one row of the embedding matrix each."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import Buffer, Weight


@dataclass(frozen=True, slots=True)
class Embed:
    """dst[t] = scale * dequantise(table[tokens[t]]), f32.

    table: matrix [vocab, width]. A weight is dequantised as float(q - bias) * s, or
    fma(float(q), s, -m) (+m where the format's min is added), where s = d * float(byte scale),
    m = dmin * float(byte min) under super-scales. The result is multiplied by `scale` in f32.
    Ids outside [0, vocab) must not reach this op; the scheduler refuses them.
    """

    table: Weight
    dst: Buffer
    scale: float = 1.0

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """No buffer: ids come from the step context."""
        return ()

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The hidden states."""
        return (self.dst,)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The table."""
        return (self.table,)
