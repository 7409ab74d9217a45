"""How fast Vulkan devices multiply: what the fastest of several is chosen by.

A token is mostly products of one row with matrices that no cache holds, so that is what is timed,
with the kernel that models use. Knows one kernel. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from time import perf_counter

from jitllm.devices.choose import AvailableDevice
from jitllm.devices.grammar import DeviceEntry
from jitllm.devices.host import Limits
from jitllm.devices.vulkan.arena import Arena, DeviceSpan
from jitllm.devices.vulkan.device import Device
from jitllm.devices.vulkan.instance import Instance
from jitllm.devices.vulkan.pipelines import Pipelines, traits
from jitllm.devices.vulkan.program import op_launches
from jitllm.devices.vulkan.staging import Staging
from jitllm.devices.vulkan.step import DeviceStep, StepLayout
from jitllm.errors import JitllmError
from jitllm.jit.cache import ObjectCache
from jitllm.jit.slang import SlangCompiler, Target
from jitllm.kernels.gpu import Bucket
from jitllm.kernels.layout import FORMATS, FormatCode
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.op import Buffer, Element, Weight

COLS = 4096
MAX_BYTES = 256 << 20
"""Of the matrix."""
MEMORY_PART = 4
"""It takes at most one part in so many of what is free."""

_NUM_PRODUCTS = 4
_NUM_TRIES = 3


def with_speeds(
    entries: Sequence[DeviceEntry], devices: Sequence[AvailableDevice], cache: ObjectCache
) -> tuple[AvailableDevice, ...]:
    """The same devices; where an entry takes the fastest of several first, with their speeds. One
    that cannot be measured is the slowest."""
    cards = [device for device in devices if not (device.is_software or device.lacks)]
    is_choice = any(entry.is_set and entry.backend != "cpu" for entry in entries)
    if len(cards) < 2 or not is_choice:
        return tuple(devices)
    speeds = {card.ordinal: _speed(card, cache) for card in cards}
    return tuple(replace(device, speed=speeds.get(device.ordinal, 0.0)) for device in devices)


def _speed(device: AvailableDevice, cache: ObjectCache) -> float:
    num_bytes = min(device.free_bytes // MEMORY_PART, MAX_BYTES)
    try:
        return read_rate(device.ordinal, num_bytes, cache)
    except JitllmError:
        return 0.0


def read_rate(index: int, num_bytes: int, cache: ObjectCache) -> float:
    """Bytes of 8-bit weights a second that a device multiplies with one row.

    index: its place in the loader's list. num_bytes: of the matrix, rounded down. Raises
    `JitllmError` where the device or the compiler does not work.
    """
    form = FORMATS[FormatCode.Q8_0]
    rows = max(num_bytes // form.tile_bytes(COLS), 1) * 16
    matrix_bytes = form.matrix_bytes(rows, COLS)
    with ExitStack() as owned:
        instance = owned.enter_context(closing(Instance()))
        device = owned.enter_context(closing(Device(instance, index)))
        arena = owned.enter_context(closing(Arena(device, 2 * matrix_bytes + (64 << 20))))
        compiler = SlangCompiler(Target.SPIRV, cache)
        pipelines = owned.enter_context(closing(Pipelines(device, compiler)))
        staging = owned.enter_context(closing(Staging(device, 1 << 20)))

        def take(size: int) -> DeviceSpan:
            if (span := arena.take(size)) is None:
                raise arena.refusal("a matrix", size)
            staging.clear(span)
            return span

        src, dst = Buffer("src", COLS, element=Element.Q8), Buffer("dst", rows)
        weight = Weight("matrix", None, form.code, rows, COLS)
        layout = StepLayout(Limits(1, 1, 1))
        step = DeviceStep(layout, take(layout.num_bytes), staging)
        step.set_counts(1, 1)
        step.upload()
        places: dict[Buffer | Weight, int] = {weight: take(matrix_bytes).address}
        places |= {buffer: take(buffer.stride_bytes).address for buffer in (src, dst)}
        launches = op_launches(MatMul(src, dst, weight), _Env(device, places), Bucket(1, 1))
        pipelines.build(launch.kernel for launch in launches)
        queue = device.compute
        with queue.recording() as commands:
            pipelines.record(commands, step.address, launches * _NUM_PRODUCTS)
        queue.wait()

        def seconds() -> float:
            began_s = perf_counter()
            queue.wait(queue.submit(commands))
            return perf_counter() - began_s

        fastest_s = min(seconds() for _ in range(_NUM_TRIES))
        queue.free(commands)
        return _NUM_PRODUCTS * matrix_bytes / fastest_s
    raise AssertionError("unreachable")


class _Env:
    """A `GpuEnv` of one product."""

    def __init__(self, device: Device, places: dict[Buffer | Weight, int]) -> None:
        self.traits = traits(device)
        self._places = places

    def buffer(self, buffer: Buffer) -> int:
        return self._places[buffer]

    def weight(self, weight: Weight) -> int:
        return self._places[weight]
