"""How the actor of a Vulkan device is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from actors.beside import beside
from actors.carded import CardedExperts
from actors.copied_weights import CopiedWeights
from actors.decode import TOP_BYTES
from actors.device import Device
from actors.mixtures import Mixtures
from actors.recipes import ModelOnDevice
from jitllm.devices.mixtures import Stretches, table_of
from jitllm.devices.vulkan.arena import Arena, DeviceSpan
from jitllm.devices.vulkan.device import Device as VulkanDevice
from jitllm.devices.vulkan.instance import Instance
from jitllm.devices.vulkan.mirror import Mirrors
from jitllm.devices.vulkan.mixtures import VulkanMixture
from jitllm.devices.vulkan.pipelines import Pipelines
from jitllm.devices.vulkan.program import VulkanProgram
from jitllm.devices.vulkan.runner import VulkanRunner
from jitllm.devices.vulkan.staging import Staging
from jitllm.formats.jlm_head import expert_places
from jitllm.jit.slang import SlangCompiler, Target
from jitllm.kernels.attention.gpu import part_keys
from jitllm.memory.device_pages import DevicePages
from jitllm.memory.device_weights import DeviceWeights
from jitllm.memory.history import History
from jitllm.memory.host_spill import HostSpill
from jitllm.memory.pages import KvPages

_STAGE_BYTES = 1 << 20
"""Of each half of what steps are staged in: they are small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VulkanRecipe(ModelOnDevice):
    """A Vulkan device. name: what people call it. index: its place in the loader's list.
    budget_bytes: most memory that is taken of it. is_unified: it is the host's memory. block_bytes:
    what is held here of each block, with its experts or without. carded: blocks whose experts come
    one by one."""

    name: str
    index: int
    budget_bytes: int
    is_unified: bool
    block_bytes: tuple[int, ...]
    carded: frozenset[int] = frozenset()

    async def make(self) -> Device:
        """See `Recipe`. Raises `JitllmError` where there is no such device, or no room on it."""
        located, dense = await self.locate()
        graph = self.graph
        with ExitStack() as owned:
            began_s = perf_counter()
            instance = owned.enter_context(closing(Instance()))
            device = owned.enter_context(closing(VulkanDevice(instance, self.index)))
            arena = owned.enter_context(closing(Arena(device, self.budget_bytes, name=self.name)))
            compiler = SlangCompiler(Target.SPIRV, self.cache)
            pipelines = owned.enter_context(closing(Pipelines(device, compiler)))
            staging = owned.enter_context(closing(Staging(device, _STAGE_BYTES)))
            mirrors = Mirrors(arena)

            def give(span: DeviceSpan) -> None:
                runner.give(span)

            memory = self._kv_memory(arena, mirrors, give, owned)

            weights = DeviceWeights(
                graph,
                self.tensors,
                self.block_bytes,
                expert_places(self.tensors),
                arena,
                give,
                carded=self.carded,
                used=table_of(graph.blocks)[1] if self.carded else 0,
            )
            build = partial(
                VulkanProgram,
                graph.embed,
                graph.tables,
                list(enumerate(graph.blocks)),
                self.head,
                limits=self.limits,
                arena=arena,
                staging=staging,
                pipelines=pipelines,
                weight_address=weights.address,
                page_tokens=self.page_tokens,
                kv_element=self.kv_type,
                has_passes=self.kv_budget_sets > 0,
            )
            program = await beside(lambda cancelled: build(progress=self.reporting(cancelled)))
            runner = VulkanRunner(
                program,
                pipelines,
                mirrors,
                staging,
                logits=graph.logits,
                top_bytes=TOP_BYTES,
                parcel_bytes=self.parcel_bytes,
                unit_bytes=4 if self.kv_type == "f32" else 2,
            )
            spill: HostSpill | None = None
            if self.kv_budget_sets:
                windows = [kv.window for kv in graph.kv]
                spill = HostSpill(
                    memory,
                    runner.copy,
                    runner.wait,
                    self.kv_budget_sets,
                    self.page_tokens,
                    windows,
                )
            pages = KvPages(memory, self.page_tokens, self.num_page_sets, columns=(), spill=spill)
            outbox = self.outbox(owned)
            supply = CopiedWeights(
                self.pager,
                located,
                dense,
                weights,
                memory,
                arena,
                runner,
                owned,
                has_dense=not self.keeps_dense,
                host=self.dense if self.is_unified else None,
                expert_places=expert_places(self.tensors),
            )
            experts = self.hosted_experts(runner, outbox)
            if self.carded:
                mixture = VulkanMixture(program, runner, graph.blocks, self.carded, weights.address)
                experts |= dict.fromkeys(self.carded, CardedExperts(mixture, supply))
            mixtures: Mixtures | None = None
            if experts:
                stretches = Stretches(program.blocks, graph.blocks, experts)
                mixtures = Mixtures(runner, stretches, experts)
            return Device(
                runner,
                pages,
                History(graph.kv, self.kv_type),
                supply,
                outbox,
                hidden=graph.hidden,
                logits=graph.logits,
                context_tokens=self.context_tokens,
                compiled_kernels=compiler.compiled,
                compile_s=perf_counter() - began_s,
                owned=owned.pop_all(),
                mixtures=mixtures,
            )
        raise AssertionError("unreachable")

    def _kv_memory(
        self,
        arena: Arena,
        mirrors: Mirrors,
        give: Callable[[DeviceSpan], None],
        owned: ExitStack,
    ) -> DevicePages:
        """Memory of pages; with a budget, memory of the host too, and what passes through."""
        if not self.kv_budget_sets:
            return DevicePages(self.page_bytes, mirrors, give)
        host = owned.enter_context(closing(Arena(arena.device, sys.maxsize, is_host=True)))
        keys = max(part_keys(self.context_tokens), self.page_tokens)
        num_frames = keys // self.page_tokens
        pages = DevicePages(self.page_bytes, mirrors, give, host, num_frames)
        owned.callback(pages.close)
        return pages
