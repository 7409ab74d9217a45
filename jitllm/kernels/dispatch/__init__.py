"""The tokens of a step, sorted by the experts that they go to.

A pair is a token and one of its chosen experts: pair p = token * used + slot. Its rows in other
buffers are numbered like it.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitllm.kernels.op import Buffer, Element, Weight

HEAD_BYTES = 64
RECORD_BYTES = 16
"""The table begins with a head, i32 number of panels; then a record for each pair. Record n, i32:
the n-th pair in the order of experts, then panel n, if there are so many: expert, start, stop. A
panel is a run [start, stop) of that order, all of one expert and at most PANEL_TOKENS."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """table = the pairs in order of their experts, those of one expert in order of their number.

    ids: i32 [tokens, used], each below `experts`. table: `table_buffer`.
    """

    ids: Buffer
    table: Buffer
    experts: int

    @staticmethod
    def table_buffer(name: str, used: int) -> Buffer:
        """Room for the table: its rows mean nothing, but there is enough for any step."""
        words = (HEAD_BYTES + RECORD_BYTES * used) // 4
        return Buffer(name, words, element=Element.I32)

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Chosen experts."""
        return (self.ids,)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The table."""
        return (self.table,)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """None."""
        return ()
