"""The rows whose logits are wanted."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import Buffer, Weight


@dataclass(frozen=True, slots=True)
class Gather:
    """dst[o] = src[outputs[o]], f32. src has token rows, dst output rows; equal widths."""

    src: Buffer
    dst: Buffer

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Rows of all tokens."""
        return (self.src,)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """Rows of the outputs."""
        return (self.dst,)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """None."""
        return ()
