"""How the actors of a served model are made, in whichever process they will live.

Plain values that travel: paths, shapes, limits, refs. Each process opens files, maps memory and
links kernels for itself. Knows every part of a device; the embedded runtime and Ray share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

from actors.actor import Ref
from actors.device import Device
from actors.messages import Locate
from actors.pager import Pager
from actors.scheduler import Scheduler
from jitllm.config import KvType, ReadAhead
from jitllm.devices.host import HostProgram, Limits
from jitllm.devices.memory import HostMemory, Memory, SharedMemory, Span, attach
from jitllm.errors import JitllmError
from jitllm.formats.jlm import Container, TensorEntry
from jitllm.jit.cache import ObjectCache
from jitllm.jit.cpu import Compiler
from jitllm.jit.cpu import Progress as Compiling
from jitllm.jit.team import Team
from jitllm.jit.tiers import choose
from jitllm.kernels.kv_write import page_bytes
from jitllm.kernels.op import Op, Weight
from jitllm.kernels.sample import Sample
from jitllm.memory.pages import KvPages, set_bytes
from jitllm.models.graph import Graph
from jitllm.schedule.plan import Budget


@dataclass(frozen=True, slots=True)
class PagerRecipe:
    """A pager of one container. is_shared: devices are in other processes than it."""

    container: Container
    budget_bytes: int
    read_ahead: ReadAhead
    is_shared: bool

    async def make(self) -> Pager:
        """See `Recipe`."""
        memory: Memory = SharedMemory() if self.is_shared else HostMemory()
        return Pager(self.container, memory, self.budget_bytes, self.read_ahead)


@dataclass(frozen=True, slots=True)
class SchedulerRecipe:
    """A scheduler of one model on one device."""

    device: Ref
    budget: Budget
    context_tokens: int
    vocab: int
    page_tokens: int
    max_queue: int

    async def make(self) -> Scheduler:
        """See `Recipe`."""
        return Scheduler(
            self.device,
            self.budget,
            context_tokens=self.context_tokens,
            vocab=self.vocab,
            page_tokens=self.page_tokens,
            max_queue=self.max_queue,
        )


@dataclass(frozen=True, slots=True)
class DeviceRecipe:
    """A CPU device with all blocks of a model.

    tensors: where weights lie in the extents. cache: compiled kernels. progress: told about kernels
    that are compiled; it does not travel to another process.
    """

    pager: Ref
    graph: Graph
    tensors: tuple[TensorEntry, ...]
    limits: Limits
    page_tokens: int
    kv_type: KvType
    tier: str
    threads: int
    context_tokens: int
    cache: ObjectCache
    progress: Compiling | None = None

    async def make(self) -> Device:
        """See `Recipe`. Raises `JitllmError` when memory or the pager's frames cannot be had."""
        located = await self.pager.ask(Locate())
        graph = self.graph
        with ExitStack() as owned:
            weights = _Weights(
                {(tensor.role, tensor.block): tensor for tensor in self.tensors},
                owned.enter_context(attach(located.dense)),
                owned.enter_context(attach(located.blocks)),
                located.offsets,
            )
            memory = HostMemory()
            compiler = Compiler(choose(self.tier), self.cache)
            team = owned.enter_context(Team(self.threads, compiler))
            pages, span = self._kv_pages(memory)
            owned.enter_context(span)
            began_s = perf_counter()
            program = HostProgram(
                (*graph.embed, *graph.tables),
                list(enumerate(graph.blocks)),
                (*graph.head, _sample(graph)),
                limits=self.limits,
                memory=memory,
                weight_address=weights.address,
                page_tokens=self.page_tokens,
                kv_element=self.kv_type,
                compiler=compiler,
                team=team,
                progress=self.progress,
            )
            return Device(
                program,
                pages,
                self.pager,
                graph.logits,
                tier=self.tier,
                threads=self.threads,
                context_tokens=self.context_tokens,
                compiled_kernels=compiler.compiled,
                compile_s=perf_counter() - began_s,
                owned=owned.pop_all(),
            )
        raise AssertionError("unreachable")

    def _kv_pages(self, memory: Memory) -> tuple[KvPages, Span]:
        sizes = [
            page_bytes(kv.kv_heads, kv.k_dim, kv.v_dim, self.page_tokens, self.kv_type)
            for kv in self.graph.kv
        ]
        rows = self.limits.rows
        capacity = rows * -(-self.context_tokens // self.page_tokens)
        try:
            span = memory.reserve(capacity * set_bytes(sizes))
        except JitllmError as error:
            raise JitllmError(
                f"{error.problem} (KV of {rows} sequences of {self.context_tokens} tokens)",
                "lower -ctx or raise the limit (ulimit -v)",
            ) from error
        pages = KvPages(span.address, sizes, self.page_tokens, capacity, span.release)
        return pages, span


@dataclass(frozen=True, slots=True)
class _Weights:
    """Addresses of weights in this process."""

    tensors: Mapping[tuple[str, int | None], TensorEntry]
    dense: int
    blocks: int
    offsets: tuple[int, ...]

    def address(self, weight: Weight) -> int:
        """Where a weight lies; one of a block under a lease only."""
        tensor = self.tensors[weight.role, weight.block]
        if tensor.dense or tensor.block is None:
            return self.dense + tensor.offset
        return self.blocks + self.offsets[tensor.block] + tensor.offset


def _sample(graph: Graph) -> Op:
    return Sample(graph.logits, Sample.scratch_buffer("sampling", graph.vocab))
