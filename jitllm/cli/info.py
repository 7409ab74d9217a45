"""`jitllm info`: what is in a container, and whether its bytes are still what was written."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jitllm.cli import report
from jitllm.cli.command import AsJson, verb
from jitllm.cli.options import Model
from jitllm.cli.progress import Progress
from jitllm.cli.screen import note, print_json, say, table
from jitllm.errors import one_line
from jitllm.units import counted, format_size

if TYPE_CHECKING:
    from jitllm.formats.jlm import Container, Header

EXAMPLES = """
    jitllm info model.jlm
    jitllm info model.jlm -check       (reads everything and compares checksums)
    jitllm info model.jlm -kv          (every number of the source's header)
    jitllm info model.jlm -json
"""


def info(
    model: Model,
    *,
    check: Annotated[
        bool, typer.Option("-check", help="Read every extent and compare its checksum.")
    ] = False,
    kv: Annotated[bool, typer.Option("-kv", help="Show the whole configuration.")] = False,
    json: AsJson = False,
) -> int:
    """Describe a model: architecture, sizes of blocks, weight types.

    Reads the header only, unless -check is given. With -check, damage is listed and the exit code
    is 1.
    """
    from jitllm.formats.jlm import Container

    with Container.open(model) as container:
        header = container.header
        problems = _check(container) if check else None
        if json:
            print_json(_json(header, problems))
        else:
            say(table(_rows(container)) + "\n\n" + table(_types(header)) + "\n")
            if kv:
                say("\n" + table({k: _shown(v) for k, v in header.config.items()}) + "\n")
            if problems == []:
                say("\nevery checksum is right\n")
        for problem in problems or []:
            note(f"jitllm: {one_line(f'{model}: {problem}')}")
        return 1 if problems else 0


def _check(container: Container) -> list[str]:
    with Progress() as progress:
        return container.check(lambda done, total: progress("checking extents", done, total))


def _json(header: Header, problems: list[str] | None) -> dict[str, Any]:
    checked = {} if problems is None else {"problems": problems}
    return {
        "arch": header.arch,
        "blocks": len(header.blocks),
        "experts": len(header.experts),
        **_sizes(header),
        "bytes_per_token": report.weight_bytes_per_token(header),
        "weight_types": weight_types(header),
        "context_length": header.config.get("context_length"),
        "vocabulary": len(header.vocabulary.get("types", b"")),
        "chat_templates": sorted(header.chat_templates),
        "stop_ids": header.stop_ids,
        "fingerprint": header.fingerprint,
        "format_version": header.version,
        "config": header.config,
        **checked,
    }


def _sizes(header: Header) -> dict[str, int]:
    lengths = [extent.length for extent in header.blocks]
    return {
        "dense_bytes": header.dense.length,
        "block_bytes": sum(lengths),
        "largest_block_bytes": max(lengths, default=0),
        "expert_bytes": sum(expert.extent.length for expert in header.experts),
        "largest_expert_bytes": max((e.extent.length for e in header.experts), default=0),
    }


def weight_types(header: Header) -> dict[str, dict[str, int]]:
    """How many tensors and bytes there are of each weight format, the largest first."""
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry in header.tensors:
        tensors[entry.format.name] += 1
        sizes[entry.format.name] += entry.size_bytes * max(entry.experts, 1)
    return {name: {"tensors": tensors[name], "bytes": size} for name, size in sizes.most_common()}


def _rows(container: Container) -> dict[str, str]:
    header, config, sizes = container.header, container.header.config, _sizes(container.header)
    heads = config.get("attention.head_count", "?")
    return {
        "file": one_line(str(container.path)),
        "format": f"container of version {header.version}",
        "architecture": one_line(header.arch),
        "blocks": f"{len(header.blocks)}, together {format_size(sizes['block_bytes'])}, "
        f"the largest {format_size(sizes['largest_block_bytes'])}",
        **_experts(header, sizes),
        "always held": f"{format_size(sizes['dense_bytes'])} (embeddings, head, norms)",
        "per token": f"{format_size(report.weight_bytes_per_token(header))} of weights",
        "width": _shown(config.get("embedding_length", "?")),
        "heads": f"{_shown(heads)}, KV {_shown(config.get('attention.head_count_kv', heads))}, "
        f"of {_shown(_head_width(header))}",
        "feed-forward": _shown(config.get("feed_forward_length", "?")),
        "context": f"{_shown(config.get('context_length', '?'))} tokens",
        "vocabulary": counted(len(header.vocabulary.get("types", b"")), "token"),
        "chat templates": one_line(", ".join(sorted(header.chat_templates)))
        or "none: a base model",
        "stop ids": ", ".join(map(str, header.stop_ids)) or "none",
        **dict(_print(name, value) for name, value in header.fingerprint.items()),
    }


def _experts(header: Header, sizes: dict[str, int]) -> dict[str, str]:
    """A line for a mixture."""
    if not header.experts:
        return {}
    num_blocks = len({expert.block for expert in header.experts})
    return {
        "experts": f"{len(header.experts)} in {counted(num_blocks, 'block')}, "
        f"{_shown(header.config.get('expert_used_count', '?'))} a token and block, "
        f"together {format_size(sizes['expert_bytes'])}, "
        f"the largest {format_size(sizes['largest_expert_bytes'])}"
    }


def _print(name: str, value: str | int) -> tuple[str, str]:
    """An entry of the fingerprint, for people."""
    if name.endswith("_bytes") and isinstance(value, int):
        return name.removesuffix("_bytes") + " size", format_size(value)
    return name.replace("_", " "), _shown(value)


def _head_width(header: Header) -> object:
    """What the source says, or else its width divided by its heads."""
    config = header.config
    width, heads = config.get("embedding_length"), config.get("attention.head_count")
    if isinstance(width, int) and isinstance(heads, int) and heads > 0:
        return config.get("attention.key_length", width // heads)
    return config.get("attention.key_length", "?")


def _types(header: Header) -> dict[str, str]:
    types = weight_types(header)
    total = sum(kind["bytes"] for kind in types.values()) or 1
    return {
        name: f"{kind['tensors']:5} tensors  {format_size(kind['bytes']):>10}  "
        f"{100 * kind['bytes'] / total:5.1f} %"
        for name, kind in types.items()
    }


def _shown(value: object) -> str:
    text = one_line(str(value))
    return text if len(text) <= 200 else f"{text[:200]}..."


command = verb(info, EXAMPLES)
