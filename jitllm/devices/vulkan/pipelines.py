"""Kernels of a Vulkan device, ready to be launched. Knows launches, no op and no program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jitllm.devices.vulkan.device import Device
from jitllm.errors import JitllmError
from jitllm.jit.cpu import Progress
from jitllm.jit.slang import SlangCompiler
from jitllm.kernels.gpu import GpuLaunch, Traits
from jitllm.kernels.op import (
    MAX_ARGS,
    KernelSpec,
)

_PUSH_BYTES = 8 * (1 + MAX_ARGS)


def traits(device: Device) -> Traits:
    """What kernels are specialised for on a device."""
    facts = device.physical
    return Traits(facts.subgroup_size, facts.has_fast_dot, facts.shared_bytes)


class Pipelines:
    """Kernels of one device, ready to be launched; `close` them when no recording is left."""

    def __init__(self, device: Device, compiler: SlangCompiler) -> None:
        self._device = device
        self._compiler = compiler
        push = device.api.struct(
            "VkPushConstantRange",
            stageFlags=device.api.VK_SHADER_STAGE_COMPUTE_BIT,
            size=_PUSH_BYTES,
        )
        self.layout = device.make(
            "vkCreatePipelineLayout",
            "VkPipelineLayoutCreateInfo",
            pushConstantRangeCount=1,
            pPushConstantRanges=push,
        )
        self._made: dict[KernelSpec, Any] = {}

    def build(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> None:
        """Make what is missing; see `SlangCompiler.build`."""
        wanted = [s for s in dict.fromkeys(specs) if s not in self._made]
        code = self._compiler.build(wanted, progress)
        for spec in wanted:
            self._made[spec] = self._make(code[spec])

    def _make(self, code: bytes) -> Any:
        vulkan, device = self._device.api, self._device
        words = vulkan.ffi.new("uint32_t[]", len(code) // 4)
        vulkan.ffi.memmove(words, code, len(code))
        module = device.make(
            "vkCreateShaderModule", "VkShaderModuleCreateInfo", codeSize=len(code), pCode=words
        )
        following = vulkan.ffi.NULL
        if device.physical.varies_subgroups:
            following = vulkan.struct(
                "VkPipelineShaderStageRequiredSubgroupSizeCreateInfo",
                requiredSubgroupSize=device.physical.subgroup_size,
            )
        stage = vulkan.struct(
            "VkPipelineShaderStageCreateInfo",
            pNext=following,
            flags=vulkan.VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT,
            stage=vulkan.VK_SHADER_STAGE_COMPUTE_BIT,
            module=module,
            pName="main",
        )
        info = vulkan.struct("VkComputePipelineCreateInfo", stage=stage[0], layout=self.layout)
        out, null = vulkan.ffi.new("VkPipeline*"), vulkan.ffi.NULL
        try:
            vulkan.call("vkCreateComputePipelines", device.handle, null, 1, info, null, out)
        finally:
            device.destroy("vkDestroyShaderModule", module)
        return out[0]

    def record(self, commands: Any, ctx: int, launches: Iterable[GpuLaunch]) -> None:
        """Write launches into a command buffer."""
        vulkan = self._device.api
        stage = vulkan.VK_SHADER_STAGE_COMPUTE_BIT
        for launch in launches:
            if launch.barrier:
                self._device.barrier(commands)
            self._check(launch)
            pipeline = self._made[launch.kernel]
            point = vulkan.VK_PIPELINE_BIND_POINT_COMPUTE
            vulkan.call("vkCmdBindPipeline", commands, point, pipeline)
            words = [ctx, *launch.args, *[0] * (MAX_ARGS - len(launch.args))]
            data = vulkan.ffi.new("uint64_t[]", [word % 2**64 for word in words])
            vulkan.call("vkCmdPushConstants", commands, self.layout, stage, 0, _PUSH_BYTES, data)
            vulkan.call("vkCmdDispatch", commands, *launch.groups)

    def _check(self, launch: GpuLaunch) -> None:
        for groups, most in zip(launch.groups, self._device.physical.max_groups, strict=True):
            if groups > most:
                raise JitllmError(
                    f"{launch.kernel.op} needs {groups} thread groups; "
                    f"{self._device.physical.name} takes {most}"
                )

    def close(self) -> None:
        """Destroy them."""
        for pipeline in self._made.values():
            self._device.destroy("vkDestroyPipeline", pipeline)
        self._device.destroy("vkDestroyPipelineLayout", self.layout)
