"""Vulkan devices: which there are, and what they can do. Knows no queue and no memory of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jitllm.devices.vulkan.api import Api, VulkanError, api
from jitllm.errors import JitllmError

API_VERSION = 1 << 22 | 3 << 12
"""1.3: timelines, addresses of buffers, integer dot products and sizes of subgroups are in it."""

VALIDATION_LAYER = "VK_LAYER_KHRONOS_validation"

_KINDS = ("other", "integrated", "discrete", "virtual", "software")

# What kernels and `Device` cannot do without, by the struct that says so.
REQUIRED = {
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

    @property
    def is_unified(self) -> bool:
        """Whether its memory is the host's."""
        return self.kind in ("integrated", "software")


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
        return [describe(self.api, i, handle) for i, handle in enumerate(self.handles())]

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


def describe(vulkan: Api, index: int, handle: Any) -> PhysicalDevice:
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


def features(vulkan: Api) -> tuple[Any, dict[str, Any]]:
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
    head, chain = features(vulkan)
    vulkan.call("vkGetPhysicalDeviceFeatures2", handle, head)
    wanted = ((chain[kind], name) for kind, names in REQUIRED.items() for name in names)
    return tuple(name for struct, name in wanted if not getattr(struct, name))
