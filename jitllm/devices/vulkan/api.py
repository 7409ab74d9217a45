"""The Vulkan API: the `vulkan` package's binding, with structs that live long enough.

The package's own constructors forget what a struct points to, so nested infos and strings would
dangle; `Api.struct` keeps all of it for as long as the struct lives. Knows the C API and its
errors. Knows no device and no memory.
"""

from __future__ import annotations

import re
import weakref
from functools import cache
from typing import Any

from jitllm.errors import JitllmError

INSTALL = "install a Vulkan loader and driver (Debian: apt install libvulkan1 mesa-vulkan-drivers)"
"""What to do where there is no Vulkan."""

_ABSENT = {
    "VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT": 0x20000,
    "VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT": 2,
    "VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT": 2,
}
"""Constants of Vulkan 1.3 that the package lacks."""


class VulkanError(JitllmError):
    """A call of the Vulkan API that failed. code: its result, VK_ERROR_DEVICE_LOST say."""

    def __init__(self, call: str, code: str, remedy: str = "") -> None:
        super().__init__(f"{call}: {code}", remedy)
        self.code = code

    @property
    def is_out_of_memory(self) -> bool:
        """The device or the host refused an allocation; nothing else is wrong."""
        return "OUT_OF" in self.code and "MEMORY" in self.code

    @property
    def is_lost(self) -> bool:
        """The device is gone, or hangs: nothing that it holds can be had any more."""
        return self.code in ("VK_ERROR_DEVICE_LOST", "VK_TIMEOUT")


class Api:
    """The functions and constants of the loader, and structs of its types."""

    def __init__(self) -> None:
        try:
            import vulkan
        except ImportError as error:
            raise JitllmError(
                "the package `vulkan` is not installed", "pip install 'jitllm[vulkan]'"
            ) from error
        except OSError as error:
            raise JitllmError("there is no Vulkan loader (libvulkan.so.1)", INSTALL) from error
        self.ffi: Any = vulkan.ffi
        self._lib: Any = vulkan.lib
        self._constants = vars(vulkan)
        self._kept: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._results = {
            value: name
            for name, value in self._constants.items()
            if isinstance(value, int) and name.startswith(("VK_ERROR_", "VK_TIMEOUT"))
        }

    def __getattr__(self, name: str) -> Any:
        """A constant: `api.VK_QUEUE_COMPUTE_BIT`."""
        value = _ABSENT.get(name, self._constants.get(name))
        if value is None:
            raise AttributeError(name)
        return value

    def struct(self, kind: str, **fields: Any) -> Any:
        """A pointer to a `kind`, its sType set. Lists become arrays, strings C strings; whatever
        a field points to lives as long as the struct."""
        made = self.ffi.new(f"{kind}*")
        types = dict(self.ffi.typeof(kind).fields)
        if "sType" in types:
            made.sType = getattr(self, f"VK_STRUCTURE_TYPE_{_snake(kind)}")
        kept = []
        for name, value in fields.items():
            owned = self._to_c(value, types[name].type)
            kept += [value, owned]
            setattr(made, name, owned)
        self._kept[made] = kept
        return made

    def _to_c(self, value: Any, kind: Any) -> Any:
        if isinstance(value, str):
            return self.ffi.new("char[]", value.encode())
        if not isinstance(value, list):
            return value
        if kind.kind != "pointer":
            return value
        item = kind.item.cname.removesuffix(" const").removeprefix("const ")
        items = [self._to_c(v, kind.item) for v in value]
        if items and kind.item.kind == "struct":
            items = [v[0] for v in items]
        array = self.ffi.new(f"{item}[]", items)
        self._kept[array] = (value, items)
        return array

    def call(self, name: str, *args: Any) -> Any:
        """Call a function; raises `VulkanError` for a result that is an error or a timeout."""
        result = getattr(self._lib, name)(*args)
        if (code := self._failure(name, result)) is not None:
            raise VulkanError(name, code)
        return result

    def _failure(self, name: str, result: Any) -> str | None:
        if not result or self.ffi.typeof(getattr(self._lib, name)).result.kind != "enum":
            return None
        return self._results.get(int(result))

    def make(self, name: str, kind: str, *args: Any) -> Any:
        """A handle (or other value) of type `kind` that function `name` writes last."""
        out = self.ffi.new(f"{kind}*")
        self.call(name, *args, out)
        return out[0]

    def list(self, name: str, kind: str, *args: Any) -> Any:
        """All that an enumerating function has to say: a C array of `kind`."""
        count = self.ffi.new("uint32_t*")
        self.call(name, *args, count, self.ffi.NULL)
        out = self.ffi.new(f"{kind}[]", count[0])
        self.call(name, *args, count, out)
        return out


@cache
def api() -> Api:
    """The API of this process. Raises `JitllmError` where there is no loader."""
    return Api()


@cache
def _snake(kind: str) -> str:
    """VkPhysicalDeviceVulkan12Features to PHYSICAL_DEVICE_VULKAN_1_2_FEATURES."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[0-9])(?=[A-Z])", "_", kind.removeprefix("Vk"))
    return re.sub(r"VULKAN_(\d)(\d)", r"VULKAN_\1_\2", words.upper())
