"""Arguments and flags that several verbs share.

Knows how the user spells them, and turns the engine's into an `EngineConfig`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from jitllm.cli.command import option, parameters, set_signature
from jitllm.config import EngineConfig
from jitllm.errors import UsageError
from jitllm.units import parse_size

Model = Annotated[Path, typer.Argument(metavar="MODEL.jlm", help="A converted model.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="TEXT", show_default=False)]
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


def _engine_option(name: str, kind: Any, default: Any, *flag: str, **more: Any) -> Any:
    shown = default is not None
    return option(name, Annotated[kind, typer.Option(*flag, show_default=shown, **more)], default)


_ENGINE_FLAGS = (
    _engine_option(
        "ctx",
        int | None,
        None,
        "-ctx",
        metavar="N",
        help="Longest history in tokens, prompt and reply; default: what the model was trained "
        "for, as far as memory allows.",
    ),
    _engine_option(
        "maxmem",
        str | None,
        None,
        "-maxmem",
        metavar="SIZE",
        help="All memory that the model may take: 12G, 512M, 400K or bytes; default: four fifths "
        "of what the machine can give. Blocks that do not fit are paged.",
    ),
    _engine_option(
        "threads",
        int | None,
        None,
        "-threads",
        metavar="N",
        help="Threads that compute; default: a thread for each core that is ours.",
    ),
    _engine_option(
        "tier",
        str,
        "auto",
        "-tier",
        metavar="TIER",
        help="Instruction set: auto, or one that `jitllm hardware` lists.",
    ),
    _engine_option(
        "devices", str, "auto", "-devices", metavar="SPEC", help="Where to compute: cpu or auto."
    ),
    _engine_option(
        "kv_type", str, "f16", "-kv-type", metavar="TYPE", help="Keys and values: f16 or f32."
    ),
    _engine_option(
        "read_ahead",
        str,
        "auto",
        "-read-ahead",
        metavar="MODE",
        help="Read the next block while one is computed: auto, on or off.",
    ),
    _engine_option(
        "page_size",
        int | None,
        None,
        "-page-size",
        metavar="N",
        help="Positions in a page of keys and values: a power of two; default: the device's.",
    ),
)


def _config(
    *,
    ctx: int | None,
    maxmem: str | None,
    threads: int | None,
    tier: str,
    devices: str,
    kv_type: Any,
    read_ahead: Any,
    page_size: int | None,
) -> EngineConfig:
    """Raises UsageError for what cannot be meant."""
    if devices not in ("auto", "cpu"):
        raise UsageError(f"-devices {devices!r} is not available", "choose auto or cpu")
    return EngineConfig(
        ctx_tokens=ctx,
        maxmem_bytes=None if maxmem is None else parse_size(maxmem, "-maxmem"),
        threads=threads,
        tier=tier,
        devices=devices,
        kv_type=kv_type,
        read_ahead=read_ahead,
        page_size_tokens=page_size,
    )
