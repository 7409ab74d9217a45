"""An opened Vulkan device and its queues.

A queue has a timeline that every submission raises by one, so "done" is a number. Knows no kernels,
no arena and no budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

from jitllm.devices.vulkan.api import VulkanError
from jitllm.devices.vulkan.instance import REQUIRED, Instance, describe, features
from jitllm.errors import JitllmError


@dataclass(frozen=True, slots=True)
class Moment:
    """When a submission is done: the value that its queue's timeline has then."""

    queue: Queue
    value: int


class Queue:
    """One queue of a device and its timeline: submissions run in order, each raises it by one.

    For one thread at a time; another may wait meanwhile. Several may stand for one queue of the
    driver, each for its thread, and have a lock in common.
    """

    def __init__(self, device: Device, family: int, index: int, lock: Lock) -> None:
        self._device = device
        self._api = vulkan = device.api
        self._lock = lock
        out = vulkan.ffi.new("VkQueue*")
        vulkan.call("vkGetDeviceQueue", device.handle, family, index, out)
        self._handle = out[0]
        kind = vulkan.struct(
            "VkSemaphoreTypeCreateInfo", semaphoreType=vulkan.VK_SEMAPHORE_TYPE_TIMELINE
        )
        self._timeline = device.make("vkCreateSemaphore", "VkSemaphoreCreateInfo", pNext=kind)
        self._submitted = 0
        self._pool = device.make(
            "vkCreateCommandPool",
            "VkCommandPoolCreateInfo",
            queueFamilyIndex=family,
            flags=vulkan.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT,
        )

    @contextmanager
    def recording(self, *, once: bool = False, overlaps: bool = False) -> Iterator[Any]:
        """Commands for this queue, recorded within the `with`. once: submitted one time only.
        overlaps: submitted again before they are done."""
        vulkan = self._api
        info = vulkan.struct(
            "VkCommandBufferAllocateInfo",
            commandPool=self._pool,
            level=vulkan.VK_COMMAND_BUFFER_LEVEL_PRIMARY,
            commandBufferCount=1,
        )
        handle = self._device.handle
        commands = vulkan.make("vkAllocateCommandBuffers", "VkCommandBuffer", handle, info)
        flags = vulkan.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT if once else 0
        if overlaps:
            flags |= vulkan.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT
        begin = vulkan.struct("VkCommandBufferBeginInfo", flags=flags)
        vulkan.call("vkBeginCommandBuffer", commands, begin)
        yield commands
        vulkan.call("vkEndCommandBuffer", commands)

    def free(self, commands: Any) -> None:
        """Give commands back; they must not be running."""
        array = self._api.ffi.new("VkCommandBuffer[]", [commands])
        self._api.call("vkFreeCommandBuffers", self._device.handle, self._pool, 1, array)

    def submit(self, *commands: Any, after: Iterable[Moment] = ()) -> Moment:
        """Start commands behind all that was submitted here before, and behind `after`, which may
        be on other queues."""
        vulkan = self._api
        others = [moment for moment in after if moment.queue is not self]
        waits = [self._signal(moment.queue._timeline, moment.value) for moment in others]
        infos = [vulkan.struct("VkCommandBufferSubmitInfo", commandBuffer=one) for one in commands]
        moment = Moment(self, self._submitted + 1)
        info = vulkan.struct(
            "VkSubmitInfo2",
            waitSemaphoreInfoCount=len(waits),
            pWaitSemaphoreInfos=waits,
            commandBufferInfoCount=len(infos),
            pCommandBufferInfos=infos,
            signalSemaphoreInfoCount=1,
            pSignalSemaphoreInfos=self._signal(self._timeline, moment.value),
        )
        with self._lock:
            vulkan.call("vkQueueSubmit2", self._handle, 1, info, vulkan.ffi.NULL)
        self._submitted += 1
        return moment

    def _signal(self, timeline: Any, value: int) -> Any:
        stage = self._api.VK_PIPELINE_STAGE_2_ALL_COMMANDS_BIT
        return self._api.struct(
            "VkSemaphoreSubmitInfo", semaphore=timeline, value=value, stageMask=stage
        )

    @property
    def last(self) -> Moment:
        """Of the last submission."""
        return Moment(self, self._submitted)

    def wait(self, moment: Moment | None = None, timeout_s: float = 60.0) -> None:
        """Until a submission is done; by default the last one. The GIL is released. Raises
        `VulkanError` when the device is lost or the time is up."""
        value = self._submitted if moment is None else moment.value
        info = self._api.struct(
            "VkSemaphoreWaitInfo",
            semaphoreCount=1,
            pSemaphores=[self._timeline],
            pValues=[value],
        )
        self._api.call("vkWaitSemaphores", self._device.handle, info, int(timeout_s * 1e9))

    def is_done(self, moment: Moment) -> bool:
        """Whether a submission is done; raises `VulkanError` when the device is lost."""
        call = "vkGetSemaphoreCounterValue"
        now = self._api.make(call, "uint64_t", self._device.handle, self._timeline)
        return bool(now >= moment.value)

    def close(self) -> None:
        """Destroy it; nothing may be running."""
        self._device.destroy("vkDestroyCommandPool", self._pool)
        self._device.destroy("vkDestroySemaphore", self._timeline)


class Device:
    """An opened device. `close` it when nothing of it is in use.

    compute: the queue of kernels. beside: the same one, for another thread. copies: a queue whose
    copies run beside kernels, or the same one again where the device has no other. families: of
    all, as buffers want them.
    """

    def __init__(self, instance: Instance, index: int) -> None:
        self.api = instance.api
        self.physical_handle = instance.handles()[index]
        self.physical = describe(self.api, index, self.physical_handle)
        if self.physical.lacks:
            raise JitllmError(
                f"{self.physical.name} lacks {', '.join(self.physical.lacks)}",
                "update its driver or choose another device",
            )
        compute, copies = self._choose_queues()
        self.families = tuple(dict.fromkeys((compute[0], copies[0])))
        self.handle = self._open({compute, copies})
        lock = Lock()
        self.compute, self.beside = (Queue(self, *compute, lock) for _ in range(2))
        self.copies = Queue(self, *copies, lock if copies == compute else Lock())

    def _choose_queues(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(family, index) of the queue that computes, in a family that does not draw if there is
        one, and of one that copies, in a family that does nothing else if there is one."""
        vulkan = self.api
        families = vulkan.list(
            "vkGetPhysicalDeviceQueueFamilyProperties",
            "VkQueueFamilyProperties",
            self.physical_handle,
        )
        flags = [int(family.queueFlags) for family in families]
        computes, draws = vulkan.VK_QUEUE_COMPUTE_BIT, vulkan.VK_QUEUE_GRAPHICS_BIT
        able = [i for i, f in enumerate(flags) if f & computes]
        if not able:
            raise JitllmError(f"{self.physical.name} has no queue that computes")
        compute = min(able, key=lambda i: flags[i] & draws)
        copying = [
            i
            for i, f in enumerate(flags)
            if f & vulkan.VK_QUEUE_TRANSFER_BIT and not f & (computes | draws)
        ]
        if copying:
            return (compute, 0), (copying[0], 0)
        second = 1 if families[compute].queueCount > 1 else 0
        return (compute, 0), (compute, second)

    def _open(self, queues: set[tuple[int, int]]) -> Any:
        vulkan = self.api
        head, chain = features(vulkan)
        for kind, names in REQUIRED.items():
            for name in names:
                setattr(chain[kind], name, 1)
        counts = Counter(family for family, _ in queues)
        infos = [
            vulkan.struct(
                "VkDeviceQueueCreateInfo",
                queueFamilyIndex=family,
                queueCount=count,
                pQueuePriorities=[1.0] * count,
            )
            for family, count in counts.items()
        ]
        info = vulkan.struct(
            "VkDeviceCreateInfo",
            pNext=head,
            queueCreateInfoCount=len(infos),
            pQueueCreateInfos=infos,
        )
        null = vulkan.ffi.NULL
        return vulkan.make("vkCreateDevice", "VkDevice", self.physical_handle, info, null)

    def make(self, function: str, info: str, **fields: Any) -> Any:
        """A new object of this device: vkCreateFence from a VkFenceCreateInfo of these fields."""
        struct = self.api.struct(info, **fields)
        kind = info.removesuffix("CreateInfo")
        return self.api.make(function, kind, self.handle, struct, self.api.ffi.NULL)

    def destroy(self, function: str, handle: Any) -> None:
        """Destroy such an object."""
        self.api.call(function, self.handle, handle, self.api.ffi.NULL)

    def barrier(self, commands: Any) -> None:
        """What is recorded after it sees what was written before it, by copies and kernels."""
        vulkan = self.api
        stages = vulkan.VK_PIPELINE_STAGE_2_ALL_COMMANDS_BIT
        memory = vulkan.struct(
            "VkMemoryBarrier2",
            srcStageMask=stages,
            srcAccessMask=vulkan.VK_ACCESS_2_MEMORY_WRITE_BIT,
            dstStageMask=stages | vulkan.VK_PIPELINE_STAGE_2_HOST_BIT,
            dstAccessMask=vulkan.VK_ACCESS_2_MEMORY_READ_BIT | vulkan.VK_ACCESS_2_MEMORY_WRITE_BIT,
        )
        info = vulkan.struct("VkDependencyInfo", memoryBarrierCount=1, pMemoryBarriers=memory)
        vulkan.call("vkCmdPipelineBarrier2", commands, info)

    def rest(self) -> None:
        """Wait for everything; of a device that is lost nothing can be expected any more."""
        with suppress(VulkanError):
            self.api.call("vkDeviceWaitIdle", self.handle)

    def close(self) -> None:
        """Wait for everything and let the device go."""
        self.rest()
        for queue in (self.compute, self.beside, self.copies):
            queue.close()
        self.api.call("vkDestroyDevice", self.handle, self.api.ffi.NULL)
