"""What runs a model on one device, whatever the device is: the port between actors and hardware.

`host_runner.py` and `vulkan/runner.py` implement it. A runner has the program of all blocks, the
memory that steps are described in, and what comes out of them. Knows addresses of its device.
Knows no sequence, no page set and no budget: whoever has those says what lies where.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from jitllm.devices.host import Limits, Pass
from jitllm.kernels.op import Buffer, Ctx

Tables = Callable[[int], "array[int]"]
"""From the address of a piece of history to the copies that make it, or that take it in."""


class StepArrays(Protocol):
    """A step as kernels read it: context words and per-token arrays. See `kernels.op.Ctx`."""

    num_tokens: int
    tokens: Any
    positions: Any
    row_of: Any
    outputs: Any
    tables: Any

    def set(self, word: Ctx, value: int) -> None:
        """Set a context word."""
        ...

    def set_counts(self, num_tokens: int, num_outputs: int) -> None:
        """Set the counts of a step."""
        ...


class SeatMemory(Protocol):
    """What sampling reads of a sequence: its token ids by position, and its biases.

    biases: address of the pairs. history: the ids, here.
    """

    biases: int
    history: array[int]

    def write(self, start: int, ids: array[int]) -> None:
        """Set ids from a position on."""
        ...

    def history_at(self, position: int) -> int:
        """Address of the id at a position; anything where `reads_history` was not asked for."""
        ...

    def close(self) -> None:
        """The sequence has ended."""
        ...


class Runner(Protocol):
    """The blocks of a model on one device.

    records: a sampling record for each output, written before a step that has the head; after it
    with results. tops: TOP_BYTES for each output. threads, kind: for people.
    """

    limits: Limits
    num_blocks: int
    threads: int
    kind: str
    records: memoryview
    tops: memoryview

    @property
    def step(self) -> StepArrays:
        """What steps are described in."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Memory of the device that is taken whatever runs."""
        ...

    @property
    def host_bytes(self) -> int:
        """Memory of the host that is."""
        ...

    def top_at(self, output: int) -> int:
        """Address of an output's part of `tops`."""
        ...

    def seat(self, max_tokens: int, biases: bytes, *, reads_history: bool) -> SeatMemory:
        """Memory for a sequence. Raises `OverBudget` where there is none."""
        ...

    def run(
        self,
        start: int,
        stop: int,
        *,
        embeds: bool,
        begins: bool,
        ends: bool,
        passes: Iterable[Pass] = (),
    ) -> None:
        """Compute blocks [start, stop) of the step; returns when that is done.

        embeds: make the hidden states of the step's tokens first. begins: nothing of the step ran
        here before. ends: go on to the head, and have its results. passes: where some pages are
        not there all the time; each is asked for when the one before it has run.
        """
        ...

    def sections(
        self, start: int, stop: int, *, embeds: bool, begins: bool, ends: bool
    ) -> Iterator[range]:
        """What `run` consists of: sections of the program, in order."""
        ...

    def run_sections(
        self, sections: range, passes: Iterable[Pass] = (), *, begins: bool, ends: bool
    ) -> None:
        """Some neighbouring sections of it; returns when that is done. begins, ends: as of `run`,
        for its first and last ones."""
        ...

    def take(self, buffer: Buffer, address: int, num_rows: int) -> None:
        """The first rows of a buffer are what is at a host address, its padding included."""
        ...

    def hand(self, buffer: Buffer, address: int, num_rows: int) -> None:
        """Write the first rows of a buffer to a host address; nothing runs meanwhile."""
        ...

    def read_logits(self, first_row: int, into: memoryview) -> None:
        """Logits of output rows from `first_row` on, f32 [rows, vocab], without padding."""
        ...

    def is_lost(self, error: Exception) -> bool:
        """Whether an error means that nothing on the device can be had any more."""
        ...

    async def pack(self, tables: Tables, num_bytes: int, into: int) -> None:
        """Bring a piece of history to the host address `into`."""
        ...

    async def unpack(self, tables: Tables, num_bytes: int, source: int) -> None:
        """Take in a piece of history that lies at a host address."""
        ...

    def close(self) -> None:
        """Give everything back; nothing may be running."""
        ...
