"""Puts an engine together: container, pager, device, scheduler, client.

The only importer of `actors`, and the place where every part meets the others. Opening reads the
container's header and its dense region, compiles what the cache lacks, and starts the actors.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import actors
from actors.actor import AnyRuntime, Recipe, Ref
from actors.beside import beside
from actors.client import Client
from actors.hosted import Host
from actors.local import Runtime
from actors.member import Member as Member
from actors.member import Seat, lookup
from actors.messages.device import DeviceStatsRequest
from actors.messages.manager import Listed as Listed
from actors.messages.manager import NodeListed as NodeListed
from actors.recipes import DeviceRecipe, PagerRecipe, SchedulerRecipe
from actors.route import Site
from jitllm import allot
from jitllm.config import EngineConfig, Probe, ResolvedConfig, resolve
from jitllm.devices.grammar import parse_devices
from jitllm.engine import Engine
from jitllm.errors import JitllmError
from jitllm.formats.jlm import Container, Header
from jitllm.jit.cache import ObjectCache, default_directory
from jitllm.jit.threads import default_threads
from jitllm.jit.tiers import available, choose
from jitllm.memory.budget import probe as probe_memory
from jitllm.memory.history import History
from jitllm.memory.host import HostReport
from jitllm.models.graph import Graph
from jitllm.models.registry import graph_of
from jitllm.schedule.plan import Budget

if TYPE_CHECKING:
    from actors.cluster import Cluster
    from actors.ray import RayRuntime
    from jitllm.text.chat import ChatTemplate
    from jitllm.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, in all)."""


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
    if config.tier == "auto":
        tiers = tuple(tier.name for tier in reversed(available()))
    else:
        tiers = (choose(config.tier).name,)  # says why, when this machine cannot
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
        context_tokens = allot.context_tokens_of(config, graph)
        config = replace(config, page_size_tokens=allot.page_tokens_of(config, context_tokens))
        allot.check_kv_type(config, graph)
        limits = allot.limits_of(config, graph)
        runtime: AnyRuntime
        seat: Seat | None = None
        hosts: dict[str, HostReport] = {}
        if ray is None:
            runtime = await stack.enter_async_context(Runtime(strict=strict))
        else:
            seat = await stack.enter_async_context(_seat(ray, member, name, path))
            runtime = await stack.enter_async_context(_on_ray(ray, seat.name))
            if any(entry.node or entry.backend == "all" for entry in parse_devices(config.devices)):
                own_id, nodes = seat.member.node_id, await seat.member.nodes()
                others = (node for node in nodes if node.node_id != own_id)
                hosts = {node.name: node.host for node in others if node.host}
        objects, here = cache or ObjectCache(default_directory()), runtime.here
        chosen, shares = await beside(lambda _: allot.devices_of(config, hosts, here, objects))
        host = allot.host_of(config, chosen)
        away = allot.experts_away(config, graph)
        experts_used = allot.experts_used_of(config, graph, header, away)
        pagers: dict[str, Ref] = {}
        for device in (one.device for one in chosen):
            pagers[device.name] = await runtime.start(
                PagerRecipe(
                    container,
                    config.maxmem_bytes // len(chosen),
                    config.read_ahead,
                    ray is not None,
                    is_empty=device.is_gpu,
                    experts_used=experts_used if away.blocks or not device.is_gpu else 0,
                    apart=away.blocks if device.is_gpu else None,
                    hosted=away.hosted,
                    is_host=device.name == host,
                ),
                f"pager {device.name}",
                node=device.node,
            )
        dense: dict[str, Ref] = {}
        for device in (one.device for one in chosen):
            if not device.is_gpu:  # which would keep it for itself only while it is read
                dense.setdefault(device.node, pagers[device.name])
        sites: dict[str, Site] = {}
        # The host first: others may ask it.
        for one, share in sorted(zip(chosen, shares, strict=True), key=lambda c: c[0].name != host):
            device, pager = one.device, pagers[one.name]
            asked = sites.get(host or "") if away.hosted else None
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
                "kv_budget_sets": allot.kv_budget_sets(config, graph, page_tokens),
                "is_shared": ray is not None,
                "hosted": away.hosted,
                "host": asked and Host(asked.device, is_far=asked.node != device.node),
                "cache": objects,
                "progress": partial(progress, "compiling kernels")
                if progress and not ray
                else None,
            }
            if device.is_gpu:
                from actors.vulkan_recipe import VulkanRecipe

                recipe: Recipe = VulkanRecipe(
                    index=device.ordinal,
                    budget_bytes=allot.vram_of(one, config),
                    is_unified=device.is_unified,
                    name=device.name,
                    block_bytes=allot.held_bytes(header, away.blocks),
                    carded=away.carded,
                    **settings,
                )
            else:
                recipe = DeviceRecipe(
                    tier=config.tier,
                    threads=share.num_threads,
                    cpus=share.cpus or frozenset(),
                    is_alone=len(chosen) == 1,
                    kv_folder=allot.park_folder(config),
                    has_apart=experts_used > 0,
                    **settings,
                )
            made = await runtime.start(
                recipe, f"device {device.name}", restarts=True, node=device.node
            )
            sites[device.name] = Site(made, pager, device.node, has_memory=device.is_gpu)
        sites = {one.name: sites[one.name] for one in chosen}
        target, declines = allot.first_placement(config, graph, header, chosen, limits, away)
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
                # The head is in the dense region.
                block_bytes=(*allot.held_bytes(header, away.blocks), 0),
                kv_bytes=tuple(history.num_bytes((block,), 1) for block in range(graph.num_blocks)),
                context_tokens=context_tokens,
                vocab=graph.vocab,
                page_tokens=config.page_size_tokens if config.share_prefixes else 0,
                max_queue=config.max_queue,
                falls_back=config.fallback,
                move_share=config.move_share,
                declines=declines,
                fairness=config.fairness,
                park_folder=allot.park_folder(config),
                relocates=host is not None and allot.relocates(config),
                grows_to=target if config.gpu_grow else None,
                tunes=config.tune_seam,
                gpus_fall_back=config.gpu_fallback,
                prefixes=allot.prefix_folder(config, header, graph, chosen),
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
