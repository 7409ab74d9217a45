"""What a step is described in, on a Vulkan device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from jitllm.devices.host import Limits
from jitllm.devices.vulkan.arena import DeviceSpan
from jitllm.devices.vulkan.staging import Staging
from jitllm.kernels.op import ALL_KEYS, PANEL_TOKENS, Ctx
from jitllm.kernels.sample import RECORD_BYTES


class StepLayout:
    """Where the parts of a step's memory lie: context words, sampling records, then arrays."""

    def __init__(self, limits: Limits) -> None:
        self.rows = limits.rows
        self.sizes = {
            Ctx.SAMPLING: RECORD_BYTES * limits.outputs,
            Ctx.TABLES: 8 * limits.rows,
            Ctx.RANGES: 16 * limits.rows,
            Ctx.TOKENS: 4 * limits.tokens,
            Ctx.POSITIONS: 4 * limits.tokens,
            Ctx.ROW_OF: 4 * limits.tokens,
            Ctx.OUTPUTS: 4 * limits.outputs,
        }
        end = 8 * Ctx.WORDS
        self.offsets: dict[Ctx, int] = {}
        for word, size in self.sizes.items():
            self.offsets[word] = end
            end += size
        self.num_bytes = end


class DeviceStep:
    """What a step is described in: `StepMemory`'s words and arrays, here and on the device.

    Fill the arrays, then `upload`. tables and the lists that records name are device addresses.
    records: a sampling record for each output; `fetch_records` brings the results.
    """

    def __init__(self, layout: StepLayout, span: DeviceSpan, staging: Staging) -> None:
        self._span, self._staging, self._layout = span, staging, layout
        self._bytes = bytearray(layout.num_bytes)
        view = memoryview(self._bytes)
        self._ctx = view[: 8 * Ctx.WORDS].cast("q")
        for word, offset in layout.offsets.items():
            self._ctx[word] = span.address + offset
        self._ctx[Ctx.ONE] = 1
        self.num_tokens = self.num_outputs = 0

        def part(word: Ctx) -> memoryview:
            start = layout.offsets[word]
            return view[start : start + layout.sizes[word]]

        part(Ctx.RANGES).cast("q")[:] = array("q", ALL_KEYS * layout.rows)
        self.records = part(Ctx.SAMPLING)
        self.tables = part(Ctx.TABLES).cast("Q")
        self.tokens, self.positions = part(Ctx.TOKENS).cast("i"), part(Ctx.POSITIONS).cast("i")
        self.row_of, self.outputs = part(Ctx.ROW_OF).cast("i"), part(Ctx.OUTPUTS).cast("i")

    @property
    def address(self) -> int:
        """Device address of the context."""
        return self._span.address

    def set(self, word: Ctx, value: int) -> None:
        """Set a context word."""
        self._ctx[word] = value

    def set_counts(self, num_tokens: int, num_outputs: int) -> None:
        """Set the counts of a step."""
        self.num_tokens, self.num_outputs = num_tokens, num_outputs
        self._ctx[Ctx.NUM_TOKENS] = num_tokens
        self._ctx[Ctx.NUM_OUTPUTS] = num_outputs
        self._ctx[Ctx.TOKEN_PANELS] = -(-num_tokens // PANEL_TOKENS)
        self._ctx[Ctx.OUTPUT_PANELS] = -(-num_outputs // PANEL_TOKENS)

    @property
    def change(self) -> tuple[DeviceSpan, memoryview]:
        """What is to be brought to the device."""
        return self._span, memoryview(self._bytes)

    def upload(self) -> None:
        """Bring it to the device, before whatever is submitted next."""
        self._staging.upload([self.change])

    def ranges(self, ranges: Iterable[tuple[int, int]]) -> tuple[DeviceSpan, bytes]:
        """What to write where, so that attention takes these keys of each row; of the rows that
        are not named it takes none."""
        keys = array("q", bytes(16 * self._layout.rows))
        for row, (start, stop) in enumerate(ranges):
            keys[2 * row : 2 * row + 2] = array("q", (start, stop))
        size = self._layout.sizes[Ctx.RANGES]
        return self._span.part(self._layout.offsets[Ctx.RANGES], size), keys.tobytes()

    def fetch_records(self, num_outputs: int) -> None:
        """The first records as the device has them; waits for all that was submitted."""
        into = self.records[: RECORD_BYTES * num_outputs]
        self._staging.download(self._span, into, self._layout.offsets[Ctx.SAMPLING])
