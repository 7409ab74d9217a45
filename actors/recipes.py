"""How the actors of a served model are made, in whichever process they will live.

Plain values that travel: paths, shapes, limits, refs. Each process opens files, maps memory and
links kernels for itself. Knows every part of a device; the embedded runtime and Ray share it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from time import perf_counter

from actors.actor import Ref
from actors.beside import beside
from actors.decode import TOP_BYTES
from actors.device import Device
from actors.hosted import ExpertHost, Host, HostedExperts
from actors.messages.pager import Locate, Located
from actors.mixtures import Experts, Mixtures, PagedExperts
from actors.outbox import Outbox
from actors.pager import Pager
from actors.relocate import PARCEL_BYTES
from actors.route import Route, Site
from actors.scheduler import Scheduler
from actors.supply import LeasedWeights
from jitllm.config import KvType, ReadAhead
from jitllm.devices.host import HostProgram, Limits
from jitllm.devices.host_runner import HostRunner
from jitllm.devices.memory import Handle, HostMemory, Memory, SharedMemory, attach
from jitllm.devices.mixtures import Crossing, MixtureProgram, Stretches, expert_blocks
from jitllm.devices.runner import Runner
from jitllm.errors import JitllmError
from jitllm.formats.jlm import Container, TensorEntry
from jitllm.formats.jlm_head import expert_places
from jitllm.jit.cache import ObjectCache
from jitllm.jit.copy import Copier
from jitllm.jit.cpu import Compiler
from jitllm.jit.cpu import Progress as Compiling
from jitllm.jit.team import Team
from jitllm.jit.threads import default_threads
from jitllm.jit.tiers import choose
from jitllm.kernels.kv_write import page_bytes
from jitllm.kernels.matmul import MatMul
from jitllm.kernels.op import Buffer, Op, Weight
from jitllm.kernels.sample import Sample
from jitllm.memory.columns import Columns
from jitllm.memory.history import History
from jitllm.memory.page_file import PageFile
from jitllm.memory.page_memory import VirtualPages
from jitllm.memory.pages import KvPages
from jitllm.memory.prefix_file import PrefixKind
from jitllm.memory.prefix_store import PrefixFolder
from jitllm.memory.spill import Spill
from jitllm.models.graph import Graph
from jitllm.schedule.placement import Decline, Placement
from jitllm.schedule.plan import Budget


@dataclass(frozen=True, slots=True)
class PagerRecipe:
    """A pager of one container.

    is_shared: devices are in other processes than it. is_empty: it serves no block, and reads
    nothing, until it is told to `Place` some. experts_used, apart, hosted, is_host: see `Pager`.
    """

    container: Container
    budget_bytes: int
    read_ahead: ReadAhead
    is_shared: bool
    is_empty: bool = False
    experts_used: int = 0
    apart: frozenset[int] | None = None
    hosted: frozenset[int] = frozenset()
    is_host: bool = False

    async def make(self) -> Pager:
        """See `Recipe`."""
        memory: Memory = SharedMemory() if self.is_shared else HostMemory()
        return Pager(
            self.container,
            memory,
            self.budget_bytes,
            self.read_ahead,
            is_empty=self.is_empty,
            experts_used=self.experts_used,
            apart=self.apart,
            hosted=self.hosted,
            is_host=self.is_host,
        )


@dataclass(frozen=True, slots=True)
class SchedulerRecipe:
    """A scheduler of one model. sites: its devices by name. host_bytes: what it may take on each
    host. block_bytes, kv_bytes: as a `Mover` wants them. declines: what was asked for of the
    placement in vain. fairness: level of time slices. park_folder: where parked sequences go.
    relocates, grows_to, tunes: see `Scheduler`. gpus_fall_back: see `Route`. prefixes: where
    prefixes are kept, if they are."""

    sites: Mapping[str, Site]
    placement: Placement
    host_bytes: int
    budget: Budget
    block_bytes: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    context_tokens: int
    vocab: int
    page_tokens: int
    max_queue: int
    falls_back: bool
    move_share: float
    declines: tuple[Decline, ...] = ()
    fairness: int = 0
    park_folder: Path | None = None
    relocates: bool = False
    grows_to: Placement | None = None
    tunes: bool = False
    gpus_fall_back: bool = True
    prefixes: PrefixFolder | None = None

    async def make(self) -> Scheduler:
        """See `Recipe`."""
        return Scheduler(
            Route(
                self.sites,
                self.placement,
                self.host_bytes,
                gpus_fall_back=self.gpus_fall_back,
            ),
            self.budget,
            context_tokens=self.context_tokens,
            vocab=self.vocab,
            block_bytes=self.block_bytes,
            kv_bytes=self.kv_bytes,
            page_tokens=self.page_tokens,
            max_queue=self.max_queue,
            falls_back=self.falls_back,
            move_share=self.move_share,
            declines=self.declines,
            fairness=self.fairness,
            park_folder=self.park_folder,
            relocates=self.relocates,
            grows_to=self.grows_to,
            tunes=self.tunes,
            prefixes=self.prefixes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnDevice:
    """What recipes of all kinds of devices have, for all blocks of a model.

    dense: the pager whose dense region it reads, one for all devices of a node. tensors: where
    weights lie in the extents. is_shared: other devices are in other processes than it. cache:
    compiled kernels. progress: told about kernels that are compiled; it does not travel to another
    process. kv_budget_sets: page sets that may be in the device's memory, the others go elsewhere;
    0 for any number. hosted: blocks whose experts the host computes. host: the device that it is,
    with whether it is on another node; None on itself.
    """

    pager: Ref
    dense: Ref
    graph: Graph
    tensors: tuple[TensorEntry, ...]
    limits: Limits
    page_tokens: int
    kv_type: KvType
    context_tokens: int
    is_shared: bool
    cache: ObjectCache
    progress: Compiling | None = None
    kv_budget_sets: int = 0
    hosted: frozenset[int] = frozenset()
    host: Host | None = None

    @property
    def keeps_dense(self) -> bool:
        """Whether its own pager has the dense region of the node."""
        return self.dense == self.pager

    async def locate(self) -> tuple[Located, Handle]:
        """Where the frames of its pager are, and the dense region that it reads."""
        located = await self.pager.ask(Locate())
        dense = located if self.keeps_dense else await self.dense.ask(Locate())
        return located, dense.dense

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of one page of each block."""
        return [
            page_bytes(kv.kv_heads, kv.k_dim, kv.v_dim, self.page_tokens, self.kv_type)
            for kv in self.graph.kv
        ]

    @property
    def num_page_sets(self) -> int:
        """Enough for as many sequences as there can be, each of the longest context."""
        return self.limits.rows * -(-self.context_tokens // self.page_tokens)

    @property
    def parcel_bytes(self) -> int:
        """The largest piece of history that travels at once."""
        history, blocks = History(self.graph.kv, self.kv_type), range(self.graph.num_blocks)
        kind = PrefixKind(b"", tuple(history.num_bytes((block,), 1) for block in blocks), 0)
        return max(PARCEL_BYTES, kind.position_bytes, kind.parcel_bytes)

    @property
    def crossings(self) -> dict[int, Crossing]:
        """What crosses between a device and the host for the experts of hosted blocks."""
        return {block: Crossing.of(self.graph.blocks[block]) for block in self.hosted}

    def outbox(self, owned: ExitStack) -> Outbox:
        """Memory for what a step hands on, then for a parcel of history."""
        tokens = self.limits.tokens
        crossing = (crossing.num_bytes(tokens) for crossing in self.crossings.values())
        step_bytes = max(self.graph.hidden.stride_bytes * tokens, *crossing, 0)
        memory: Memory = SharedMemory() if self.is_shared else HostMemory()
        span = memory.reserve(step_bytes + self.parcel_bytes, huge_pages=False)
        return Outbox(owned.enter_context(span), step_bytes)

    def hosted_experts(self, runner: Runner, outbox: Outbox) -> dict[int, Experts]:
        """Who computes the experts of hosted blocks on a device that is not the host."""
        if self.host is None:
            return {}
        experts = HostedExperts(runner, outbox, self.host, self.crossings)
        return dict.fromkeys(self.hosted, experts)

    @property
    def head(self) -> tuple[Op, ...]:
        """What every step ends with."""
        graph = self.graph
        return (*graph.head, Sample(graph.logits, self._sampling))

    @property
    def _sampling(self) -> Buffer:
        return Sample.scratch_buffer("sampling", self.graph.vocab)

    def reporting(self, is_cancelled: Event) -> Compiling:
        """What is told about kernels while they are compiled; it raises when nobody wants them."""

        def report(done: int, total: int) -> None:
            if is_cancelled.is_set():
                raise asyncio.CancelledError
            if self.progress:
                self.progress(done, total)

        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecipe(ModelOnDevice):
    """A CPU device. threads: 0 for as many as are ours there. cpus: which CPUs they keep to; empty
    for any. is_alone: no other device has blocks of the model. kv_folder: for a file with the page
    sets that are not in memory. has_apart: its pager brings experts one by one."""

    tier: str
    threads: int
    cpus: frozenset[int]
    is_alone: bool
    kv_folder: Path | None = None
    has_apart: bool = False

    @property
    def head(self) -> tuple[Op, ...]:
        """What every step ends with; the product that makes the logits finds their peaks."""
        *before, product = self.graph.head
        assert isinstance(product, MatMul)
        peaks = Sample.peaks_buffer("peaks")
        sample = Sample(product.dst, self._sampling, peaks)
        return (*before, replace(product, peaks=peaks), sample)

    async def make(self) -> Device:
        """See `Recipe`. Raises `JitllmError` when memory or the pager's frames cannot be had."""
        located, dense = await self.locate()
        graph = self.graph
        with ExitStack() as owned:
            weights = _Weights(
                {(tensor.role, tensor.block): tensor for tensor in self.tensors},
                owned.enter_context(attach(dense)),
                owned.enter_context(attach(located.blocks)),
                located.offsets,
                expert_places(self.tensors),
            )
            memory = HostMemory()
            compiler = Compiler(choose(self.tier), self.cache)
            threads = self.threads or default_threads()
            team = owned.enter_context(Team(threads, compiler, self.cpus))
            pages = self._kv_pages(memory, owned)
            began_s = perf_counter()
            build = partial(
                HostProgram,
                graph.embed,
                graph.tables,
                list(enumerate(graph.blocks)),
                self.head,
                limits=self.limits,
                memory=memory,
                weight_address=weights.address,
                page_tokens=self.page_tokens,
                kv_element=self.kv_type,
                compiler=compiler,
                team=team,
            )
            # Compiling takes seconds, and other models may be at work in this process.
            program = await beside(lambda cancelled: build(progress=self.reporting(cancelled)))
            outbox = self.outbox(owned)
            runner = HostRunner(
                program,
                Copier(compiler),
                logits=graph.logits,
                top_bytes=TOP_BYTES,
                threads=threads,
                kind=self.tier,
            )
            supply = LeasedWeights(self.pager, graph.num_blocks, keeps_dense=self.keeps_dense)
            mixtures: Mixtures | None = None
            expert_host: ExpertHost | None = None
            if self.has_apart:
                asked = expert_blocks(graph.blocks)
                paged = PagedExperts(MixtureProgram(program, graph.blocks), supply)
                experts = dict.fromkeys(asked, paged) | self.hosted_experts(runner, outbox)
                stretches = Stretches(program.blocks, graph.blocks, asked)
                mixtures = Mixtures(runner, stretches, experts)
                if self.host is None:
                    expert_host = ExpertHost(runner, outbox, paged, self.crossings)
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
                expert_host=expert_host,
            )
        raise AssertionError("unreachable")

    def _kv_pages(self, memory: Memory, owned: ExitStack) -> KvPages:
        """Pages whose memory, and file, end with the device."""
        sizes, capacity = self.page_bytes, self.num_page_sets
        try:
            # A huge page would span columns of blocks that are not here, or that come and go.
            num_bytes = capacity * Columns(sizes).stride_bytes
            huge_pages = self.is_alone and not self.kv_budget_sets
            span = owned.enter_context(memory.reserve(num_bytes, huge_pages=huge_pages))
        except JitllmError as error:
            raise JitllmError(
                f"{error.problem} (KV of {self.limits.rows} sequences of "
                f"{self.context_tokens} tokens)",
                "lower -ctx or raise the limit (ulimit -v)",
            ) from error
        pages = VirtualPages(span.address, sizes, span.release)
        spill: Spill | None = None
        if self.kv_budget_sets and self.kv_folder is not None:
            file = PageFile(self.kv_folder, pages.layout, capacity)
            windows = [kv.window for kv in self.graph.kv]
            spill = Spill(pages, file, self.kv_budget_sets, self.page_tokens, windows)
            owned.callback(spill.close)
        return KvPages(pages, self.page_tokens, capacity, columns=(), spill=spill)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Addresses of weights in this process."""

    tensors: Mapping[tuple[str, int | None], TensorEntry]
    dense: int
    blocks: int
    offsets: tuple[int, ...]
    experts: Mapping[int, tuple[int, int]]

    def address(self, weight: Weight) -> int:
        """Where a weight lies; one of a block under a lease only."""
        tensor = self.tensors[weight.role, weight.block]
        if tensor.dense or tensor.block is None:
            return self.dense + tensor.offset
        block = self.blocks + self.offsets[tensor.block]
        if weight.expert is not None:
            first, stride = self.experts[tensor.block]
            block += first + weight.expert * stride
        return block + tensor.offset
