"""What of a machine a model gets: devices, where its blocks begin, sizes, folders.

Plain functions of a configuration, a container's header and what there is. Knows no actor.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from tempfile import gettempdir

from jitllm.config import ResolvedConfig
from jitllm.devices.choose import ChosenDevice, choose_devices
from jitllm.devices.cpus import CpuShare, cpu_shares, numa_nodes
from jitllm.devices.grammar import parse_devices
from jitllm.devices.host import Limits
from jitllm.devices.mixtures import expert_blocks
from jitllm.devices.vulkan.found import default_budget, find_vulkan, may_take_vulkan
from jitllm.errors import PlacementError, UsageError
from jitllm.formats.jlm import Header
from jitllm.jit.cache import ObjectCache, default_directory, emitters_fingerprint
from jitllm.jit.threads import cpu_mask
from jitllm.kernels.expert_matmul import ExpertMatMul
from jitllm.kernels.kv_write import page_bytes
from jitllm.kernels.layout import GROUP
from jitllm.kernels.op import Rows
from jitllm.memory.columns import Columns
from jitllm.memory.division import are_apart
from jitllm.memory.history import History
from jitllm.memory.host import HostReport, host_devices
from jitllm.memory.prefix_file import PrefixKind
from jitllm.memory.prefix_store import PrefixFolder
from jitllm.models.graph import Graph
from jitllm.schedule.place import BlockCost, Room, place
from jitllm.schedule.placement import CARDED, HOSTED, Decline, Placement
from jitllm.schedule.placement_map import parse_map
from jitllm.units import format_size

DEFAULT_ROWS = 16
"""Sequences that one step may hold, when nobody says."""

LOGITS_BYTES = 8 << 20
"""Memory for output rows: what bounds them where the vocabulary is large."""


@dataclass(frozen=True, slots=True)
class ExpertsAway:
    """Blocks whose experts the host computes, and those whose experts come to a GPU one by one:
    wherever they are, and for good."""

    hosted: frozenset[int] = frozenset()
    carded: frozenset[int] = frozenset()

    @property
    def blocks(self) -> frozenset[int]:
        """All of them: a GPU holds them without their experts."""
        return self.hosted | self.carded


def devices_of(
    config: ResolvedConfig, nodes: Mapping[str, HostReport], here: str, cache: ObjectCache
) -> tuple[tuple[ChosenDevice, ...], tuple[CpuShare, ...]]:
    """The devices that were asked for, and the threads of each.

    nodes: those of a cluster that devices may be on, besides this one. here: its name. cache: of
    kernels, should GPUs have to be timed. Raises `UsageError` or `PlacementError` for a device that
    there is not.
    """
    own = HostReport(config.threads, numa_nodes(cpu_mask()), host_devices(config.threads))
    hosts = {"": own, **nodes}
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


def host_of(config: ResolvedConfig, chosen: Sequence[ChosenDevice]) -> str | None:
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


def relocates(config: ResolvedConfig) -> bool:
    """Whether blocks of a GPU go to the host when keys and values need their room."""
    return config.gpu_fallback if config.relocate == "auto" else config.relocate == "on"


def vram_of(chosen: ChosenDevice, config: ResolvedConfig) -> int:
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
        free_bytes = vram_of(chosen, config)
        rows = {Rows.TOKENS: limits.tokens, Rows.OUTPUTS: limits.outputs}
        fixed_bytes += sum(b.stride_bytes * rows[b.rows] for b in graph.buffers())
    return Room(device.name, free_bytes, fixed_bytes, device.speed or 1.0, has_head=True)


def first_placement(
    config: ResolvedConfig,
    graph: Graph,
    header: Header,
    chosen: Sequence[ChosenDevice],
    limits: Limits,
    away: ExpertsAway,
) -> tuple[Placement, tuple[Decline, ...]]:
    """Where everything begins, and what was asked for in vain."""
    context = context_tokens_of(config, graph)
    history = History(graph.kv, config.kv_type)
    sizes = held_bytes(header, away.blocks)
    has_gpu = any(one.device.is_gpu for one in chosen)  # which would have the experts too
    if experts_used_of(config, graph, header, away) and not has_gpu:
        sizes = held_bytes(header, range(graph.num_blocks))
    costs = [
        BlockCost(num_bytes, history.num_bytes((block,), context))
        for block, num_bytes in enumerate(sizes)
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
    host = host_of(config, chosen) or ""
    placement = replace(placement, hosted=away.hosted, host=host, carded=away.carded)
    return parse_map(config.placement).resolve(
        graph.num_blocks, names, placement, strict=config.placement_strict
    )


def experts_away(config: ResolvedConfig, graph: Graph) -> ExpertsAway:
    """What the map says of experts, of blocks that have some.

    Raises `UsageError` where experts are to come with their blocks.
    """
    if config.placement is None:
        return ExpertsAway()
    asked = parse_map(config.placement)
    hosted, carded = (asked.with_experts(m, graph.num_blocks) for m in (HOSTED, CARDED))
    if (hosted or carded) and config.experts == "blocks":
        raise UsageError(
            f"-placement with {HOSTED if hosted else CARDED}: -experts blocks keeps experts with "
            "their blocks",
            "leave -experts out",
        )
    having = expert_blocks(graph.blocks)
    return ExpertsAway(hosted & having, carded & having)


def context_tokens_of(config: ResolvedConfig, graph: Graph) -> int:
    return min(config.ctx_tokens or graph.context_length, graph.context_length)


def page_tokens_of(config: ResolvedConfig, context_tokens: int) -> int:
    """A page need not be larger than the context."""
    return min(config.page_size_tokens, 1 << (context_tokens - 1).bit_length())


def limits_of(config: ResolvedConfig, graph: Graph) -> Limits:
    """Every row that samples needs an output, and each of those takes 12 bytes a token id. What a
    step computes of a prompt has to leave half of a budget of keys and values to what was before.
    """
    rows = config.max_batch or DEFAULT_ROWS
    chunk_tokens = config.prompt_chunk_tokens
    if num_sets := kv_budget_sets(config, graph, config.page_size_tokens):
        chunk_tokens = min(chunk_tokens, max(num_sets // 2, 1) * config.page_size_tokens)
    tokens = max(chunk_tokens, rows)
    outputs = max(LOGITS_BYTES // (4 * graph.vocab), rows)
    return Limits(tokens=tokens, outputs=min(outputs, tokens), rows=rows)


def check_kv_type(config: ResolvedConfig, graph: Graph) -> None:
    """Raises `UsageError` for a type of keys and values that a model's heads cannot have."""
    if config.kv_type != "q8_0":
        return
    for block, kv in enumerate(graph.kv):
        for name, dim in (("keys", kv.k_dim), ("values", kv.v_dim)):
            if dim % GROUP:
                raise UsageError(
                    f"-kv-type q8_0 has a scale for every {GROUP} dimensions of a head, and the "
                    f"{name} of block {block} have {dim}",
                    "choose f16 or f32",
                )


def kv_budget_sets(config: ResolvedConfig, graph: Graph, page_tokens: int) -> int:
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


def held_bytes(header: Header, apart: Container[int]) -> tuple[int, ...]:
    """What a device holds of each block. apart: blocks without their experts."""
    whole = enumerate(header.frame_bytes)
    return tuple(header.blocks[b].length if b in apart else size for b, size in whole)


def experts_used_of(config: ResolvedConfig, graph: Graph, header: Header, away: ExpertsAway) -> int:
    """Experts that a token needs in a block where they are paged one by one, else 0."""
    ops = (op for op in graph.ops() if isinstance(op, ExpertMatMul))
    used = next((op.used for op in ops), 0)
    is_apart = are_apart(config.experts, header.weight_bytes, config.maxmem_bytes)
    return used if is_apart or away.blocks else 0


def park_folder(config: ResolvedConfig) -> Path:
    """Where parked sequences go; what is there has no name, so any folder will do."""
    if config.kv_cache is not None:
        return Path(config.kv_cache)
    return (default_directory() or Path(gettempdir()) / "jitllm") / "kv"


def prefix_folder(
    config: ResolvedConfig, header: Header, graph: Graph, chosen: Sequence[ChosenDevice]
) -> PrefixFolder | None:
    """Where prefixes go, and under which name those of this model do.

    Whatever may change a bit of keys and values is in that name. All CPUs compute the same bits.
    A GPU does not, so where there is one among the devices, that is another name.
    """
    if config.prefix_cache_bytes is None or config.kv_cache is None or not config.share_prefixes:
        return None
    kernels = [emitters_fingerprint()]
    if any(one.device.is_gpu for one in chosen):
        from jitllm.jit.slang import sources_fingerprint

        ops = {type(op).__module__.rsplit(".", 1)[1] for op in graph.ops()}
        kernels += map(sources_fingerprint, sorted(ops))
    weights = [(name, extent.length, extent.xxh3) for name, extent in header.extents()]
    known = (kernels, weights, graph.embed, graph.tables, graph.blocks, config.kv_type)
    identity = blake2b(repr(known).encode(), digest_size=16).digest()
    history = History(graph.kv, config.kv_type)
    kv_bytes = tuple(history.num_bytes((block,), 1) for block in range(graph.num_blocks))
    kind = PrefixKind(identity, kv_bytes, graph.hidden.stride_bytes)
    return PrefixFolder(Path(config.kv_cache) / "prefixes", config.prefix_cache_bytes, kind)
