"""A model's ops on a Vulkan device: pipelines, and runs of blocks recorded once.

A recording serves every step that fits its bucket; kernels read the true counts from the step
context, so nothing happens on the host between ops. Knows ops and addresses. Knows no model, no
sequence, no budget.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jitllm.devices.host import Limits, Pass
from jitllm.devices.mixtures import parts
from jitllm.devices.order import ordered
from jitllm.devices.vulkan.arena import Arena, DeviceSpan
from jitllm.devices.vulkan.device import Moment
from jitllm.devices.vulkan.pipelines import Pipelines, traits
from jitllm.devices.vulkan.staging import Staging
from jitllm.devices.vulkan.step import DeviceStep, StepLayout
from jitllm.jit.cpu import Progress
from jitllm.kernels.attention import Attention
from jitllm.kernels.attention.gpu import ranged_launches
from jitllm.kernels.gpu import Bucket, GpuLaunch
from jitllm.kernels.op import (
    ALL_KEYS,
    PAGES,
    Buffer,
    Const,
    KernelSpec,
    Op,
    Rows,
    Weight,
)

_ALIGN = 256
_TABLES, _FIRST_BLOCK = 1, 2
_BLOCK = 6
"""Sections of a program: embed, tables, six of each block (what is before its attention, attention,
what is behind it in four parts, all but the first empty where there are no experts), head."""


def op_launches(op: Op, env: Any, bucket: Bucket) -> list[GpuLaunch]:
    """What `kernels/<op>/gpu.py` says of an op."""
    emitter = importlib.import_module(f"{type(op).__module__}.gpu")
    found: list[GpuLaunch] = emitter.launches(op, env, bucket)
    return found


def _divided(ops: Sequence[Op]) -> Iterator[Sequence[Op]]:
    """The six sections of a block; all in the first one if none of its ops reads pages."""
    at = next((i for i, op in enumerate(ops) if PAGES in op.reads), len(ops))
    behind = parts(ops[at + 1 :])
    yield from (ops[:at], ops[at : at + 1], *behind, *[()] * (_BLOCK - 2 - len(behind)))


class VulkanProgram:
    """A compiled stack of blocks: `GpuEnv` of its ops, owner of their buffers.

    The arguments are those of `HostProgram`; weight_address gives device addresses, which are asked
    for when a run is recorded (before, anything will do for a block that is not there). staging: of
    the compute queue. has_passes: attention may be divided into passes. Raises `JitllmError` where
    the arena has no room for the buffers.
    """

    def __init__(
        self,
        embed: Sequence[Op],
        tables: Sequence[Op],
        blocks: Sequence[tuple[int, Sequence[Op]]],
        head: Sequence[Op],
        *,
        limits: Limits,
        arena: Arena,
        staging: Staging,
        pipelines: Pipelines,
        weight_address: Callable[[Weight], int],
        page_tokens: int,
        kv_element: str,
        has_passes: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.limits = limits
        self.num_blocks = len(blocks)
        self.blocks_at_once = max(self.num_blocks, 1)
        """Most blocks in one submission: drivers give up on those that take long."""
        self.page_tokens = page_tokens
        self.kv_element = kv_element
        self.traits = traits(arena.device)
        self._arena, self._staging, self._pipelines = arena, staging, pipelines
        self._device = arena.device
        self._weight_address = weight_address
        self._slots = {block: slot for slot, (block, _) in enumerate(blocks)}
        self._spans: list[DeviceSpan] = []
        self.num_bytes = 0
        """What all of its buffers take."""
        self._consts: dict[str, tuple[DeviceSpan, bytes]] = {}
        self._scratch_bytes = 0
        self._scratch_address = 0
        divided = (section for _, ops in blocks for section in _divided(ops))
        self._sections = [embed, tables, *divided, head]
        self._attention = range(_FIRST_BLOCK + 1, len(self._sections) - 1, _BLOCK)
        starts = range(_FIRST_BLOCK, len(self._sections) - 1, _BLOCK)
        self.blocks = [range(start, start + _BLOCK) for start in starts]
        """The sections of each block."""
        self._has_passes = has_passes
        self._spent: list[Any] = []  # commands that were for one pass
        self._recorded: dict[tuple[int, int, Bucket], Any] = {}
        try:
            self._build(progress)
        except BaseException:
            self.close()
            raise

    def _build(self, progress: Progress | None) -> None:
        """Take memory and compile."""
        layout = StepLayout(self.limits)
        self.step = DeviceStep(layout, self._take(layout.num_bytes), self._staging)
        self._offsets, num_bytes = self._lay_out()
        self._buffers = self._take(num_bytes)
        self._staging.clear(self._buffers)  # padding is zero for good
        kernels = self._kernels()  # which also tells how much scratch they want
        self._scratch_address = self._take(max(self._scratch_bytes, 1)).address
        self._pipelines.build(kernels, progress)

    def _kernels(self) -> list[KernelSpec]:
        """All that any step needs: a launch looks at the bucket's tokens or at its outputs."""
        tokens, outputs = sizes(self.limits.tokens), sizes(self.limits.outputs)
        buckets = [Bucket(t, outputs[-1]) for t in tokens] + [Bucket(1, o) for o in outputs]
        whole = [
            launch.kernel
            for bucket in buckets
            for ops in self._sections
            for launch in self._launches(ops, bucket)
        ]
        if not self._has_passes:
            return whole
        attention = [op for ops in self._sections for op in ops if isinstance(op, Attention)]
        return whole + [
            launch.kernel for op in attention for launch in ranged_launches(op, self, buckets[0])
        ]

    def bucket(self, num_tokens: int, num_outputs: int) -> Bucket:
        """The smallest bucket of a step."""
        tokens, outputs = sizes(self.limits.tokens), sizes(self.limits.outputs)
        return Bucket(
            min(n for n in tokens if n >= num_tokens), min(n for n in outputs if n >= num_outputs)
        )

    def _take(self, num_bytes: int) -> DeviceSpan:
        if (span := self._arena.take(num_bytes)) is None:
            raise self._arena.refusal("the buffers of a step", num_bytes)
        self._spans.append(span)
        self.num_bytes += num_bytes
        return span

    def _launches(
        self, ops: Sequence[Op], bucket: Bucket, *, is_pass: bool = False
    ) -> list[GpuLaunch]:
        """Dispatches with barriers only where an op depends on one since the last barrier. is_pass:
        of the keys in ranges."""
        found: list[GpuLaunch] = []
        for op, depends in ordered(ops):
            if is_pass and isinstance(op, Attention):
                launches = ranged_launches(op, self, bucket)
            else:
                launches = op_launches(op, self, bucket)
            for part, launch in enumerate(launches):
                found.append(launch if part else replace(launch, barrier=depends))
        return found

    # --- Env ---------------------------------------------------------------------------------

    def _lay_out(self) -> tuple[dict[str, int], int]:
        """Offsets of all buffers, by name, and the bytes they take in all."""
        offsets: dict[str, int] = {}
        end = 0
        for buffer in (b for ops in self._sections for op in ops for b in (*op.reads, *op.writes)):
            if buffer.name not in offsets:
                offsets[buffer.name] = end
                rows = self.limits.outputs if buffer.rows is Rows.OUTPUTS else self.limits.tokens
                end += -(-rows * buffer.stride_bytes // _ALIGN) * _ALIGN
        return offsets, end

    def buffer(self, buffer: Buffer) -> int:
        """Address of row 0 of a buffer; equal names are one buffer."""
        return self._buffers.address + self._offsets[buffer.name]

    def weight(self, weight: Weight) -> int:
        """Address of a weight's first byte."""
        return self._weight_address(weight)

    def const(self, const: Const) -> int:
        """Address of a constant; equal names are one constant. Its bytes may be others at the next
        recording: addresses of weights that have moved."""
        span, data = self._consts.get(const.name) or (self._take(len(const.data)), b"")
        if data != const.data:
            self._staging.upload([(span, const.data)])
            self._consts[const.name] = span, const.data
        return span.address

    def block_slot(self, block: int) -> int:
        """Column of a block in page tables."""
        return self._slots[block]

    def scratch(self, num_bytes: int) -> int:
        """See `GpuEnv.scratch`."""
        self._scratch_bytes = max(self._scratch_bytes, num_bytes)
        return self._scratch_address

    # --- running -----------------------------------------------------------------------------

    def run(
        self,
        start: int,
        stop: int,
        bucket: Bucket,
        *,
        embeds: bool,
        begins: bool,
        ends: bool,
        after: Iterable[Moment] = (),
        passes: Iterable[Pass] = (),
    ) -> Moment:
        """Start blocks [start, stop) for the step that `self.step` uploaded; see `HostProgram.run`.

        after: what must be done before, weights on their way say. passes: each is asked for when
        the one before it was submitted, so whatever it needs may be submitted behind that. Returns
        when it is done.
        """
        after = tuple(after)
        *opening, last = self.sections(start, stop, embeds=embeds, begins=begins, ends=ends)
        for sections in opening:
            self.run_sections(sections, bucket, after=after)
        return self.run_sections(last, bucket, after=after, passes=passes)

    def sections(
        self, start: int, stop: int, *, embeds: bool, begins: bool, ends: bool
    ) -> Iterator[range]:
        """See `HostProgram.sections`."""
        first = self._section(start)
        if begins and stop > start:
            opening = 0 if embeds else _TABLES
            if start:
                yield range(opening, _FIRST_BLOCK)
            else:
                first = opening
        yield range(first, len(self._sections) if ends else self._section(stop))

    def run_sections(
        self,
        sections: range,
        bucket: Bucket,
        *,
        after: Iterable[Moment] = (),
        passes: Iterable[Pass] = (),
    ) -> Moment:
        """Start some neighbouring sections; see `run`."""
        self._free_spent()
        first, last, is_ranged = sections.start, sections.stop, False
        for one in passes:
            attention = self._attention[one.block]
            if first <= attention:  # the first one of its block
                self._submit_blocks(first, attention, bucket, after, takes_all=is_ranged)
            self._submit_ranges(one.ranges)
            self._submit(attention, attention + 1, bucket)
            first, is_ranged = attention + 1, True
        self._submit_blocks(first, last, bucket, after, takes_all=is_ranged)
        return self._device.compute.last

    def _section(self, block: int) -> int:
        """The first one of a block, or what comes after the last."""
        return _FIRST_BLOCK + _BLOCK * block

    def _submit_blocks(
        self, first: int, last: int, bucket: Bucket, after: Iterable[Moment], *, takes_all: bool
    ) -> None:
        """Sections [first, last), so many blocks at once as may be. takes_all: attention takes all
        keys again."""
        if takes_all:
            self._submit_ranges([ALL_KEYS] * self.limits.rows)
        size = _BLOCK * self.blocks_at_once
        block = max(first, _FIRST_BLOCK) - max(first - _FIRST_BLOCK, 0) % _BLOCK
        cuts = [first, *range(block + size, last, size), last]
        for begin, end in zip(cuts, cuts[1:], strict=False):
            if begin < end:
                self._submit(begin, end, bucket, after)

    def _submit_ranges(self, ranges: Iterable[tuple[int, int]]) -> None:
        """From here on attention takes these keys of each row, and none of the others."""
        span, keys = self.step.ranges(ranges)
        data = self._device.api.ffi.from_buffer(keys)
        with self._device.compute.recording(once=True) as commands:
            self._device.barrier(commands)
            target = span.chunk.buffer, span.offset, len(keys)
            self._device.api.call("vkCmdUpdateBuffer", commands, *target, data)
            self._device.barrier(commands)
        self._device.compute.submit(commands)
        self._spent.append(commands)

    def copy(
        self, pairs: Iterable[tuple[DeviceSpan, DeviceSpan]], after: Iterable[Moment] = ()
    ) -> None:
        """Start to copy the first span of each pair to the second one, between what was submitted
        before and what will be."""
        vulkan = self._device.api
        with self._device.compute.recording(once=True) as commands:
            self._device.barrier(commands)
            for source, target in pairs:
                region = vulkan.struct(
                    "VkBufferCopy",
                    srcOffset=source.offset,
                    dstOffset=target.offset,
                    size=source.num_bytes,
                )
                buffers = source.chunk.buffer, target.chunk.buffer
                vulkan.call("vkCmdCopyBuffer", commands, *buffers, 1, region)
            self._device.barrier(commands)
        self._device.compute.submit(commands, after=after)
        self._spent.append(commands)

    def _free_spent(self) -> None:
        if self._spent:
            self._device.compute.wait()
        while self._spent:
            self._device.compute.free(self._spent.pop())

    def _submit(
        self, first: int, last: int, bucket: Bucket, after: Iterable[Moment] = ()
    ) -> Moment:
        return self._device.compute.submit(self._recording(first, last, bucket), after=after)

    def _recording(self, first: int, last: int, bucket: Bucket) -> Any:
        """Commands of sections [first, last), recorded at their first use. The attention of a block
        alone is that of a pass."""
        key = first, last, bucket
        if key not in self._recorded:
            is_pass = last == first + 1 and first in self._attention
            with self._device.compute.recording(overlaps=is_pass) as commands:
                for ops in self._sections[first:last]:
                    launches = self._launches(ops, bucket, is_pass=is_pass)
                    self._pipelines.record(commands, self.step.address, launches)
                self._device.barrier(commands)
            self._recorded[key] = commands
        return self._recorded[key]

    def moved(self, block: int) -> None:
        """The weights of a block are at other addresses from now on, those of the embedding with
        the first one's; waits for what is running. The number after the last stands for the head.
        """
        self._device.compute.wait()
        start, stop = self._section(block), self._section(block + 1)
        first = 0 if block == 0 else start
        for key in [k for k in self._recorded if k[0] < stop and first < k[1]]:
            self._device.compute.free(self._recorded.pop(key))

    def read(self, buffer: Buffer, into: memoryview, first_row: int = 0) -> None:
        """Rows of a buffer from `first_row` on; waits for all that was submitted."""
        offset = self._offsets[buffer.name] + first_row * buffer.stride_bytes
        self._staging.download(self._buffers, into, offset)

    def write(self, buffer: Buffer, rows: memoryview | bytes) -> None:
        """Set the first rows of a buffer."""
        part = self._buffers.part(self._offsets[buffer.name], len(rows))
        self._staging.upload([(part, rows)])

    def close(self) -> None:
        """Give the memory back; waits for what is running."""
        self._device.rest()
        for commands in self._spent:
            self._device.compute.free(commands)
        for commands in self._recorded.values():
            self._device.compute.free(commands)
        for span in self._spans:
            self._arena.give(span)


def sizes(limit: int) -> list[int]:
    """Powers of two below a limit, and the limit."""
    return [*(1 << i for i in range(max(limit - 1, 0).bit_length())), limit]
