"""Copies in strided memory on a Vulkan device: what NumPy moves, and not a byte beside it."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from jitllm.devices.vulkan.arena import DeviceSpan
from jitllm.devices.vulkan.pipelines import traits
from jitllm.kernels.copy import RECORD_WORDS
from jitllm.kernels.copy.gpu import MAX_GROUPS, kernel, launch
from tests.ops.vulkan import Gpu, gpu, needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]

POISON = 0xEE


def put(device: Gpu, data: bytes) -> DeviceSpan:
    span = device.arena.take(len(data))
    assert span is not None
    device.staging.upload([(span, data)])
    return span


def run(device: Gpu, table: array[int], unit_bytes: int) -> None:
    spec = kernel(traits(device.device), unit_bytes)
    device.pipelines.build([spec])
    records = put(device, table.tobytes())
    queue = device.device.compute
    with queue.recording(once=True) as commands:
        found = launch(spec, records.address, len(table) // RECORD_WORDS)
        device.pipelines.record(commands, 0, [found])
        device.device.barrier(commands)
    queue.wait(queue.submit(commands))
    queue.free(commands)
    device.arena.give(records)


@pytest.mark.parametrize("num_copies", [1, 90, MAX_GROUPS + 7])
@pytest.mark.parametrize("unit", [2, 4])
def test_rows_of_any_length_and_stride_arrive(unit: int, num_copies: int) -> None:
    rng, device = np.random.default_rng(7), gpu()
    longest = 1500 if num_copies < 100 else 8
    lengths = unit * rng.integers(1, longest, num_copies)
    num_rows = rng.integers(0, 6, num_copies)
    wide, narrow = (lengths + unit * rng.integers(0, 40, num_copies) for _ in range(2))
    guard = 64
    source = rng.integers(0, 256, int((num_rows * narrow).sum()) + unit, dtype=np.uint8)
    expected = np.full(int((num_rows * wide).sum()) + 2 * guard, POISON, np.uint8)
    from_, into = put(device, source.tobytes()), put(device, expected.tobytes())

    table, at, to = array("Q"), 0, guard
    for length, rows, far, near in zip(lengths, num_rows, wide, narrow, strict=True):
        table.extend(map(int, (into.address + to, far, from_.address + at, near, rows, length)))
        for _ in range(rows):
            expected[to : to + length] = source[at : at + length]
            at, to = at + near, to + far
    run(device, table, unit)
    found = np.empty_like(expected)
    device.staging.download(into, memoryview(found))
    device.arena.give(from_)
    device.arena.give(into)
    assert np.array_equal(found, expected)
    assert not device.messages, device.messages
