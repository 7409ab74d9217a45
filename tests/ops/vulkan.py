"""A Vulkan device as something that a rig runs on, like a tier of the CPU.

The rig's memory is copied to the device with its guards, the op runs there, and everything comes
back, so that the rig's own checks see what the kernels wrote.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import numpy as np
import pytest

from jitllm.devices.vulkan.arena import Arena, DeviceSpan
from jitllm.devices.vulkan.device import Device
from jitllm.devices.vulkan.instance import Instance, has_validation
from jitllm.devices.vulkan.pipelines import Pipelines, traits
from jitllm.devices.vulkan.program import op_launches
from jitllm.devices.vulkan.staging import Staging
from jitllm.errors import JitllmError
from jitllm.jit.cache import ObjectCache, default_directory
from jitllm.jit.slang import SlangCompiler, Target, compiler_version
from jitllm.kernels.gpu import Bucket
from jitllm.kernels.op import ALL_KEYS, Buffer, Const, Ctx, Op, Weight
from jitllm.kernels.sample import PAIR_BYTES, RECORD_BYTES, Field
from tests.ops.harness import Guarded, Rig


@cache
def obstacle() -> str:
    """Why nothing runs on Vulkan here, or nothing."""
    try:
        instance = Instance()
        found = instance.devices()
        instance.close()
        compiler_version()
    except JitllmError as error:
        return str(error)
    return "" if found else "no Vulkan device"


class Gpu:
    """The first Vulkan device, or the one whose number is in JITLLM_TEST_VULKAN."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.instance = Instance(validate=has_validation(), report=self.messages.append)
        self.device = Device(self.instance, int(os.environ.get("JITLLM_TEST_VULKAN", "0")))
        self.traits = traits(self.device)
        self.arena = Arena(self.device, 1 << 30)
        self.staging = Staging(self.device, 1 << 20)
        compiler = SlangCompiler(Target.SPIRV, ObjectCache(default_directory()))
        self.pipelines = Pipelines(self.device, compiler)

    def run(self, rig: Rig, op: Op, pieces: int = 1) -> None:
        """Launch an op on a rig's memory; `pieces` has no meaning here."""
        with _Copies(self, rig) as copies:
            bucket = Bucket(rig.num_tokens, rig.num_outputs)
            launches = op_launches(op, copies, bucket)
            self.pipelines.build(d.kernel for d in launches)
            ctx = copies.context()
            queue = self.device.compute
            with queue.recording(once=True) as commands:
                self.pipelines.record(commands, ctx, [d for d in launches if all(d.groups)])
                self.device.barrier(commands)
            queue.wait(queue.submit(commands))
            queue.free(commands)
            copies.bring_back()
        self.arena.check()
        assert self.arena.used_bytes == 0
        assert not self.messages, self.messages


class _Copies:
    """A rig's memory on the device: `GpuEnv` of one op."""

    def __init__(self, gpu: Gpu, rig: Rig) -> None:
        self._gpu, self._rig = gpu, rig
        self.traits = gpu.traits
        self.num_blocks, self.page_tokens = rig.num_blocks, rig.page_tokens
        self.kv_element = rig.kv_element
        self._spans: list[DeviceSpan] = []
        self._guarded: dict[int, tuple[Guarded, DeviceSpan]] = {}
        self._loose: list[tuple[int, DeviceSpan]] = []
        self._restored: list[tuple[Any, Any]] = []

    def __enter__(self) -> _Copies:
        return self

    def __exit__(self, *error: object) -> None:
        for span in self._spans:
            self._gpu.arena.give(span)

    def _take(self, data: bytes) -> DeviceSpan:
        span = self._gpu.arena.take(len(data))
        assert span is not None
        self._spans.append(span)
        self._gpu.staging.upload([(span, data)])
        return span

    def _copy(self, memory: Guarded) -> int:
        """Device address of the bytes between the guards."""
        if id(memory) not in self._guarded:
            # From the guard on: the bytes then begin at a multiple of 64 on the device too.
            raw = memory.raw[memory.offset % 64 :]
            self._guarded[id(memory)] = memory, self._take(raw.tobytes())
        return self._guarded[id(memory)][1].address + memory.offset // 64 * 64

    def _at(self, address: int) -> int:
        """Device address of what the rig has at an address."""
        memories = self._rig.memory.values()
        memory = next(m for m in memories if m.address <= address < m.address + max(m.size, 1))
        return self._copy(memory) + address - memory.address

    def bring_back(self) -> None:
        """Everything into the rig's memory."""
        for memory, span in self._guarded.values():
            raw = memory.raw[memory.offset % 64 :]
            into = np.empty(len(raw), np.uint8)
            self._gpu.staging.download(span, memoryview(into))
            raw[:] = into
        for table, kept in self._restored:
            for field in (Field.HISTORY, Field.BIAS, Field.TOP):
                table[:, field // 8] = kept[:, field // 8]
        for address, span in self._loose:
            into = np.empty(span.num_bytes, np.uint8)
            self._gpu.staging.download(span, memoryview(into))
            ctypes.memmove(address, into.ctypes.data, span.num_bytes)

    # --- Env ---------------------------------------------------------------------------------

    def buffer(self, buffer: Buffer) -> int:
        return self._at(self._rig.buffer(buffer))

    def weight(self, weight: Weight) -> int:
        return self._at(self._rig.weight(weight))

    def const(self, const: Const) -> int:
        return self._take(const.data).address

    def block_slot(self, block: int) -> int:
        return self._rig.block_slot(block)

    def scratch(self, num_bytes: int) -> int:
        return self._take(b"\xff" * num_bytes).address

    # --- context -----------------------------------------------------------------------------

    def context(self) -> int:
        """Device address of the rig's step context, its arrays beside it."""
        rig = self._rig
        ctx = rig.context().copy()
        for word, values in (
            (Ctx.TOKENS, rig.tokens),
            (Ctx.POSITIONS, rig.positions),
            (Ctx.ROW_OF, rig.row_of),
            (Ctx.OUTPUTS, rig.outputs),
        ):
            if values is not None and len(values):
                ctx[word] = self._take(np.asarray(values, np.int32).tobytes()).address
        if rig.tables:
            heads = [
                self._take(np.array([self._copy(rig.pool[p]) for p in row], np.int64).tobytes())
                for row in rig.tables
            ]
            ctx[Ctx.TABLES] = self._take(
                np.array([head.address for head in heads], np.int64).tobytes()
            ).address
            ranges = rig.ranges or [ALL_KEYS] * len(rig.tables)
            ctx[Ctx.RANGES] = self._take(np.array(ranges, np.int64).tobytes()).address
        if rig.sampling is not None:
            ctx[Ctx.SAMPLING] = self._records(rig.sampling)
        return self._take(ctx.tobytes()).address

    def _records(self, records: Guarded) -> int:
        """Device address of sampling records; what they point to is copied, top lists come back,
        and afterwards the records have the host's addresses again."""
        table = records.view.view(np.uint64).reshape(-1, RECORD_BYTES // 8)
        counts = records.view.view(np.uint32).reshape(-1, RECORD_BYTES // 4)
        kept = table.copy()
        for words, numbers in zip(table, counts, strict=True):
            for field, count, size in (
                (Field.HISTORY, Field.NUM_HISTORY, 4),
                (Field.BIAS, Field.NUM_BIAS, PAIR_BYTES),
                (Field.TOP, Field.NUM_TOP, PAIR_BYTES),
            ):
                host, num_bytes = int(words[field // 8]), int(numbers[count // 4]) * size
                if num_bytes:
                    span = self._take(ctypes.string_at(host, num_bytes))
                    words[field // 8] = span.address
                    if field is Field.TOP:
                        self._loose.append((host, span))
        at = self._copy(records)
        self._restored.append((table, kept))
        return at


@cache
def gpu() -> Gpu:
    """One device for the whole session."""
    return Gpu()


needs_vulkan = pytest.mark.skipif(bool(obstacle()), reason=obstacle())
