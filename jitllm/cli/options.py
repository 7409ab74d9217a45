"""Arguments and flags that several verbs share.

Knows how the user spells them, and turns the engine's into an `EngineConfig` and those of a reply
into an `Asked`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from jitllm.cli.asking import Asked
from jitllm.cli.command import option, parameters, set_signature
from jitllm.config import DEFAULT_PREFIX_CACHE_BYTES, EngineConfig
from jitllm.devices.grammar import parse_devices
from jitllm.engine import Sampling
from jitllm.errors import UsageError
from jitllm.schedule.placement_map import parse_map
from jitllm.units import parse_size

Number = TypeVar("Number", int, float)

MAX_INT = 2**31 - 1
MAX_SEED = 2**64 - 1
"""Fields of a sampling record are so wide: what is larger would be refused when all is loaded."""

Model = Annotated[Path, typer.Argument(metavar="MODEL.jlm", help="A converted model.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="TEXT", show_default=False)]
Chat = Annotated[bool, typer.Option("-chat", help="Use the model's chat template.")]
TextFile = Annotated[
    Path | None,
    typer.Option("-f", metavar="FILE", help="Read the text from FILE.", show_default=False),
]


def engine_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the engine's flags in place of its parameter `config`."""

    @wraps(function)
    def run(**arguments: Any) -> Any:
        flags = {flag.name: arguments.pop(flag.name) for flag in _ENGINE_FLAGS}
        return function(config=_config(**flags), **arguments)

    own = [param for param in parameters(function) if param.name != "config"]
    set_signature(run, [*own, *_ENGINE_FLAGS])
    return run


def reply_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the flags of a reply in place of its parameter `asked`."""

    @wraps(function)
    def run(**arguments: Any) -> Any:
        flags = {flag.name: arguments.pop(flag.name) for flag in _REPLY_FLAGS}
        return function(asked=_asked(**flags), **arguments)

    own = parameters(function)
    at = [param.name for param in own].index("asked")
    set_signature(run, [*own[:at], *_REPLY_FLAGS, *own[at + 1 :]])
    return run


def given_text(words: list[str] | None, file: Path | None, *, keep_newline: bool) -> str | None:
    """The text of a command line: its words, or a file, or else what is piped into stdin.

    None when there is none of them and stdin is a terminal. Without `keep_newline` the one
    newline that editors and `echo` put at the end is taken off a file. Raises UsageError for
    words beside a file, for an empty stdin, and for what is no UTF-8.
    """
    if words and file is not None:
        raise UsageError("text is given twice, as words and with -f", "leave one of them out")
    if words:
        text = " ".join(words)
        if not text.isprintable() and any("\ud800" <= c <= "\udfff" for c in text):
            raise UsageError("the text is not UTF-8", "put it into a file that is")
        return text
    if file is not None:
        text = _decoded(file.read_bytes(), str(file))
    elif sys.stdin is None or sys.stdin.isatty():
        return None
    elif not (text := _decoded(sys.stdin.buffer.read(), "standard input")):
        raise UsageError("standard input is empty", "write the text after the model, or use -f")
    return text if keep_newline else text.removesuffix("\n")


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}",
            "convert it, for example with iconv",
        ) from None


def _flag(name: str, kind: Any, default: Any, *flag: str, **more: Any) -> Any:
    shown = not (default is None or default is False or default == "")
    return option(name, Annotated[kind, typer.Option(*flag, show_default=shown, **more)], default)


_ENGINE_FLAGS = (
    _flag(
        "ctx",
        int | None,
        None,
        "-ctx",
        metavar="N",
        help="Longest history in tokens, prompt and reply; default: what the model was trained "
        "for, as far as memory allows.",
    ),
    _flag(
        "maxmem",
        str | None,
        None,
        "-maxmem",
        metavar="SIZE",
        help="All memory that the model may take: 12G, 512M, 400K or bytes; default: four fifths "
        "of what the machine can give. Blocks that do not fit are paged.",
    ),
    _flag(
        "threads",
        int | None,
        None,
        "-threads",
        metavar="N",
        help="Threads that compute; default: a thread for each core that is ours.",
    ),
    _flag(
        "tier",
        str,
        "auto",
        "-tier",
        metavar="TIER",
        help="Instruction set: auto, or one that `jitllm hardware` lists.",
    ),
    _flag(
        "devices",
        str,
        "auto",
        "-devices",
        metavar="LIST",
        help="Where to compute: auto, all, or devices with commas: cpu[:N], gpu[:N], cuda[:N], "
        "hip[:N], vulkan[:N or part of a name], metal, each GPU with =SIZE for the most of its "
        "memory; several CPU devices share the cores; NODE/cpu:0 is another host's. "
        "`jitllm hardware` lists those of this one.",
    ),
    _flag(
        "placement",
        str | None,
        None,
        "-placement",
        metavar="MAP",
        help="Which blocks go where: 0-8=cpu:0,9-17=cpu:1,head=host. Before = a block, a range "
        "with its end, head (the output) or * (all others); after it a device or host, then ! to "
        "pin, ~ to stream the weights at each step, and behind that %host to have the experts of "
        "a mixture's block on the host, %card to bring them to a GPU one by one; default: the "
        "engine chooses.",
    ),
    _flag(
        "placement_strict",
        bool,
        False,
        "-placement-strict",
        help="Refuse to start unless all of -placement can be met.",
    ),
    _flag(
        "vram",
        str | None,
        None,
        "-vram",
        metavar="SIZE",
        help="The most memory that is taken of each GPU: 6G, 512M or bytes; vulkan:0=SIZE in "
        "-devices says it for one. Default, and 0: what is free there, less an eighth, 256M at "
        "the least.",
    ),
    _flag(
        "gpu_layers",
        int,
        -1,
        "-gpu-layers",
        metavar="N",
        help="Most blocks that go to GPUs; -1: all that fit.",
    ),
    _flag(
        "gpu_grow",
        bool,
        False,
        "-gpu-grow",
        help="Begin on the host, and bring a block to its GPU with each token.",
    ),
    _flag(
        "tune_seam",
        bool,
        False,
        "-tune-seam",
        help="While replies run, try fewer blocks on a GPU, and keep that if it is faster by more "
        "than a twentieth; takes some 400 tokens for each try.",
    ),
    _flag(
        "relocate",
        str,
        "auto",
        "-relocate",
        metavar="MODE",
        help="When a GPU has no room for a growing context, its last block goes to the host, one "
        "after the other, and comes back when there is room: on, off (the reply ends with an "
        "error) or auto, which is on if -devices has the host (cpu), but not with "
        "-no-gpu-fallback.",
    ),
    _flag(
        "fairness",
        int | None,
        None,
        "-fairness",
        metavar="N",
        help="Time slices when there is no room for the keys and values of all requests: 0 serves "
        "who came first to the end, 1 to 100 have ever shorter slices; default: 50 for a server, "
        "else 0.",
    ),
    _flag(
        "kv_cache",
        str | None,
        None,
        "-kv-cache",
        metavar="DIR",
        help="Keep keys and values of prompts and replies in this folder: what begins like one of "
        "them is not computed again, also by the next process. Those of parked requests, and those "
        "beyond -kv-budget, go there too; by default to the user's cache.",
    ),
    _flag(
        "kv_cache_max",
        str | None,
        None,
        "-kv-cache-max",
        metavar="SIZE",
        help="The most that -kv-cache keeps, 0 for no bound; what was used last stays. Default: "
        "8G.",
    ),
    _flag(
        "kv_budget",
        str | None,
        None,
        "-kv-budget",
        metavar="SIZE",
        help="The most memory of each device for keys and values: 2G, 512M or bytes; the oldest of "
        "what is beyond goes to -kv-cache, of a GPU to the host's memory, and is read again for "
        "each token. Default, and 0: as much as they need.",
    ),
    _flag(
        "no_fallback",
        bool,
        False,
        "-no-fallback",
        help="A device that dies ends its requests with an error; else their replies go on, with "
        "what was lost computed again.",
    ),
    _flag(
        "no_gpu_fallback",
        bool,
        False,
        "-no-gpu-fallback",
        help="A GPU that is lost ends all requests with an error; else replies go on with its "
        "blocks on the host.",
    ),
    _flag(
        "move_share",
        int,
        10,
        "-move-share",
        metavar="PERCENT",
        help="Most of the time that a move of blocks may take from running replies, 1 to 99.",
    ),
    _flag(
        "kv_type",
        str,
        "f16",
        "-kv-type",
        metavar="TYPE",
        help="Keys and values: f16, f32, or q8_0, which takes about half the memory of f16.",
    ),
    _flag(
        "read_ahead",
        str,
        "auto",
        "-read-ahead",
        metavar="MODE",
        help="Read the next block while one is computed: auto, on or off.",
    ),
    _flag(
        "experts",
        str,
        "auto",
        "-experts",
        metavar="MODE",
        help="How experts of a mixture are paged: apart, each when a token needs it; with their "
        "blocks; auto, apart where the model does not fit.",
    ),
    _flag(
        "page_size",
        int | None,
        None,
        "-page-size",
        metavar="N",
        help="Positions in a page of keys and values: a power of two; default: the device's.",
    ),
)


_REPLY_FLAGS = (
    _flag(
        "num",
        int | None,
        None,
        "-n",
        metavar="N",
        help="Tokens to generate; default: until the end.",
    ),
    _flag(
        "system", str, "", "-system", metavar="TEXT", help="What the model is to be; with -chat."
    ),
    _flag(
        "temp",
        float,
        0.0,
        "-temp",
        metavar="F",
        help="Temperature; 0 takes the likeliest token.",
    ),
    _flag("top_k", int, 0, "-top-k", metavar="N", help="Draw from the N likeliest; 0: from all."),
    _flag(
        "top_p", float, 1.0, "-top-p", metavar="F", help="Draw from the likeliest that make up F."
    ),
    _flag(
        "min_p", float, 0.0, "-min-p", metavar="F", help="Leave out what is F times less likely."
    ),
    _flag(
        "repeat_penalty",
        float,
        1.0,
        "-repeat-penalty",
        metavar="F",
        help="Above 1: repeat less.",
    ),
    _flag(
        "repeat_last_n",
        int,
        64,
        "-repeat-last-n",
        metavar="N",
        help="Tokens that count as repeated.",
    ),
    _flag("seed", int, 0, "-seed", metavar="N", help="The same seed gives the same reply."),
    _flag(
        "stop",
        list[str] | None,
        None,
        "-stop",
        metavar="TEXT",
        help="End before this text; may be repeated.",
    ),
    _flag(
        "ignore_eos", bool, False, "-ignore-eos", help="Go on after the model has ended its reply."
    ),
)


def _asked(
    *,
    num: int | None,
    system: str,
    temp: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repeat_penalty: float,
    repeat_last_n: int,
    seed: int,
    stop: list[str] | None,
    ignore_eos: bool,
) -> Asked:
    """Raises UsageError for what cannot be meant."""
    return Asked(
        max_tokens=_at_least(num, 0, "-n"),
        system=system,
        stops=tuple(stop or ()),
        ignore_eos=ignore_eos,
        sampling=Sampling(
            temperature=_within(temp, 0, 1e30, "-temp"),
            top_k=_within(top_k, 0, MAX_INT, "-top-k"),
            top_p=_within(top_p, 0, 1, "-top-p"),
            min_p=_within(min_p, 0, 1, "-min-p"),
            repeat_penalty=_within(repeat_penalty, 1e-3, 1e3, "-repeat-penalty"),
            repeat_last_n=_within(repeat_last_n, 0, MAX_INT, "-repeat-last-n"),
            seed=_within(seed, 0, MAX_SEED, "-seed"),
        ),
    )


def _at_least(value: int | None, least: int, flag: str) -> int | None:
    if value is not None and value < least:
        raise UsageError(f"{flag} {value} is too small", f"the least is {least}")
    return value


def _within(value: Number, least: float, most: float, flag: str) -> Number:
    if not least <= value <= most:
        raise UsageError(f"{flag} {value} makes no sense", f"choose from {least} to {most}")
    return value


def _config(
    *,
    ctx: int | None,
    maxmem: str | None,
    threads: int | None,
    tier: str,
    devices: str,
    placement: str | None,
    placement_strict: bool,
    vram: str | None,
    gpu_layers: int,
    gpu_grow: bool,
    tune_seam: bool,
    relocate: Any,
    fairness: int | None,
    kv_cache: str | None,
    kv_budget: str | None,
    kv_cache_max: str | None,
    no_fallback: bool,
    no_gpu_fallback: bool,
    move_share: int,
    kv_type: Any,
    read_ahead: Any,
    experts: Any,
    page_size: int | None,
) -> EngineConfig:
    """Raises UsageError for what cannot be meant; what there is to compute on shows later."""
    parse_devices(devices)
    if placement is not None:
        parse_map(placement)
    return EngineConfig(
        ctx_tokens=ctx,
        maxmem_bytes=None if maxmem is None else parse_size(maxmem, "-maxmem"),
        threads=threads,
        tier=tier,
        devices=devices,
        placement=placement,
        placement_strict=placement_strict,
        vram_bytes=None if vram is None else parse_size(vram, "-vram"),
        gpu_layers=gpu_layers,
        gpu_grow=gpu_grow,
        tune_seam=tune_seam,
        relocate=relocate,
        fairness=fairness,
        kv_cache=kv_cache,
        kv_budget_bytes=None if kv_budget is None else parse_size(kv_budget, "-kv-budget"),
        prefix_cache_bytes=_prefix_cache_bytes(kv_cache, kv_cache_max),
        fallback=not no_fallback,
        gpu_fallback=not no_gpu_fallback,
        move_share=_within(move_share, 1, 99, "-move-share") / 100,
        kv_type=kv_type,
        read_ahead=read_ahead,
        experts=experts,
        page_size_tokens=page_size,
    )


def _prefix_cache_bytes(folder: str | None, most: str | None) -> int | None:
    if most is not None:
        return parse_size(most, "-kv-cache-max")
    return None if folder is None else DEFAULT_PREFIX_CACHE_BYTES
