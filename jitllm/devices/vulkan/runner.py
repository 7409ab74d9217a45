"""A Vulkan device as a runner: what the host writes goes over before a step, results come back.

Steps are run by one thread, copies of history and of weights by another: each has queues and
staging memory of its own, so neither waits for the other but on the device. Memory is taken and
given back while nothing that uses it runs.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from jitllm.devices.host import Pass
from jitllm.devices.memory import POISON, POISON_VARIABLE
from jitllm.devices.runner import Tables
from jitllm.devices.vulkan.api import VulkanError
from jitllm.devices.vulkan.arena import DeviceSpan
from jitllm.devices.vulkan.device import Moment
from jitllm.devices.vulkan.mirror import Mirror, Mirrors
from jitllm.devices.vulkan.pipelines import Pipelines, traits
from jitllm.devices.vulkan.program import VulkanProgram
from jitllm.devices.vulkan.staging import Staging
from jitllm.errors import OverBudget
from jitllm.kernels.copy import RECORD_BYTES as COPY_BYTES
from jitllm.kernels.copy import gpu as copying
from jitllm.kernels.gpu import Bucket
from jitllm.kernels.op import Buffer
from jitllm.kernels.sample import RECORD_BYTES, Field

Pieces = Callable[[int], Iterable[range]]
"""From a number of bytes to parts of them, each to be copied before the next one is asked for."""

_COPIES_AT_ONCE = 1 << 12
_POISON_WORD = int.from_bytes(bytes([POISON] * 4), "little")


class DeviceSeat:
    """See `SeatMemory`. Sequences that nothing is penalised in leave their ids here."""

    def __init__(self, history: array[int], mirrors: list[Mirror], *, reads_history: bool) -> None:
        self.history = history
        self._mirrors = mirrors
        self._ids = mirrors[0] if reads_history else None
        self.biases = mirrors[-1].address if len(mirrors) > reads_history else 0

    def write(self, start: int, ids: array[int]) -> None:
        """See `SeatMemory`."""
        if self._ids is None:
            self.history[start : start + len(ids)] = ids
        else:
            self._ids.write(start, ids)

    def history_at(self, position: int) -> int:
        """See `SeatMemory`."""
        return 0 if self._ids is None else self._ids.address + 4 * position

    def close(self) -> None:
        """See `SeatMemory`."""
        for mirror in self._mirrors:
            mirror.close()


class VulkanRunner:
    """See `Runner`. logits: what comes out of the program's blocks.

    mirrors: page tables are in there too. staging: of the compute queue. top_bytes: room for the
    likeliest tokens of an output. parcel_bytes: the largest piece of history. unit_bytes: of an
    element of keys and values. Closing it closes the program, and nothing else that it was given.
    """

    threads = 0
    kind = "vulkan"

    def __init__(
        self,
        program: VulkanProgram,
        pipelines: Pipelines,
        mirrors: Mirrors,
        staging: Staging,
        *,
        logits: Buffer,
        top_bytes: int,
        parcel_bytes: int,
        unit_bytes: int,
    ) -> None:
        self._program = program
        self._pipelines = pipelines
        self._mirrors = mirrors
        self._staging = staging
        self._logits = logits
        self._top_bytes = top_bytes
        self._arena = arena = mirrors.arena
        self._device = device = arena.device
        self._is_poisoned = os.environ.get(POISON_VARIABLE) == "1"
        self.limits = program.limits
        self.num_blocks = program.num_blocks
        self.sections = program.sections
        self.step = program.step
        self.records = program.step.records
        self.tops = memoryview(bytearray(top_bytes * program.limits.outputs))
        # The last work of each queue that was waited for: what comes next sees what it wrote.
        queues = (device.compute, device.beside, device.copies)
        self._done = {queue: Moment(queue, 0) for queue in queues}

        with ExitStack() as owned:
            owned.callback(program.close)
            self._beside = owned.enter_context(
                closing(Staging(device, parcel_bytes, device.beside))
            )
            self._loading = owned.enter_context(closing(Staging(device, queue=device.copies)))
            self._spans: list[DeviceSpan] = []
            owned.callback(self._give_own)
            self._top_span = self._take(len(self.tops))
            self._parcel = self._take(parcel_bytes)
            self._table = self._take(COPY_BYTES * _COPIES_AT_ONCE)
            self._copy = copying.kernel(traits(device), unit_bytes)
            pipelines.build([self._copy])
            self._transfers = ThreadPoolExecutor(1, "jitllm transfers")
            owned.callback(self._transfers.shutdown)
            self._owned = owned.pop_all()

    def _take(self, num_bytes: int) -> DeviceSpan:
        if (span := self._arena.take(num_bytes)) is None:
            raise self._arena.refusal("what it copies through", num_bytes)
        self._spans.append(span)
        return span

    def _give_own(self) -> None:
        while self._spans:
            self._arena.give(self._spans.pop())

    @property
    def scratch_bytes(self) -> int:
        """See `Runner`."""
        return self._program.num_bytes + sum(span.num_bytes for span in self._spans)

    @property
    def host_bytes(self) -> int:
        """See `Runner`."""
        stages = (self._staging, self._beside, self._loading)
        return sum(staging.allocated_bytes for staging in stages)

    def top_at(self, output: int) -> int:
        """See `Runner`."""
        return self._top_span.address + self._top_bytes * output

    def seat(self, max_tokens: int, biases: bytes, *, reads_history: bool) -> DeviceSeat:
        """See `Runner`."""
        history = array("i", bytes(4 * max_tokens))
        arrays = [history] if reads_history else []
        if biases:
            arrays.append(array("i", biases))
        mirrors: list[Mirror] = []
        for values in arrays:
            if (mirror := self._mirrors.make(values)) is None:
                for made in mirrors:
                    made.close()
                raise OverBudget("history of a reply", 4 * len(values), self._arena.room_bytes)
            mirrors.append(mirror)
        return DeviceSeat(history, mirrors, reads_history=reads_history)

    # --- steps -------------------------------------------------------------------------------

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
        """See `Runner`."""
        with self._part(begins=begins, ends=ends) as bucket:
            self._program.run(
                start,
                stop,
                bucket,
                embeds=embeds,
                begins=begins,
                ends=ends,
                after=tuple(self._done.values()),
                passes=passes,
            )

    def run_sections(
        self, sections: range, passes: Iterable[Pass] = (), *, begins: bool, ends: bool
    ) -> None:
        """See `Runner`."""
        with self._part(begins=begins, ends=ends) as bucket:
            after = tuple(self._done.values())
            self._program.run_sections(sections, bucket, after=after, passes=passes)

    @contextmanager
    def _part(self, *, begins: bool, ends: bool) -> Iterator[Bucket]:
        """A part of a step, of so large a bucket: what was written before it is there, what it
        writes can be read after it."""
        step, compute = self.step, self._device.compute
        if begins:
            self._staging.upload([*self._mirrors.changes(), step.change])
        yield self._program.bucket(step.num_tokens, step.num_outputs)
        moment = compute.last
        compute.wait(moment)
        self._done[compute] = moment
        if ends:
            self._fetch_results()

    def copy(self, pairs: Iterable[tuple[DeviceSpan, DeviceSpan]]) -> None:
        """In the thread of steps: copy spans to others, between what it did and what it will do."""
        self._program.copy(pairs, after=tuple(self._done.values()))

    def wait(self) -> None:
        """In the thread of steps: until all of that is done."""
        self._device.compute.wait()

    def _fetch_results(self) -> None:
        """Records, and the likeliest tokens where somebody wants to know them."""
        step, count = self.step, self.step.num_outputs
        step.fetch_records(count)
        wanted = range(Field.NUM_TOP, RECORD_BYTES * count, RECORD_BYTES)
        if any(any(self.records[at : at + 4]) for at in wanted):
            self._staging.download(self._top_span, self.tops[: self._top_bytes * count])

    def take(self, buffer: Buffer, address: int, num_rows: int) -> None:
        """See `Runner`."""
        self._program.write(buffer, _host_view(address, num_rows * buffer.stride_bytes))

    def hand(self, buffer: Buffer, address: int, num_rows: int) -> None:
        """See `Runner`."""
        self._program.read(buffer, _host_view(address, num_rows * buffer.stride_bytes))

    def read_logits(self, first_row: int, into: memoryview) -> None:
        """See `Runner`."""
        width, stride = 4 * self._logits.width, self._logits.stride_bytes
        if width == stride:
            self._program.read(self._logits, into, first_row)
            return
        count = len(into) // width
        rows = memoryview(bytearray(count * stride))
        self._program.read(self._logits, rows, first_row)
        for i in range(count):
            into[i * width : (i + 1) * width] = rows[i * stride : i * stride + width]

    def is_lost(self, error: Exception) -> bool:
        """See `Runner`."""
        return isinstance(error, VulkanError) and error.is_lost

    # --- history and weights -----------------------------------------------------------------

    async def pack(self, tables: Tables, num_bytes: int, into: int) -> None:
        """See `Runner`."""
        table = tables(self._parcel.address)
        await self._in_thread(partial(self._pack, table, _host_view(into, num_bytes)))

    def _pack(self, table: array[int], into: memoryview) -> None:
        self._run_copies(table)
        self._beside.download(self._parcel, into)

    async def unpack(self, tables: Tables, num_bytes: int, source: int) -> None:
        """See `Runner`."""
        table = tables(self._parcel.address)
        await self._in_thread(partial(self._unpack, table, _host_view(source, num_bytes)))

    def _unpack(self, table: array[int], source: memoryview) -> None:
        self._beside.upload([(self._parcel, source)])
        self._run_copies(table)

    def _run_copies(self, table: array[int]) -> None:
        """In the thread of transfers: the copies of a table, until they are done."""
        queue, size = self._device.beside, COPY_BYTES // table.itemsize
        for start in range(0, len(table), size * _COPIES_AT_ONCE):
            part = memoryview(table)[start : start + size * _COPIES_AT_ONCE]
            self._beside.upload([(self._table, part)], after=tuple(self._done.values()))
            launch = copying.launch(self._copy, self._table.address, len(part) // size)
            with queue.recording(once=True) as commands:
                self._pipelines.record(commands, 0, [launch])
                self._device.barrier(commands)
            moment = queue.submit(commands)
            queue.wait(moment)
            queue.free(commands)
            self._done[queue] = moment

    async def load(self, span: DeviceSpan, address: int, pieces: Pieces) -> None:
        """Copy bytes at a host address to a whole span, in pieces; they stay there meanwhile."""
        await self._in_thread(partial(self._load, span, address, pieces))

    def _load(self, span: DeviceSpan, address: int, pieces: Pieces) -> None:
        source = _host_view(address, span.num_bytes)
        for piece in pieces(span.num_bytes):
            part = span.part(piece.start, len(piece))
            self._loading.upload([(part, source[piece.start : piece.stop])])
        moment = self._device.copies.last
        self._device.copies.wait(moment)
        self._done[moment.queue] = moment

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """Do it in the thread of transfers. Whoever is cancelled meanwhile waits for its end: what
        it reads and writes may be gone afterwards."""
        future = asyncio.get_running_loop().run_in_executor(self._transfers, work)
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    # --- memory ------------------------------------------------------------------------------

    def moved(self, part: int) -> None:
        """The weights of a block, or of the head, lie elsewhere from now on, or nowhere."""
        self._program.moved(part)

    def give(self, span: DeviceSpan) -> None:
        """A span is not used any more."""
        if self._is_poisoned:
            self._loading.clear(span, _POISON_WORD)
            self._device.copies.wait()
        self._arena.give(span)

    def close(self) -> None:
        """See `Runner`."""
        self._owned.close()


def _host_view(address: int, num_bytes: int) -> memoryview:
    """Bytes at a host address."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
