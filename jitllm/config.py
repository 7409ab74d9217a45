"""What a user may choose about an engine, and how "auto" becomes a number.

Knows the choices and their limits. Knows no model and measures no machine: a `Probe` brings what
was found there. A configuration is frozen, and `resolve` answers every question about the machine
once, before anyone reads the result.
"""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from jitllm.errors import UsageError

KvType = Literal["f16", "f32", "q8_0"]
ReadAhead = Literal["auto", "on", "off"]
Relocate = Literal["auto", "on", "off"]
Experts = Literal["auto", "apart", "blocks"]

DEFAULT_PAGE_SIZE_TOKENS = 64

DEFAULT_PREFIX_CACHE_BYTES = 8 << 30
"""What the prefix cache takes on disk at the most where a user only says where it is."""

MAX_THREADS = 1024
MAX_ROWS = 1 << 16
"""More than any machine has use for: refused at once, not when memory or the system runs out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """An engine as it was asked for; None and "auto" leave the choice to `resolve`."""

    maxmem_bytes: int | None = None
    """Everything a model takes on the host; None: four fifths of what the machine can give."""
    threads: int | None = None
    """Width of the thread team; None: as many as there are cores for us."""
    tier: str = "auto"
    """Instruction set of the CPU kernels; "auto": the best that this CPU has."""
    kv_type: KvType = "f16"
    ctx_tokens: int | None = None
    """Longest history of a sequence; None: what the model was trained for."""
    page_size_tokens: int | None = None
    """Positions in a KV page, a power of two; None: what the device likes."""
    read_ahead: ReadAhead = "auto"
    """Lend one frame to the next block, so that its read overlaps compute; "auto" measures."""
    experts: Experts = "auto"
    """How experts of a mixture are paged on the host: "apart", each one when a token needs it, or
    with their "blocks"; "auto": apart where the model does not fit."""
    devices: str = "auto"
    """Where a model may be computed: a list as `jitllm.devices.grammar` reads it."""
    placement: str | None = None
    """Which blocks go where; None: the engine chooses."""
    placement_strict: bool = False
    """An entry of the placement that cannot be met is an error, not a note."""
    gpu_layers: int = -1
    """Most blocks that go to GPUs; -1: all that fit."""
    gpu_grow: bool = False
    """Begin with everything on the host; a block goes to its GPU with each token at the most."""
    vram_bytes: int | None = None
    """Most memory that is taken of a GPU whose entry in `devices` says nothing of it; None or 0:
    what is free there, less an eighth and 256 MiB at the least."""
    tune_seam: bool = False
    """Find out, while replies run, whether fewer blocks on a GPU are faster, and keep what is."""
    relocate: Relocate = "auto"
    """Where a GPU has no room for keys and values, its last blocks go to the host; "auto": if the
    host is one of `devices`, and `gpu_fallback` is on."""
    gpu_fallback: bool = True
    """The blocks of a GPU that is lost go to other devices; else all requests fail from then on."""
    fallback: bool = True
    """Requests survive the death of a device: what it had computed is computed again."""
    move_share: float = 0.1
    """Largest part of the time that a move may take from running replies."""
    page_sizes: tuple[tuple[str, int], ...] = ()
    """Positions in a KV page by device, where it is not `page_size_tokens`."""
    prompt_chunk_tokens: int = 512
    """Most tokens of one sequence that a step computes."""
    max_queue: int = 64
    """Requests that may wait for their turn; more are refused. -1: any number may."""
    share_prefixes: bool = True
    """Compute a prefix that several prompts begin with once, and keep it while there is room."""
    fairness: int | None = None
    """How short the time slices are when there is no room for the keys and values of everybody, 1
    to 100; 0: who came first is served to the end. None: 0."""
    kv_cache: str | None = None
    """Folder for the prefix cache, and for keys and values of sequences that wait, and of those
    beyond `kv_budget_bytes`; None: the user's cache, and no prefix cache."""
    kv_budget_bytes: int | None = None
    """Most memory of each device that keys and values take; the oldest of what is beyond goes to
    `kv_cache`, of a GPU to the host's memory. None or 0: all of them stay in memory."""
    prefix_cache_bytes: int | None = None
    """Most that the prefix cache on disk takes, for all models that have theirs in `kv_cache`; 0:
    as much as there is. None: prefixes are kept in memory only."""
    max_batch: int | None = None
    """Sequences that one step may hold; None: as many as the engine is made for."""

    def __post_init__(self) -> None:
        _at_least("-maxmem", self.maxmem_bytes, 0)
        _at_least("-threads", self.threads, 1)
        _at_most("-threads", self.threads, MAX_THREADS)
        _at_least("-ctx", self.ctx_tokens, 1)
        _at_least("-page-size", self.page_size_tokens, 1)
        _at_least("-prompt-chunk", self.prompt_chunk_tokens, 1)
        _at_least("-max-queue", self.max_queue, -1)
        _at_least("-max-batch", self.max_batch, 1)
        _at_most("-max-batch", self.max_batch, MAX_ROWS)
        _at_least("-fairness", self.fairness, 0)
        _at_most("-fairness", self.fairness, 100)
        _at_least("-vram", self.vram_bytes, 0)
        _at_least("-kv-budget", self.kv_budget_bytes, 0)
        _at_least("-kv-cache-max", self.prefix_cache_bytes, 0)
        _at_least("-gpu-layers", self.gpu_layers, -1)
        _one_of("-kv-type", self.kv_type, get_args(KvType))
        _one_of("-read-ahead", self.read_ahead, get_args(ReadAhead))
        _one_of("-relocate", self.relocate, get_args(Relocate))
        _one_of("-experts", self.experts, get_args(Experts))
        _power_of_two("-page-size", self.page_size_tokens)
        for name, page_tokens in self.page_sizes:
            _power_of_two(f"the page size of {name}", page_tokens)
        if not 0 < self.move_share < 1:
            raise UsageError(
                f"a move cannot take {self.move_share} of the time", "choose from 0.01 to 0.99"
            )
        if self.kv_cache == "":
            raise UsageError("-kv-cache names no folder", "say which, or leave it out")
        if self.kv_budget_bytes and self.kv_cache is None:
            raise UsageError(
                "-kv-budget needs a folder for the keys and values that it has no room for",
                "name one with -kv-cache",
            )
        if self.prefix_cache_bytes is not None and self.kv_cache is None:
            raise UsageError(
                "-kv-cache-max is about a -kv-cache", "say which folder, or leave it out"
            )
        if self.placement_strict and self.placement is None:
            raise UsageError("-placement-strict is about a -placement", "give one, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An `EngineConfig` with nothing left to ask of the machine."""

    maxmem_bytes: int
    threads: int
    page_size_tokens: int
    fairness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was found on a machine."""

    num_cores: int
    """The smaller of the physical cores in the CPU mask and the CPU quota of the cgroup."""
    memory_bytes: int
    """The smaller of the memory limit of the cgroup and the memory that is available."""
    tiers: tuple[str, ...]
    """Instruction sets that this CPU has, the best one first."""
    page_size_tokens: int = DEFAULT_PAGE_SIZE_TOKENS


def resolve(config: EngineConfig, probe: Probe) -> ResolvedConfig:
    """`config` with every open choice made for the machine that `probe` describes."""
    chosen = {field.name: getattr(config, field.name) for field in fields(config)}
    if config.maxmem_bytes is None:
        chosen["maxmem_bytes"] = probe.memory_bytes * 4 // 5
    if config.threads is None:
        chosen["threads"] = max(probe.num_cores, 1)
    if config.page_size_tokens is None:
        chosen["page_size_tokens"] = probe.page_size_tokens
    if config.fairness is None:
        chosen["fairness"] = 0
    if config.tier == "auto":
        chosen["tier"] = probe.tiers[0]
    _one_of("-tier", chosen["tier"], probe.tiers)
    return ResolvedConfig(**chosen)


def _at_least(flag: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UsageError(f"{flag} {value} is too small", f"the least is {least}")


def _at_most(flag: str, value: int | None, most: int) -> None:
    if value is not None and value > most:
        raise UsageError(f"{flag} {value} is too large", f"the most is {most}")


def _power_of_two(flag: str, tokens: int | None) -> None:
    if tokens is not None and tokens.bit_count() != 1:
        raise UsageError(f"{flag} {tokens} is not a power of two", "64, 128 or 256 are")


def _one_of(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{flag} {value!r} is not available", f"choose {' or '.join(choices)}")
