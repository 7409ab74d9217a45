"""A Vulkan device's memory: the arena's ledger is what the driver took, and bytes arrive."""

from __future__ import annotations

import random

import pytest

from jitllm.devices.vulkan.api import VulkanError, api
from jitllm.devices.vulkan.arena import ALIGN, Arena
from jitllm.devices.vulkan.device import Moment
from jitllm.devices.vulkan.staging import Staging
from tests.ops.vulkan import gpu, needs_vulkan

pytestmark = [pytest.mark.vulkan, needs_vulkan]

CHUNK = 1 << 20


def arena(budget_bytes: int = 64 << 20) -> Arena:
    return Arena(gpu().device, budget_bytes, chunk_bytes=CHUNK)


def test_spans_are_aligned_and_apart() -> None:
    mine = arena()
    spans = [mine.take(n) for n in (1, 255, 256, 257, 5000)]
    assert None not in spans
    ends = 0
    for span in sorted((s for s in spans if s), key=lambda s: s.address):
        assert span.address % ALIGN == 0
        assert span.address >= ends
        ends = span.address + span.num_bytes
    assert mine.used_bytes == 256 * 3 + 512 + 5120
    mine.check()
    mine.close()
    assert mine.allocated_bytes == 0


def test_a_span_may_be_larger_than_a_chunk() -> None:
    mine = arena()
    span = mine.take(3 * CHUNK + 1)
    assert span is not None
    assert mine.allocated_bytes >= 3 * CHUNK + ALIGN
    mine.give(span)
    assert mine.allocated_bytes == mine.used_bytes == 0


def test_the_budget_is_never_exceeded_and_its_end_is_a_value() -> None:
    mine = arena(budget_bytes=3 * CHUNK)
    spans = []
    while (span := mine.take(CHUNK // 2)) is not None:
        spans.append(span)
        assert mine.allocated_bytes <= mine.budget_bytes
    assert len(spans) >= 4
    mine.give(spans.pop())
    assert mine.take(CHUNK // 2) is not None
    mine.close()


def test_what_no_device_has_is_a_value_too() -> None:
    mine = Arena(gpu().device, 1 << 60)
    assert mine.take(gpu().device.physical.max_allocation_bytes + 1) is None
    assert mine.allocated_bytes == 0


def test_nothing_leaks_in_any_order() -> None:
    """Spans of all sizes come and go; holes join again, and empty chunks go back to the driver."""
    mine, spans, rng = arena(), [], random.Random(1)
    for _ in range(2000):
        if spans and rng.random() < 0.5:
            mine.give(spans.pop(rng.randrange(len(spans))))
        elif (span := mine.take(rng.choice([1, 300, 4096, 70_000, 900_000, 2 << 20]))) is not None:
            spans.append(span)
        mine.check()
    for span in spans:
        mine.give(span)
    assert mine.allocated_bytes == mine.used_bytes == 0


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 50_000])
def test_bytes_come_back(num_bytes: int) -> None:
    """Also such as need many halves of the staging buffer, and neighbours stay as they are."""
    mine, staging = arena(), Staging(gpu().device, half_bytes=4096)
    data = [random.Random(i).randbytes(num_bytes) for i in range(3)]
    spans = [mine.take(num_bytes) for _ in data]
    staging.upload(zip(spans, data, strict=True))
    staging.upload([(spans[1], b"")])
    for span, expected in zip(spans, data, strict=True):
        into = bytearray(num_bytes)
        staging.download(span, memoryview(into))
        assert into == expected
    middle = bytearray(max(num_bytes - 2, 0))
    staging.download(spans[1], memoryview(middle), offset=1)
    assert middle == data[1][1 : 1 + len(middle)]
    staging.close()
    mine.close()


def test_an_upload_may_be_changed_as_soon_as_it_returns() -> None:
    mine, staging = arena(), Staging(gpu().device, half_bytes=4096)
    span = mine.take(10_000)
    assert span is not None
    source = bytearray(b"x" * 10_000)
    moment = staging.upload([(span, memoryview(source))])
    source[:] = bytes(10_000)
    moment.queue.wait(moment)
    assert moment.queue.is_done(moment)
    into = bytearray(10_000)
    staging.download(span, memoryview(into))
    assert bytes(into) == b"x" * 10_000
    staging.close()
    mine.close()


def test_structs_keep_what_they_point_to() -> None:
    """Nested structs, strings and arrays of strings, made on the way."""
    vulkan = api()
    info = vulkan.struct(
        "VkInstanceCreateInfo",
        pApplicationInfo=vulkan.struct("VkApplicationInfo", pApplicationName="na" + "me"),
        enabledLayerCount=2,
        ppEnabledLayerNames=[f"layer {i}" for i in range(2)],
    )
    for i in range(1000):
        vulkan.struct("VkApplicationInfo", pApplicationName=f"other {i}")
    text = vulkan.ffi.string
    assert text(info.pApplicationInfo.pApplicationName) == b"name"
    assert [text(info.ppEnabledLayerNames[i]) for i in range(2)] == [b"layer 0", b"layer 1"]
    assert info.sType == vulkan.VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO


def test_an_error_is_named() -> None:
    queue = gpu().device.compute
    never = Moment(queue, queue.last.value + 10**6)
    assert not queue.is_done(never)
    with pytest.raises(VulkanError, match="vkWaitSemaphores: VK_TIMEOUT"):
        queue.wait(never, timeout_s=0)


def test_copies_of_one_queue_wait_for_another() -> None:
    """Uploads go round by the queue of copies, downloads by that of kernels, each after the
    other."""
    device = gpu().device
    mine, there, back = arena(), Staging(device, 4096, device.copies), Staging(device, 4096)
    span = mine.take(20_000)
    assert span is not None
    before = back.upload([(span, bytes(20_000))])
    for fill in range(1, 5):
        before = there.upload([(span, bytes([fill]) * 20_000)], after=[before])
        into = bytearray(20_000)
        back.download(span, memoryview(into), after=[before])
        assert bytes(into) == bytes([fill]) * 20_000
    there.close()
    back.close()
    mine.close()


def test_devices_are_listed() -> None:
    for index, found in enumerate(gpu().instance.devices()):
        assert found.index == index
        assert found.name
        assert found.kind in ("discrete", "integrated", "virtual", "software", "other")
        assert len(found.uuid) in (0, 32)
        assert found.subgroup_size & (found.subgroup_size - 1) == 0
        assert any(heap.num_bytes for heap in found.heaps)
