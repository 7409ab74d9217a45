"""Puts an engine together: container, pager, device, scheduler, client.

The only importer of `actors`, and the place where every part meets the others. Opening reads the
container's header and its dense region, compiles what the cache lacks, and starts the actors.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from tempfile import gettempdir
from time import perf_counter
from typing import TYPE_CHECKING, Any

import actors
from actors.actor import AnyRuntime, Recipe, Ref
from actors.beside import beside
from actors.client import Client
from actors.local import Runtime
from actors.member import Member as Member
from actors.member import Seat, lookup
from actors.messages import DeviceStatsRequest
from actors.messages import Listed as Listed
from actors.messages import NodeListed as NodeListed
from actors.recipes import DeviceRecipe, PagerRecipe, SchedulerRecipe
from actors.route import Site
from jitllm.config import EngineConfig, Probe, ResolvedConfig, resolve
from jitllm.devices.choose import ChosenDevice, choose_devices
from jitllm.devices.cpus import CpuShare, cpu_shares, numa_nodes
from jitllm.devices.grammar import parse_devices
from jitllm.devices.host import Limits
from jitllm.devices.vulkan.found import default_budget, find_vulkan, may_take_vulkan
from jitllm.engine import Engine
from jitllm.errors import JitllmError, PlacementError, UsageError
from jitllm.formats.jlm import Container, Header
from jitllm.jit.cache import ObjectCache, default_directory, emitters_fingerprint
from jitllm.jit.threads import cpu_mask, default_threads
from jitllm.jit.tiers import available, choose
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.kv_write import page_bytes
from jitllm.kernels.op import Rows
from jitllm.memory.budget import probe as probe_memory
from jitllm.memory.columns import Columns
from jitllm.memory.division import are_apart
from jitllm.memory.history import History
from jitllm.memory.host import HostReport, host_devices
from jitllm.memory.prefix_file import PrefixKind
from jitllm.memory.prefix_store import PrefixFolder
from jitllm.models.graph import Graph
from jitllm.models.registry import graph_of
from jitllm.schedule.place import BlockCost, Room, place
from jitllm.schedule.placement import Decline, Placement
from jitllm.schedule.placement_map import parse_map
from jitllm.schedule.plan import Budget
from jitllm.units import format_size

if TYPE_CHECKING:
    from actors.cluster import Cluster
    from actors.ray import RayRuntime
    from jitllm.text.chat import ChatTemplate
    from jitllm.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, in all)."""

DEFAULT_ROWS = 16
"""Sequences that one step may hold, when nobody says."""

LOGITS_BYTES = 8 << 20
"""Memory for output rows: what bounds them where the vocabulary is large."""


@dataclass(frozen=True)
class Loaded:
    """A served model and what its users need besides; `close` it.

    name: what it is called, where others find it too. compiled_kernels: how many the cache lacked.
    open_s, compile_s: seconds that opening took in all, and for compiling or linking kernels.
    notes: what about the place where the actors run makes replies slower than they could be.
    """

    name: str
    path: Path
    engine: Engine
    header: Header
    graph: Graph
    config: ResolvedConfig
    compiled_kernels: int
    open_s: float
    compile_s: float
    notes: tuple[str, ...] = ()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The container's tokenizer, made when it is first asked for."""
        return tokenizer_of(self.header, self.path)

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The container's default chat template; None for a base model."""
        return chat_of(self.header, self.tokenizer)

    async def close(self) -> None:
        """Stop the engine."""
        await self.engine.close()


def tokenizer_of(header: Header, path: Path) -> Tokenizer:
    """The tokenizer in the header of the container at `path`."""
    from jitllm.text.tokenizer import Tokenizer, VocabularyData

    return Tokenizer(VocabularyData.from_plain(header.vocabulary, path))


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


@dataclass(frozen=True)
class Joined:
    """A Ray cluster that this process is part of.

    how: local, auto or where it is, as `open_engine` wants it. address: for others who join, and
    for `ray list actors --address`. dashboard: URL of its pages; empty if there are none.
    """

    how: str
    address: str
    dashboard: str


@contextmanager
def joined(how: str) -> Iterator[Joined]:
    """Be part of a Ray cluster, for all engines that are opened with the same `ray` meanwhile.

    Each of them joins by itself; who opens several joins before the first and leaves after the
    last, so that they share one. Raises `JitllmError` when there is no cluster, or no Ray.
    """
    with _cluster(how) as cluster:
        yield Joined(how, cluster.address, cluster.dashboard)


@asynccontextmanager
async def membership(how: str) -> AsyncIterator[Member]:
    """Be a member of a Ray cluster: know what it serves, and serve models that others find.

    For all engines that are opened with this `member` meanwhile. Raises as `joined` does.
    """
    with _cluster(how) as cluster:
        from actors.ray import RayRuntime

        async with RayRuntime(cluster, "") as common, Member(common) as member:
            yield member


async def attach(how: str, name: str | None = None) -> Loaded:
    """Use a model that a member of a Ray cluster serves; closing it lets go, and ends nothing.

    name: None for the only one. Raises `UsageError` when there is none of that name, `JitllmError`
    while it is being loaded and when its container is not to be had here, and as `joined` does.
    """
    _check_actors()
    began_s = perf_counter()
    async with AsyncExitStack() as stack:
        cluster = stack.enter_context(_cluster(how))
        from actors.ray import RayRuntime

        common = await stack.enter_async_context(RayRuntime(cluster, ""))
        model, working = await lookup(common.reach("manager"), name)
        container, graph = await beside(lambda _: _open(model.path, stack))
        if container.header.fingerprint != dict(working.fingerprint):
            raise JitllmError(
                f"{model.path} is another model here than the one that {model.member} serves",
                "put the same file there",
            )
        sites = {near.name: Site(near.device, near.pager, near.node) for near in working.devices}
        return Loaded(
            name=model.name,
            path=model.path,
            engine=Client(working.scheduler, sites, stack.pop_all().aclose),
            header=container.header,
            graph=graph,
            config=working.config,
            compiled_kernels=0,
            open_s=perf_counter() - began_s,
            compile_s=0.0,
        )
    raise AssertionError("unreachable")


async def open_engine(
    path: Path,
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    cache: ObjectCache | None = None,
    strict: bool = False,
    ray: str | None = None,
    name: str | None = None,
    member: Member | None = None,
) -> Loaded:
    """Open the container at `path` and start an engine for it.

    ray: on which cluster its actors live, each in a process of its own: "local" starts one, "auto"
    joins the one of this machine, anything else is an address. Without it they live in this
    process. name: of the model, in the cluster too; by default the file's, with a number if that is
    taken there. member: as whom to serve it there; as one for itself by default. strict: pickle
    every message, as between processes (for tests). cache: compiled kernels; the user's by default.
    Raises what `Container.open`, `graph_of` and `resolve_config` raise, and `JitllmError` for the
    cluster.
    """
    _check_actors()
    began_s = perf_counter()
    config = resolve_config(config)
    async with AsyncExitStack() as stack:
        container, graph = await beside(lambda _: _open(path, stack))
        header = container.header
        context_tokens = _context_tokens(config, graph)
        config = replace(config, page_size_tokens=_page_tokens(config, context_tokens))
        limits = _limits(config, graph)
        runtime: AnyRuntime
        seat: Seat | None = None
        nodes: Sequence[NodeListed] = ()
        if ray is None:
            runtime = await stack.enter_async_context(Runtime(strict=strict))
        else:
            seat = await stack.enter_async_context(_seat(ray, member, name, path))
            runtime = await stack.enter_async_context(_on_ray(ray, seat.name))
            if any(entry.node or entry.backend == "all" for entry in parse_devices(config.devices)):
                own_id, nodes = seat.member.node_id, await seat.member.nodes()
                nodes = [node for node in nodes if node.node_id != own_id]
        objects, here = cache or ObjectCache(default_directory()), runtime.here
        chosen, shares = await beside(lambda _: _devices(config, nodes, here, objects))
        host = _host(config, chosen)
        experts_used = _experts_used(config, graph, header)
        pagers: dict[str, Ref] = {}
        for device in (one.device for one in chosen):
            pagers[device.name] = await runtime.start(
                PagerRecipe(
                    container,
                    config.maxmem_bytes // len(chosen),
                    config.read_ahead,
                    ray is not None,
                    is_empty=device.is_gpu,
                    experts_used=0 if device.is_gpu else experts_used,
                ),
                f"pager {device.name}",
                node=device.node,
            )
        dense: dict[str, Ref] = {}
        for device in (one.device for one in chosen):
            if not device.is_gpu:  # which would keep it for itself only while it is read
                dense.setdefault(device.node, pagers[device.name])
        sites: dict[str, Site] = {}
        for one, share in zip(chosen, shares, strict=True):
            device, pager = one.device, pagers[one.name]
            page_tokens = dict(config.page_sizes).get(device.name, config.page_size_tokens)
            settings: dict[str, Any] = {
                "pager": pager,
                "dense": dense.get(device.node, pager),
                "graph": graph,
                "tensors": header.tensors,
                "limits": limits,
                "page_tokens": page_tokens,
                "kv_type": config.kv_type,
                "context_tokens": context_tokens,
                "kv_budget_sets": _kv_budget_sets(config, graph, page_tokens),
                "is_shared": ray is not None,
                "cache": objects,
                "progress": partial(progress, "compiling kernels")
                if progress and not ray
                else None,
            }
            if device.is_gpu:
                from actors.vulkan_recipe import VulkanRecipe

                recipe: Recipe = VulkanRecipe(
                    index=device.ordinal,
                    budget_bytes=_vram(one, config),
                    is_unified=device.is_unified,
                    name=device.name,
                    block_bytes=header.frame_bytes,
                    **settings,
                )
            else:
                recipe = DeviceRecipe(
                    tier=config.tier,
                    threads=share.num_threads,
                    cpus=share.cpus or frozenset(),
                    is_alone=len(chosen) == 1,
                    kv_folder=_park_folder(config),
                    has_apart=experts_used > 0,
                    **settings,
                )
            made = await runtime.start(
                recipe, f"device {device.name}", restarts=True, node=device.node
            )
            sites[device.name] = Site(made, pager, device.node, has_memory=device.is_gpu)
        target, declines = _place(config, graph, header, chosen, limits)
        placement = target
        if config.gpu_grow and host is not None:
            gpus = [one.name for one in chosen if one.device.is_gpu]
            placement = target.at_home(host, gpus)
        history = History(graph.kv, config.kv_type)
        scheduler = await runtime.start(
            SchedulerRecipe(
                sites=sites,
                placement=placement,
                host_bytes=config.maxmem_bytes,
                budget=Budget(rows=limits.rows, tokens=limits.tokens, outputs=limits.outputs),
                block_bytes=(*header.frame_bytes, 0),  # the head is in the dense region
                kv_bytes=tuple(history.num_bytes((block,), 1) for block in range(graph.num_blocks)),
                context_tokens=context_tokens,
                vocab=graph.vocab,
                page_tokens=config.page_size_tokens if config.share_prefixes else 0,
                max_queue=config.max_queue,
                falls_back=config.fallback,
                move_share=config.move_share,
                declines=declines,
                fairness=config.fairness,
                park_folder=_park_folder(config),
                relocates=host is not None and _relocates(config),
                grows_to=target if config.gpu_grow else None,
                tunes=config.tune_seam,
                gpus_fall_back=config.gpu_fallback,
                prefixes=_prefix_folder(config, header, graph, chosen),
            ),
            "scheduler",
        )
        stats = [await site.device.ask(DeviceStatsRequest()) for site in sites.values()]
        if seat is not None:
            await seat.publish(scheduler, sites, placement, config, header.fingerprint)
        engine = Client(scheduler, sites, stack.pop_all().aclose)
        return Loaded(
            name=seat.name if seat else name or path.stem,
            path=path,
            engine=engine,
            header=container.header,
            graph=graph,
            config=config,
            compiled_kernels=sum(one.compiled_kernels for one in stats),
            open_s=perf_counter() - began_s,
            compile_s=sum(one.compile_s for one in stats),
            notes=(*runtime.notes, *map(str, declines)),
        )
    raise AssertionError("unreachable")


def _experts_used(config: ResolvedConfig, graph: Graph, header: Header) -> int:
    """Experts that a token needs in a block where they are paged one by one, else 0."""
    ops = (op for op in graph.ops() if isinstance(op, ExpertMatMul))
    used = next((op.used for op in ops), 0)
    is_apart = are_apart(config.experts, header.weight_bytes, config.maxmem_bytes)
    return used if is_apart else 0


def _open(path: Path, owned: AsyncExitStack) -> tuple[Container, Graph]:
    container = owned.enter_context(contextlib.closing(Container.open(path)))
    return container, graph_of(container)


@asynccontextmanager
async def _seat(
    how: str, member: Member | None, name: str | None, path: Path
) -> AsyncIterator[Seat]:
    """A name for a model in a cluster, until it is closed; see `open_engine`."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(membership(how)) if member is None else member
        is_exact, absolute = name is not None, await beside(lambda _: path.resolve())
        async with server.claimed(name or path.stem, absolute, is_exact=is_exact) as seat:
            yield seat


@asynccontextmanager
async def _on_ray(how: str, model: str) -> AsyncIterator[RayRuntime]:
    """A runtime on a cluster, which is left at the end."""
    with _cluster(how) as cluster:
        from actors.ray import RayRuntime

        async with RayRuntime(cluster, model) as runtime:
            yield runtime


def _cluster(how: str) -> Cluster:
    try:
        from actors.cluster import Cluster
    except ModuleNotFoundError as error:
        raise JitllmError(
            f"-ray {how} needs {error.name}", "install it: pip install 'jitllm[ray]'"
        ) from error
    return Cluster(how)


def _check_actors() -> None:
    """The `actors` package must be ours: a folder of that name may shadow it."""
    found = Path(actors.__file__ or "").resolve().parent
    ours = Path(__file__).resolve().parent.parent / "actors"
    if found != ours:
        raise JitllmError(
            f"the package `actors` was imported from {found}, not {ours}",
            "rename that folder, or start from another directory",
        )


def _devices(
    config: ResolvedConfig, nodes: Sequence[NodeListed], here: str, cache: ObjectCache
) -> tuple[tuple[ChosenDevice, ...], tuple[CpuShare, ...]]:
    """The devices that were asked for, and the threads of each.

    nodes: those of a cluster that devices may be on, besides this one. here: its name. cache: of
    kernels, should GPUs have to be timed. Raises `UsageError` or `PlacementError` for a device that
    there is not.
    """
    own = HostReport(config.threads, numa_nodes(cpu_mask()), host_devices(config.threads))
    hosts = {"": own} | {node.name: node.host for node in nodes if node.host}
    available = [replace(d, node=node) for node, host in hosts.items() for d in host.devices]
    entries = parse_devices(config.devices)
    if may_take_vulkan(entries):
        from jitllm.devices.vulkan.speed import with_speeds

        found = find_vulkan()
        if found.problem and (named := [e.name for e in entries if e.backend == "vulkan"]):
            raise PlacementError(f"-devices {named[0]}: {found.problem}", found.remedy)
        available += with_speeds(entries, found.devices, cache)
    chosen, _ = choose_devices(entries, available, here)
    devices = tuple(one.device for one in chosen)
    shares: dict[str, CpuShare] = {}
    for node, host in hosts.items():
        there = [d for d in devices if d.node == node and not d.is_gpu]
        divided = cpu_shares([d.ordinal for d in there], host.threads, host.numa)
        shares |= zip((d.name for d in there), divided, strict=True)
    return chosen, tuple(shares.get(device.name, CpuShare(0)) for device in devices)


def _host(config: ResolvedConfig, chosen: Sequence[ChosenDevice]) -> str | None:
    """The device that stands for the host, if it is one of those that are chosen.

    Raises `UsageError` for a flag that is about it where it is not.
    """
    host = next((one.name for one in chosen if not one.device.is_gpu), None)
    flags = ["-relocate on"] * (config.relocate == "on") + ["-gpu-grow"] * config.gpu_grow
    flags += ["-tune-seam"] * config.tune_seam
    if host is None and flags:
        raise UsageError(
            f"{flags[0]}: the host is not in -devices {config.devices}", "add cpu to -devices"
        )
    return host


def _relocates(config: ResolvedConfig) -> bool:
    """Whether blocks of a GPU go to the host when keys and values need their room."""
    return config.gpu_fallback if config.relocate == "auto" else config.relocate == "on"


def _vram(chosen: ChosenDevice, config: ResolvedConfig) -> int:
    """What a model may take of a GPU: the device list knows best, then -vram."""
    if asked := chosen.budget_bytes or config.vram_bytes:
        return asked
    most = default_budget(chosen.device.free_bytes)
    return min(most, config.maxmem_bytes) if chosen.device.is_unified else most


def _room(
    chosen: ChosenDevice, config: ResolvedConfig, header: Header, graph: Graph, limits: Limits
) -> Room:
    """A device as automatic placement sees it: wherever blocks are, so is the dense region."""
    device, fixed_bytes = chosen.device, header.dense.length
    free_bytes = config.maxmem_bytes
    if device.is_gpu:
        free_bytes = _vram(chosen, config)
        rows = {Rows.TOKENS: limits.tokens, Rows.OUTPUTS: limits.outputs}
        fixed_bytes += sum(b.stride_bytes * rows[b.rows] for b in graph.buffers())
    return Room(device.name, free_bytes, fixed_bytes, device.speed or 1.0, has_head=True)


def _place(
    config: ResolvedConfig,
    graph: Graph,
    header: Header,
    chosen: Sequence[ChosenDevice],
    limits: Limits,
) -> tuple[Placement, tuple[Decline, ...]]:
    """Where everything begins, and what was asked for in vain."""
    context = _context_tokens(config, graph)
    history = History(graph.kv, config.kv_type)
    costs = [
        BlockCost(num_bytes, history.num_bytes((block,), context))
        for block, num_bytes in enumerate(header.frame_bytes)
    ]
    rooms = [_room(one, config, header, graph, limits) for one in chosen]
    names = [one.name for one in chosen]
    try:
        placement, declines = place(costs, header.dense.length, rooms, gpu_layers=config.gpu_layers)
    except PlacementError:  # a map may say how everything fits, streamed say
        if config.placement is None:
            raise
        placement = Placement.all_on(names[0], graph.num_blocks)
        declines = ()
    if config.placement is None:
        return placement, declines
    return parse_map(config.placement).resolve(
        graph.num_blocks, names, placement, strict=config.placement_strict
    )


def _park_folder(config: ResolvedConfig) -> Path:
    """Where parked sequences go; what is there has no name, so any folder will do."""
    if config.kv_cache is not None:
        return Path(config.kv_cache)
    return (default_directory() or Path(gettempdir()) / "jitllm") / "kv"


def _kv_budget_sets(config: ResolvedConfig, graph: Graph, page_tokens: int) -> int:
    """Page sets of all blocks that the budget of keys and values holds; 0 where there is none.

    A device with some of the blocks keeps as many sets of its own. Raises `UsageError` for a budget
    that holds no set.
    """
    if not config.kv_budget_bytes:
        return 0
    sizes = [
        page_bytes(kv.kv_heads, kv.k_dim, kv.v_dim, page_tokens, config.kv_type) for kv in graph.kv
    ]
    set_bytes = Columns(sizes).stride_bytes
    if config.kv_budget_bytes < set_bytes:
        raise UsageError(
            f"-kv-budget {format_size(config.kv_budget_bytes)} does not hold {page_tokens} "
            f"positions in {graph.num_blocks} blocks",
            f"the least is {format_size(set_bytes)}, or less with a smaller -page-size",
        )
    return config.kv_budget_bytes // set_bytes


def _prefix_folder(
    config: ResolvedConfig, header: Header, graph: Graph, chosen: Sequence[ChosenDevice]
) -> PrefixFolder | None:
    """Where prefixes go, and under which name those of this model do.

    Whatever may change a bit of keys and values is in that name. All CPUs compute the same bits.
    A GPU does not, so where there is one among the devices, that is another name.
    """
    if config.prefix_cache_bytes is None or config.kv_cache is None or not config.share_prefixes:
        return None
    known = (
        *(emitters_fingerprint(), header.arch, sorted(header.config.items()), graph.kv),
        *(config.kv_type, any(one.device.is_gpu for one in chosen)),
        [(name, extent.length, extent.xxh3) for name, extent in header.extents()],
    )
    identity = blake2b(repr(known).encode(), digest_size=16).digest()
    history = History(graph.kv, config.kv_type)
    kv_bytes = tuple(history.num_bytes((block,), 1) for block in range(graph.num_blocks))
    kind = PrefixKind(identity, kv_bytes, graph.hidden.stride_bytes)
    return PrefixFolder(Path(config.kv_cache) / "prefixes", config.prefix_cache_bytes, kind)


def _context_tokens(config: ResolvedConfig, graph: Graph) -> int:
    return min(config.ctx_tokens or graph.context_length, graph.context_length)


def _page_tokens(config: ResolvedConfig, context_tokens: int) -> int:
    """A page need not be larger than the context."""
    return min(config.page_size_tokens, 1 << (context_tokens - 1).bit_length())


def _limits(config: ResolvedConfig, graph: Graph) -> Limits:
    """Every row that samples needs an output, and each of those takes 12 bytes a token id. What a
    step computes of a prompt has to leave half of a budget of keys and values to what was before.
    """
    rows = config.max_batch or DEFAULT_ROWS
    chunk_tokens = config.prompt_chunk_tokens
    if num_sets := _kv_budget_sets(config, graph, config.page_size_tokens):
        chunk_tokens = min(chunk_tokens, max(num_sets // 2, 1) * config.page_size_tokens)
    tokens = max(chunk_tokens, rows)
    outputs = max(LOGITS_BYTES // (4 * graph.vocab), rows)
    return Limits(tokens=tokens, outputs=min(outputs, tokens), rows=rows)
