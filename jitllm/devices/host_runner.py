"""The CPU as a runner: everything is where it is read, and nothing is copied to get there."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from ctypes import memmove

from jitllm.devices.host import HostProgram, Pass
from jitllm.devices.runner import Tables
from jitllm.jit.copy import Copier
from jitllm.kernels.op import Buffer, Ctx
from jitllm.kernels.sample import RECORD_BYTES


class HostSeat:
    """See `SeatMemory`."""

    def __init__(self, max_tokens: int, biases: bytes) -> None:
        self.history = array("i", bytes(4 * max_tokens))
        self._biases = array("B", biases)
        self.biases = self._biases.buffer_info()[0]
        self._address = self.history.buffer_info()[0]

    def write(self, start: int, ids: array[int]) -> None:
        """See `SeatMemory`."""
        self.history[start : start + len(ids)] = ids

    def history_at(self, position: int) -> int:
        """See `SeatMemory`."""
        return self._address + 4 * position

    def close(self) -> None:
        """See `SeatMemory`."""


class HostRunner:
    """See `Runner`. logits: what comes out of the program. top_bytes: room for the likeliest tokens
    of an output. kind: the instructions that kernels are made of."""

    def __init__(
        self,
        program: HostProgram,
        copier: Copier,
        *,
        logits: Buffer,
        top_bytes: int,
        threads: int,
        kind: str,
    ) -> None:
        self._program = program
        self._copier = copier
        self._logits = logits
        self._top_bytes = top_bytes
        self.limits = program.limits
        self.num_blocks = program.num_blocks
        self.threads = threads
        self.kind = kind
        self.step = program.step
        self.run = program.run
        self.sections = program.sections
        records = array("B", bytes(RECORD_BYTES * program.limits.outputs))
        tops = array("B", bytes(top_bytes * program.limits.outputs))
        self.records, self.tops = memoryview(records), memoryview(tops)
        self._tops = tops.buffer_info()[0]
        program.step.set(Ctx.SAMPLING, records.buffer_info()[0])

    @property
    def scratch_bytes(self) -> int:
        """See `Runner`."""
        return self._program.scratch_bytes

    @property
    def host_bytes(self) -> int:
        """See `Runner`."""
        return self._program.scratch_bytes

    def top_at(self, output: int) -> int:
        """See `Runner`."""
        return self._tops + self._top_bytes * output

    def seat(self, max_tokens: int, biases: bytes, *, reads_history: bool) -> HostSeat:
        """See `Runner`."""
        return HostSeat(max_tokens, biases)

    def run_sections(
        self, sections: range, passes: Iterable[Pass] = (), *, begins: bool, ends: bool
    ) -> None:
        """See `Runner`."""
        self._program.run_sections(sections, passes)

    def take(self, buffer: Buffer, address: int, num_rows: int) -> None:
        """See `Runner`."""
        memmove(self._program.buffer(buffer), address, num_rows * buffer.stride_bytes)

    def hand(self, buffer: Buffer, address: int, num_rows: int) -> None:
        """See `Runner`."""
        memmove(address, self._program.buffer(buffer), num_rows * buffer.stride_bytes)

    def read_logits(self, first_row: int, into: memoryview) -> None:
        """See `Runner`."""
        width, stride = 4 * self._logits.width, self._logits.stride_bytes
        count = len(into) // width
        source = self._program.rows(self._logits, first_row + count)
        for i in range(count):
            at = (first_row + i) * stride
            into[i * width : (i + 1) * width] = source[at : at + width]

    def is_lost(self, error: Exception) -> bool:
        """See `Runner`."""
        return False

    async def pack(self, tables: Tables, num_bytes: int, into: int) -> None:
        """See `Runner`."""
        self._copier.run(tables(into))

    async def unpack(self, tables: Tables, num_bytes: int, source: int) -> None:
        """See `Runner`."""
        self._copier.run(tables(source))

    def close(self) -> None:
        """See `Runner`."""
        self._program.close()
