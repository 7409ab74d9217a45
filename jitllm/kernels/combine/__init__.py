"""What a token's experts say, weighted and added up."""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import Buffer, Weight


@dataclass(frozen=True, slots=True)
class Combine:
    """dst[t] = (sum over slots of routed[t, slot] * src[t, slot]) * scale (+ add[t]).

    src: f32 [tokens, used * width], a segment for each slot. routed: f32 [tokens, used]. dst: f32
    [tokens, width], a multiple of 32. add: like dst; may be dst.
    acc starts at 0; acc = fma(routed, src, acc) slot by slot; then acc * scale; then acc + add.
    """

    src: Buffer
    routed: Buffer
    dst: Buffer
    add: Buffer | None = None
    scale: float = 1.0

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """What the experts say, their weights, the residual."""
        found = (self.src, self.routed)
        return found if self.add is None else (*found, self.add)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The sum."""
        return (self.dst,)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """None."""
        return ()
