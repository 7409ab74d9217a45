"""Puts an engine together: container, pager, device, scheduler, client.

The only importer of `actors`, and the place where every part meets the others. Opening reads the
container's header and its dense region, compiles what the cache lacks, and starts the actors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import actors
from actors.client import Client
from actors.device import Device
from actors.local import Runtime
from actors.messages import Addresses, Locate
from actors.pager import Pager
from actors.scheduler import Scheduler
from jitllm.config import EngineConfig, Probe, ResolvedConfig, resolve
from jitllm.devices.host import HostProgram, Limits
from jitllm.devices.memory import HostMemory, Span
from jitllm.engine import Engine
from jitllm.errors import JitllmError, UsageError
from jitllm.formats.jlm import Container, Header, TensorEntry
from jitllm.jit.cache import ObjectCache, default_directory
from jitllm.jit.cpu import Compiler
from jitllm.jit.team import Team
from jitllm.jit.threads import default_threads
from jitllm.jit.tiers import available, choose
from jitllm.kernels.kv_write import page_bytes
from jitllm.kernels.op import Op, Weight
from jitllm.kernels.sample import Sample
from jitllm.memory.budget import probe as probe_memory
from jitllm.memory.pages import KvPages, set_bytes
from jitllm.models.graph import Graph
from jitllm.models.registry import graph_of
from jitllm.schedule.plan import Budget

if TYPE_CHECKING:
    from jitllm.text.chat import ChatTemplate
    from jitllm.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, in all)."""

MAX_ROWS = 8
"""Sequences that one step may hold."""

LOGITS_BYTES = 8 << 20
"""Memory for output rows: what bounds them where the vocabulary is large."""


@dataclass(frozen=True)
class Loaded:
    """A served model and what its users need besides; `close` it.

    compiled_kernels: how many the cache lacked. open_s, compile_s: seconds that opening took in
    all, and for compiling or linking kernels.
    """

    engine: Engine
    header: Header
    graph: Graph
    config: ResolvedConfig
    compiled_kernels: int
    open_s: float
    compile_s: float

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The container's tokenizer, made when it is first asked for."""
        return tokenizer_of(self.header)

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The container's default chat template; None for a base model."""
        return chat_of(self.header, self.tokenizer)

    async def close(self) -> None:
        """Stop the engine."""
        await self.engine.close()


def tokenizer_of(header: Header) -> Tokenizer:
    """The tokenizer in a container's header."""
    from jitllm.text.tokenizer import Tokenizer, VocabularyData

    return Tokenizer(VocabularyData.from_plain(header.vocabulary))


def chat_of(header: Header, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The default chat template in a container's header, if it has any."""
    from jitllm.text.chat import ChatTemplate, pick_template

    if not header.chat_templates:
        return None
    bos, eos = (
        "" if token is None else tokenizer.piece(token).decode(errors="replace")
        for token in (tokenizer.bos_id, tokenizer.eos_id)
    )
    return ChatTemplate(pick_template(header.chat_templates), bos, eos)


def resolve_config(config: EngineConfig) -> ResolvedConfig:
    """`config` with every "auto" decided for this machine."""
    memory = probe_memory()
    tiers = tuple(tier.name for tier in reversed(available()))
    if config.tier != "auto":
        choose(config.tier)  # says why, when this machine cannot
    probe = Probe(num_cores=default_threads(), memory_bytes=memory.memory_bytes, tiers=tiers)
    return resolve(config, probe)


async def open_engine(
    path: Path,
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    cache: ObjectCache | None = None,
    strict: bool = False,
) -> Loaded:
    """Open the container at `path` and start an embedded engine for it.

    strict: pickle every message, as between processes (for tests). cache: compiled kernels; the
    user's by default. Raises what `Container.open`, `graph_of` and `resolve_config` raise.
    """
    _check_actors()
    began_s = perf_counter()
    config = resolve_config(config)
    if config.devices not in ("auto", "cpu"):
        raise UsageError(f"no such device here: {config.devices}", "choose cpu or auto")
    async with AsyncExitStack() as stack:
        container = stack.enter_context(contextlib.closing(Container.open(path)))
        graph = graph_of(container)
        context_tokens = _context_tokens(config, graph)
        memory = HostMemory()
        compiler = Compiler(choose(config.tier), cache or ObjectCache(default_directory()))
        team = stack.enter_context(Team(config.threads, compiler))
        limits = _limits(config, graph)
        pages, span = _kv_pages(config, graph, memory, limits.rows, context_tokens)
        stack.enter_context(span)
        runtime = await stack.enter_async_context(Runtime(strict=strict))
        pager = await runtime.spawn(
            Pager(container, memory, config.maxmem_bytes, config.read_ahead), "pager"
        )
        addresses = await pager.ask(Locate())
        tensors = {(t.role, t.block): t for t in container.header.tensors}
        compile_from_s = perf_counter()
        program = HostProgram(
            (*graph.embed, *graph.tables),
            list(enumerate(graph.blocks)),
            (*graph.head, _sample(graph)),
            limits=limits,
            memory=memory,
            weight_address=partial(_address, tensors, addresses),
            page_tokens=config.page_size_tokens,
            kv_element=config.kv_type,
            compiler=compiler,
            team=team,
            progress=partial(progress, "compiling kernels") if progress else None,
        )
        compile_s = perf_counter() - compile_from_s
        device = await runtime.spawn(
            Device(
                program,
                pages,
                pager,
                graph.logits,
                tier=config.tier,
                threads=config.threads,
                context_tokens=context_tokens,
            ),
            "device cpu",
        )
        budget = Budget(rows=limits.rows, tokens=limits.tokens, outputs=limits.outputs)
        scheduler = await runtime.spawn(
            Scheduler(device, budget, context_tokens=context_tokens, vocab=graph.vocab),
            "scheduler",
        )
        engine = Client(scheduler, device, pager, stack.pop_all().aclose)
        return Loaded(
            engine=engine,
            header=container.header,
            graph=graph,
            config=config,
            compiled_kernels=compiler.compiled,
            open_s=perf_counter() - began_s,
            compile_s=compile_s,
        )
    raise AssertionError("unreachable")


def _check_actors() -> None:
    """The `actors` package must be ours: a folder of that name may shadow it."""
    found = Path(actors.__file__ or "").resolve().parent
    ours = Path(__file__).resolve().parent.parent / "actors"
    if found != ours:
        raise JitllmError(
            f"the package `actors` was imported from {found}, not {ours}",
            "rename that folder, or start from another directory",
        )


def _context_tokens(config: ResolvedConfig, graph: Graph) -> int:
    return min(config.ctx_tokens or graph.context_length, graph.context_length)


def _limits(config: ResolvedConfig, graph: Graph) -> Limits:
    outputs = LOGITS_BYTES // (4 * graph.vocab)
    return Limits(
        tokens=max(config.prompt_chunk_tokens, MAX_ROWS),
        outputs=min(max(outputs, MAX_ROWS), max(config.prompt_chunk_tokens, MAX_ROWS)),
        rows=MAX_ROWS,
    )


def _sample(graph: Graph) -> Op:
    return Sample(graph.logits, Sample.scratch_buffer("sampling", graph.vocab))


def _kv_pages(
    config: ResolvedConfig, graph: Graph, memory: HostMemory, rows: int, context_tokens: int
) -> tuple[KvPages, Span]:
    sizes = [
        page_bytes(kv.kv_heads, kv.k_dim, kv.v_dim, config.page_size_tokens, config.kv_type)
        for kv in graph.kv
    ]
    capacity = rows * -(-context_tokens // config.page_size_tokens)
    span = memory.reserve(capacity * set_bytes(sizes))
    pages = KvPages(span.address, sizes, config.page_size_tokens, capacity, span.release)
    return pages, span


def _address(
    tensors: dict[tuple[str, int | None], TensorEntry], addresses: Addresses, weight: Weight
) -> int:
    """Where a weight lies."""
    tensor = tensors[weight.role, weight.block]
    if tensor.dense or tensor.block is None:
        return addresses.dense + tensor.offset
    return addresses.blocks[tensor.block] + tensor.offset
