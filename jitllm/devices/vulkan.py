"""Vulkan devices: which there are, what they can do, and one of them opened.

A queue has a timeline that every submission raises by one, so "done" is a number. Knows no kernels,
no arena and no budget: `vulkan_memory.py` and `vulkan_program.py` do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jitllm.devices.vk import Api, VulkanError, api
from jitllm.errors import JitllmError

API_VERSION = 1 << 22 | 3 << 12
"""1.3: timelines, addresses of buffers, integer dot products and sizes of subgroups are in it."""

VALIDATION_LAYER = "VK_LAYER_KHRONOS_validation"

_KINDS = ("other", "integrated", "discrete", "virtual", "software")

# What kernels and `Device` cannot do without, by the struct that says so.
_REQUIRED = {
    "VkPhysicalDeviceFeatures": ("shaderInt64", "shaderInt16"),
    "VkPhysicalDeviceVulkan11Features": ("storageBuffer16BitAccess",),
    "VkPhysicalDeviceVulkan12Features": (
        "bufferDeviceAddress",
        "timelineSemaphore",
        "shaderFloat16",
    ),
    "VkPhysicalDeviceVulkan13Features": (
        "subgroupSizeControl",
        "computeFullSubgroups",
        "synchronization2",
        "shaderIntegerDotProduct",
        "maintenance4",
    ),
}
_SUBGROUP_OPERATIONS = 1 | 16  # basic, shuffle


@dataclass(frozen=True, slots=True)
class Heap:
    """A heap of a device: `num_bytes`, and whether it is the device's own memory."""

    num_bytes: int
    is_local: bool


@dataclass(frozen=True, slots=True)
class PhysicalDevice:
    """What a driver says about one device.

    index: its place in the loader's list. free_bytes: of its largest own heap, by the driver's
    estimate; all of it where the driver has none. uuid: 32 hex digits that name the card under
    every API, or "" where the driver knows none. kind: discrete, integrated, virtual, software or
    other. varies_subgroups: the driver would choose another size for some kernels. has_fast_dot:
    dot products of four bytes are one instruction. max_allocation_bytes: of one allocation. lacks:
    required features that are absent.
    """

    index: int
    name: str
    uuid: str
    kind: str
    driver: str
    heaps: tuple[Heap, ...]
    free_bytes: int
    subgroup_size: int
    varies_subgroups: bool
    has_fast_dot: bool
    max_allocation_bytes: int
    shared_bytes: int
    max_groups: tuple[int, int, int]
    lacks: tuple[str, ...]


class Instance:
    """The loader and its drivers; `close` it, after its devices.

    validate: with the validation layer, whose messages go to `report`.
    """

    def __init__(
        self, *, validate: bool = False, report: Callable[[str], None] | None = None
    ) -> None:
        self.api = api()
        layers = [VALIDATION_LAYER] if validate else []
        extensions = ["VK_EXT_debug_utils"] if validate else []
        info = self.api.struct(
            "VkInstanceCreateInfo",
            pApplicationInfo=self.api.struct(
                "VkApplicationInfo", pApplicationName="jitllm", apiVersion=API_VERSION
            ),
            enabledLayerCount=len(layers),
            ppEnabledLayerNames=layers,
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=extensions,
        )
        try:
            self.handle = self.api.make("vkCreateInstance", "VkInstance", info, self.api.ffi.NULL)
        except VulkanError as error:
            raise JitllmError(f"Vulkan does not start: {error.problem}", "") from error
        self._messages = _Messages(self, report) if validate and report else None

    def devices(self) -> list[PhysicalDevice]:
        """All devices, in the loader's order; software ones among them."""
        return [_describe(self.api, i, handle) for i, handle in enumerate(self.handles())]

    def handles(self) -> list[Any]:
        """The loader's handles of the devices."""
        return list(self.api.list("vkEnumeratePhysicalDevices", "VkPhysicalDevice", self.handle))

    def close(self) -> None:
        """Let the loader go."""
        if self._messages:
            self._messages.close()
        self.api.call("vkDestroyInstance", self.handle, self.api.ffi.NULL)


def has_validation() -> bool:
    """The validation layer is installed."""
    vulkan = api()
    layers = vulkan.list("vkEnumerateInstanceLayerProperties", "VkLayerProperties")
    names = {vulkan.ffi.string(layer.layerName).decode() for layer in layers}
    return VALIDATION_LAYER in names


class _Messages:
    """What the validation layer has to say, told to a function."""

    def __init__(self, instance: Instance, report: Callable[[str], None]) -> None:
        vulkan, ffi = instance.api, instance.api.ffi
        self._instance = instance

        def tell(severity: int, kinds: int, data: Any, context: Any) -> int:
            report(ffi.string(data.pMessage).decode(errors="replace"))
            return 0

        self._tell = ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT", tell)
        self._info = vulkan.struct(
            "VkDebugUtilsMessengerCreateInfoEXT",
            messageSeverity=vulkan.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT
            | vulkan.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT,
            messageType=vulkan.VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT,
            pfnUserCallback=self._tell,
        )
        out = ffi.new("VkDebugUtilsMessengerEXT*")
        self._function("vkCreateDebugUtilsMessengerEXT")(instance.handle, self._info, ffi.NULL, out)
        self._handle = out[0]

    def _function(self, name: str) -> Any:
        vulkan = self._instance.api
        address = vulkan.call("vkGetInstanceProcAddr", self._instance.handle, name.encode())
        return vulkan.ffi.cast(f"PFN_{name}", address)

    def close(self) -> None:
        destroy = self._function("vkDestroyDebugUtilsMessengerEXT")
        destroy(self._instance.handle, self._handle, self._instance.api.ffi.NULL)


def _describe(vulkan: Api, index: int, handle: Any) -> PhysicalDevice:
    thirteen = vulkan.struct("VkPhysicalDeviceVulkan13Properties")
    twelve = vulkan.struct("VkPhysicalDeviceVulkan12Properties", pNext=thirteen)
    eleven = vulkan.struct("VkPhysicalDeviceVulkan11Properties", pNext=twelve)
    found = vulkan.struct("VkPhysicalDeviceProperties2", pNext=eleven)
    vulkan.call("vkGetPhysicalDeviceProperties2", handle, found)
    base, text = found.properties, vulkan.ffi.string
    is_new = base.apiVersion >= API_VERSION
    lacks = _missing_features(vulkan, handle) if is_new else ("Vulkan 1.3",)
    if is_new and ~eleven.subgroupSupportedOperations & _SUBGROUP_OPERATIONS:
        lacks += ("subgroup operations",)
    heaps, free_bytes = _heaps(vulkan, handle)
    uuid = bytes(eleven.deviceUUID).hex()
    return PhysicalDevice(
        index=index,
        name=text(base.deviceName).decode(errors="replace"),
        uuid=uuid if uuid.strip("0") else "",
        kind=_KINDS[base.deviceType] if base.deviceType < len(_KINDS) else "other",
        driver=f"{text(twelve.driverName).decode()} {text(twelve.driverInfo).decode()}".strip(),
        heaps=heaps,
        free_bytes=free_bytes,
        subgroup_size=int(eleven.subgroupSize),
        varies_subgroups=thirteen.minSubgroupSize != thirteen.maxSubgroupSize,
        has_fast_dot=bool(thirteen.integerDotProduct4x8BitPackedSignedAccelerated),
        max_allocation_bytes=min(int(eleven.maxMemoryAllocationSize), int(thirteen.maxBufferSize)),
        shared_bytes=int(base.limits.maxComputeSharedMemorySize),
        max_groups=tuple(base.limits.maxComputeWorkGroupCount),
        lacks=lacks,
    )


def _heaps(vulkan: Api, handle: Any) -> tuple[tuple[Heap, ...], int]:
    """The heaps of a device, and what is free of the largest one of its own."""
    null = vulkan.ffi.NULL
    offered = vulkan.list(
        "vkEnumerateDeviceExtensionProperties", "VkExtensionProperties", handle, null
    )
    names = {vulkan.ffi.string(one.extensionName).decode() for one in offered}
    has_estimate = "VK_EXT_memory_budget" in names
    estimate = vulkan.struct("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
    following = estimate if has_estimate else null
    found = vulkan.struct("VkPhysicalDeviceMemoryProperties2", pNext=following)
    vulkan.call("vkGetPhysicalDeviceMemoryProperties2", handle, found)
    count = found.memoryProperties.memoryHeapCount
    heaps = tuple(
        Heap(int(heap.size), bool(heap.flags & vulkan.VK_MEMORY_HEAP_DEVICE_LOCAL_BIT))
        for heap in (found.memoryProperties.memoryHeaps[i] for i in range(count))
    )
    largest = max(range(count), key=lambda i: (heaps[i].is_local, heaps[i].num_bytes))
    if not has_estimate:
        return heaps, heaps[largest].num_bytes
    free = int(estimate.heapBudget[largest]) - int(estimate.heapUsage[largest])
    return heaps, max(free, 0)


def _features(vulkan: Api) -> tuple[Any, dict[str, Any]]:
    """A chain of feature structs, and its members by type."""
    chain: dict[str, Any] = {}
    following = vulkan.ffi.NULL
    for version in (13, 12, 11):
        kind = f"VkPhysicalDeviceVulkan{version}Features"
        following = chain[kind] = vulkan.struct(kind, pNext=following)
    head = vulkan.struct("VkPhysicalDeviceFeatures2", pNext=following)
    chain["VkPhysicalDeviceFeatures"] = head.features
    return head, chain


def _missing_features(vulkan: Api, handle: Any) -> tuple[str, ...]:
    head, chain = _features(vulkan)
    vulkan.call("vkGetPhysicalDeviceFeatures2", handle, head)
    wanted = ((chain[kind], name) for kind, names in _REQUIRED.items() for name in names)
    return tuple(name for struct, name in wanted if not getattr(struct, name))


@dataclass(frozen=True, slots=True)
class Moment:
    """When a submission is done: the value that its queue's timeline has then."""

    queue: Queue
    value: int


class Queue:
    """One queue of a device and its timeline: submissions run in order, each raises it by one."""

    def __init__(self, device: Device, family: int, index: int) -> None:
        self._device = device
        self._api = vulkan = device.api
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
    def recording(self, *, once: bool = False) -> Iterator[Any]:
        """Commands for this queue, recorded within the `with`. once: submitted one time only."""
        vulkan = self._api
        info = vulkan.struct(
            "VkCommandBufferAllocateInfo",
            commandPool=self._pool,
            level=vulkan.VK_COMMAND_BUFFER_LEVEL_PRIMARY,
            commandBufferCount=1,
        )
        handle = self._device.handle
        commands = vulkan.make("vkAllocateCommandBuffers", "VkCommandBuffer", handle, info)
        flag = vulkan.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT if once else 0
        begin = vulkan.struct("VkCommandBufferBeginInfo", flags=flag)
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

    compute: the queue of kernels. copies: a queue whose copies run beside them, or the same queue
    where the device has no other. families: of both, as buffers want them.
    """

    def __init__(self, instance: Instance, index: int) -> None:
        self.api = instance.api
        self.physical_handle = instance.handles()[index]
        self.physical = _describe(self.api, index, self.physical_handle)
        if self.physical.lacks:
            raise JitllmError(
                f"{self.physical.name} lacks {', '.join(self.physical.lacks)}",
                "update its driver or choose another device",
            )
        compute, copies = self._choose_queues()
        self.families = tuple(dict.fromkeys((compute[0], copies[0])))
        self.handle = self._open({compute, copies})
        self.compute = Queue(self, *compute)
        self.copies = self.compute if copies == compute else Queue(self, *copies)

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
        head, chain = _features(vulkan)
        for kind, names in _REQUIRED.items():
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

    def close(self) -> None:
        """Wait for everything and let the device go."""
        self.api.call("vkDeviceWaitIdle", self.handle)
        for queue in {self.compute, self.copies}:
            queue.close()
        self.api.call("vkDestroyDevice", self.handle, self.api.ffi.NULL)
