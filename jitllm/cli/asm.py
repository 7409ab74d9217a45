"""`jitllm asm`: the machine code of a kernel.

Knows that an op is a folder with a `cpu.py`, and asks its `emit` what it is emitted for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from jitllm.cli.command import AsJson, verb
from jitllm.cli.screen import note, print_json, say, table
from jitllm.errors import UsageError
from jitllm.kernels.layout import FORMATS
from jitllm.units import counted

Parameters = dict[str, Any]
"""What a kernel is emitted for: names and types, or names and values."""

FORMAT_CHOICES: dict[str, tuple[str, ...]] = {
    "format": tuple(form.name for form in FORMATS.values()),
    "kv_element": ("f16", "f32", "q8_0"),
    "activation": ("silu", "gelu"),
    "score": ("softmax", "sigmoid"),
    "role": ("run", "worker"),
}
"""Parameters that the word after the op may set, and what it may be."""

SHAPE: Parameters = {
    "heads": 4,
    "kv_heads": 1,
    "item_heads": 2,
    "k_dim": 256,
    "v_dim": 256,
    "head_dim": 256,
    "num_rotated": 256,
    "num_frequencies": 128,
    "page_tokens": 64,
    "num_scales": 0,
    "scale_positions": 1,
    "scale": 0.0625,
    "softcap": 0.0,
    "q_stride": 4096,
    "dst_stride": 4096,
    "carry_stride": 128,
    "x_stride": 4096,
    "k_stride": 1024,
    "v_stride": 1024,
    "table_stride": 1024,
    "stride_bytes": 1024,
}
"""Where nobody says otherwise: the shapes of Gemma 3 270M. Flags are off."""

_INSTRUCTION = re.compile(r"^\t[a-z]", re.MULTILINE)

EXAMPLES = """
    jitllm asm                                 (ops and formats)
    jitllm asm matmul Q4_K
    jitllm asm matmul Q8_0 -tier avx2
    jitllm asm matmul Q6_K -tier neon-dotprod  (also of a tier that this processor lacks)
    jitllm asm attention f16 k_dim=128 v_dim=128 windowed=true
"""


def asm(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="OP [FORMAT] [NAME=VALUE]", show_default=False),
    ] = None,
    *,
    tier: Annotated[
        str,
        typer.Option("-tier", metavar="TIER", help="auto, or one that `jitllm hardware` lists."),
    ] = "auto",
    json: AsJson = False,
) -> None:
    """Show the machine code of a kernel.

    A kernel is an op, the format of its weights or elements, and what else it is emitted for.
    Without any of them, all ops are listed with what they take.
    """
    if not words:
        known = {op: _choices(op) for op in ops()}
        if json:
            print_json({"ops": known})
        else:
            say(table({op: _line(**choices) for op, choices in known.items()}) + "\n")
        return
    from jitllm.jit import tiers
    from jitllm.jit.cpu import Emitter
    from jitllm.kernels.op import KernelSpec

    op = words[0]
    spec = KernelSpec.of(op, **_params(op, words[1:]))
    chosen = tiers.choose() if tier == "auto" else tiers.named(tier)
    try:
        text = Emitter(chosen).assembly(spec)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError) as error:
        raise UsageError(f"there is no such {op}: {error}", "choose other values") from error
    num = len(_INSTRUCTION.findall(text))
    if json:
        params = dict(spec.params)
        report = {"op": op, "params": params, "tier": chosen.name, "instructions": num}
        print_json({**report, "assembly": text})
    else:
        note(f"{spec.symbol}   tier {chosen.name}   {counted(num, 'instruction')}")
        say(text)


def ops() -> list[str]:
    """Names of the ops that are emitted for CPUs."""
    import jitllm.kernels

    folder = Path(jitllm.kernels.__path__[0])
    return sorted(path.parent.name for path in folder.glob("*/cpu.py"))


def parameters(op: str) -> Parameters:
    """Names and types of what a kernel of `op` is emitted for."""
    emitter = import_module(f"jitllm.kernels.{op}.cpu")
    named = inspect.signature(emitter.emit, eval_str=True).parameters.values()
    if any(param.kind is param.VAR_KEYWORD for param in named):
        hints = get_type_hints(emitter.Shape)
        return {name: hints[name] for name in emitter.Shape.__dataclass_fields__}
    return {p.name: p.annotation for p in named if p.kind is p.KEYWORD_ONLY}


def _params(op: str, words: Sequence[str]) -> Parameters:
    """What `words` say of a kernel, and the rest as it is by default. Raises UsageError."""
    if op not in ops():
        near = get_close_matches(op, ops(), n=1)
        remedy = f"did you mean {near[0]}?" if near else f"choose {', '.join(ops())}"
        raise UsageError(f"there is no op {op!r}", remedy)
    kinds = parameters(op)
    given = dict(_setting(op, kinds, word) for word in words if "=" in word)
    formats = [word for word in words if "=" not in word]
    given |= _format(op, kinds, formats)
    default = {name: False for name, kind in kinds.items() if kind is bool}
    default |= {name: SHAPE[name] for name in kinds if name in SHAPE}
    found = default | given
    if absent := [name for name in kinds if name not in found]:
        raise UsageError(
            f"{op} needs {', '.join(absent)}", f"write {' '.join(f'{name}=...' for name in absent)}"
        )
    return found


def _format(op: str, kinds: Parameters, words: Sequence[str]) -> Parameters:
    """The parameter that the word after the op sets, if the op has one."""
    name = next((name for name in FORMAT_CHOICES if name in kinds), None)
    if name is None or len(words) > 1:
        surplus = words if name is None else words[1:]
        if surplus:
            raise UsageError(f"{op} takes no format {surplus[0]!r}", f"leave {surplus[0]!r} out")
        return {}
    choices = FORMAT_CHOICES[name]
    if not words:
        raise UsageError(f"{op} needs a {name}", f"choose {', '.join(choices)}")
    for choice in choices:
        if choice.lower() == words[0].lower():
            return {name: choice}
    raise UsageError(f"{op} has no {name} {words[0]!r}", f"choose {', '.join(choices)}")


def _setting(op: str, kinds: Parameters, word: str) -> tuple[str, Any]:
    name, _, text = word.partition("=")
    if name not in kinds or name in FORMAT_CHOICES:
        known = ", ".join(n for n in kinds if n not in FORMAT_CHOICES) or "nothing"
        raise UsageError(f"{op} has no {name!r} to set", f"it takes {known}")
    kind = kinds[name]
    flags = {"true": True, "false": False}
    try:
        value = flags[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise UsageError(f"{word!r} is no {kind.__name__}", f"write {name}=VALUE") from None
    return name, value


def _choices(op: str) -> dict[str, Any]:
    """What the word after an op may be, and what else may be set, with its default."""
    kinds = parameters(op)
    formats = [FORMAT_CHOICES[name] for name in kinds if name in FORMAT_CHOICES]
    settings = [name for name in kinds if name not in FORMAT_CHOICES]
    return {
        "formats": list(formats[0]) if formats else [],
        "settings": {name: SHAPE.get(name, False) for name in settings},
    }


def _line(formats: list[str], settings: Parameters) -> str:
    return " ".join(["|".join(formats), *(f"[{n}={v}]" for n, v in settings.items())]).strip()


command = verb(asm, EXAMPLES)
