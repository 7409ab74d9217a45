"""`jitllm convert`: a model file becomes a container."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jitllm.cli.command import AsJson, verb
from jitllm.cli.progress import Progress
from jitllm.cli.screen import note, print_json, say, table
from jitllm.errors import one_line
from jitllm.units import counted, format_duration, format_rate, format_size

if TYPE_CHECKING:
    from jitllm.formats.convert import Plan, Report

EXAMPLES = """
    jitllm convert model.gguf                       (writes model.jlm beside it)
    jitllm convert model-00001-of-00003.gguf big.jlm
    jitllm convert model.gguf -plan                 (sizes only, writes nothing)
    jitllm convert base.gguf chat.jlm -chat-template tokenizer_config.json -stop-id 107
"""

_PART = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE.gguf", help="A GGUF file, or any part of a split one.")
    ],
    out: Annotated[
        Path | None,
        typer.Argument(metavar="OUT.jlm", help="The container; default: beside the source."),
    ] = None,
    *,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            "-chat-template",
            metavar="FILE",
            help="A template, tokenizer_config.json or chat_template.json, or a folder with one; "
            "takes the place of the source's.",
            show_default=False,
        ),
    ] = None,
    stop_id: Annotated[
        list[int] | None,
        typer.Option(
            "-stop-id", metavar="N", help="A token that ends a reply too; may be repeated."
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("-plan", help="Report sizes and what would be refused; write nothing.")
    ] = False,
    json: AsJson = False,
) -> int:
    """Convert a GGUF file to a container.

    It holds the same weights, laid out for paging, with tokenizer and chat templates. Nothing is
    lost and nothing is computed. What stood at OUT.jlm stays until its successor is complete. A
    conversion that was interrupted goes on where it stopped when it is started again.
    """
    from jitllm.formats import convert as conversion
    from jitllm.text.tokenizer import VocabularyData

    wanted: dict[str, Any] = {
        "read_vocabulary": VocabularyData.from_gguf,
        "chat_template": _template(chat_template),
        "stop_ids": tuple(stop_id or ()),
    }
    if plan:
        return _show_plan(conversion.plan(source, **wanted), json)
    dest = out or default_output(source)
    with Progress() as progress:
        result = conversion.convert(
            source, dest, **wanted, progress=_labelled(progress, "converting")
        )
    for line in _report(result):
        note(line)
    if json:
        print_json(
            {
                **_json(result.plan),
                "output": str(dest),
                "seconds": result.seconds,
                "resumed_bytes": _resumed_bytes(result),
            }
        )
    return 0


def default_output(source: Path) -> Path:
    """`model.jlm` for `model.gguf`, and for every part of a split one."""
    return source.with_name(_PART.sub("", source.stem) + ".jlm")


def _template(path: Path | None) -> str | None:
    """The source of the default template in a file; raises what is wrong with it."""
    if path is None:
        return None
    from jitllm.text.chat import ChatTemplate, read_templates

    templates = read_templates(path)
    source = templates.get("default") or next(iter(templates.values()))
    ChatTemplate(source)
    return source


def _labelled(progress: Progress, label: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(label, done, total)


def _show_plan(plan: Plan, json: bool) -> int:
    if json:
        print_json(_json(plan))
        return 0
    header, blocks = plan.header, plan.block_bytes
    rows = {
        "source": one_line(str(plan.source)),
        "architecture": one_line(header.arch),
        "container": format_size(plan.file_bytes),
        "always held": format_size(plan.dense_bytes),
        "blocks": f"{len(blocks)}, together {format_size(sum(blocks))}, "
        f"the largest {format_size(max(blocks, default=0))}",
        **({"experts": _experts(plan)} if header.experts else {}),
        "tensors": str(len(header.tensors)),
        "chat templates": _templates(plan),
        "stop ids": ", ".join(map(str, header.stop_ids)) or "none",
    }
    types = {
        name: f"{counted(count.num_tensors, 'tensor')}, {format_size(count.size_bytes)}"
        for name, count in plan.weight_types.items()
    }
    say(f"{table(rows)}\n\n{table(types)}\n")
    return 0


def _report(result: Report) -> list[str]:
    plan = result.plan
    source_bytes = int(plan.header.fingerprint.get("source_bytes", 0))
    written = plan.file_bytes - _resumed_bytes(result)
    lines = [
        f"{one_line(str(plan.source))} -> {one_line(str(result.path))}",
        f"{format_size(source_bytes)} -> {format_size(plan.file_bytes)} "
        f"({100 * plan.file_bytes / max(source_bytes, 1):.1f} %) in "
        f"{format_duration(result.seconds)} ({format_rate(written / max(result.seconds, 1e-9))})",
        f"{counted(len(plan.block_bytes), 'block')}, the largest "
        f"{format_size(max(plan.block_bytes, default=0))}; "
        f"{format_size(plan.dense_bytes)} always held",
        *([f"experts: {_experts(plan)}"] if plan.header.experts else []),
        f"chat templates: {_templates(plan)}",
    ]
    if resumed_bytes := _resumed_bytes(result):
        lines.append(f"an earlier attempt had written {format_size(resumed_bytes)}")
    return lines


def _resumed_bytes(result: Report) -> int:
    """What an earlier attempt had written; the room for the header is nothing of it."""
    start = result.plan.header.dense.offset
    return result.resumed_bytes if result.resumed_bytes > start else 0


def _experts(plan: Plan) -> str:
    return f"{len(plan.header.experts)}, together {format_size(plan.expert_bytes)}"


def _templates(plan: Plan) -> str:
    return one_line(", ".join(sorted(plan.header.chat_templates))) or "none: a base model"


def _json(plan: Plan) -> dict[str, Any]:
    return {
        "source": str(plan.source),
        "arch": plan.header.arch,
        "file_bytes": plan.file_bytes,
        "source_bytes": plan.header.fingerprint.get("source_bytes"),
        "dense_bytes": plan.dense_bytes,
        "blocks": len(plan.block_bytes),
        "block_bytes": sum(plan.block_bytes),
        "largest_block_bytes": max(plan.block_bytes, default=0),
        "experts": len(plan.header.experts),
        "expert_bytes": plan.expert_bytes,
        "weight_types": {
            name: {"tensors": count.num_tensors, "bytes": count.size_bytes}
            for name, count in plan.weight_types.items()
        },
        "chat_templates": sorted(plan.header.chat_templates),
        "stop_ids": plan.header.stop_ids,
    }


command = verb(convert, EXAMPLES)
