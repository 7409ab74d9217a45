"""What makes a function a verb: its flags in both spellings, its help, its errors.

Knows Typer. Knows no verb. A flag is declared once, as `-flag`; `--flag` and `-flag=value` are
read as the same, before and after the positionals. What follows `--` is never a flag.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import wraps
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from jitllm.cli.screen import leave_the_pipe
from jitllm.errors import UsageError

DEBUG_VARIABLE = "JITLLM_DEBUG"

INTERRUPTED = 130
"""Exit code of what Ctrl-C ended."""

HELP_FLAGS = ("-help", "-h")

AsJson = Annotated[
    bool, typer.Option("-json", help="Print one JSON object instead of text.", show_default=False)
]
Debug = Annotated[
    bool, typer.Option("-debug", help="Show the traceback of a failure.", show_default=False)
]


class Command(TyperCommand):
    """A verb whose flags may be spelled with one dash or two."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {name: param for param in self.get_params(ctx) for name in param.opts}
        flags = {name: param for name, param in flags.items() if name.startswith("-")}
        return list(super().parse_args(ctx, list(_spelled(args, flags, ctx.command_path))))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Our own words for arguments: releases of Typer differ in what they put around them."""
        pieces = [self.options_metavar or ""]
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                name = param.metavar or str(param.name)
                name += "..." if param.nargs != 1 and "..." not in name else ""
                pieces.append(name if param.required or name.startswith("[") else f"[{name}]")
        return pieces

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Examples as they were written; Typer would wrap them into a paragraph."""
        if self.epilog:
            formatter.write_paragraph()
            formatter.write("Examples:\n")
            for line in inspect.cleandoc(self.epilog).splitlines():
                formatter.write(f"  {line}".rstrip() + "\n")


class Group(TyperGroup):
    """The program: refuses what is no verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[0].startswith("-") and args[0] not in HELP_FLAGS:
            raise UsageError(
                f"{ctx.command_path} has no flag {args[0]} before a verb",
                f"see {ctx.command_path} -help",
            )
        return list(super().parse_args(ctx, args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise UsageError(
                f"there is no verb {args[0]!r}",
                _nearest(args[0], self.commands) or f"choose {', '.join(self.commands)}",
            )
        return super().resolve_command(ctx, args)


def verb(function: Callable[..., int | None], examples: str) -> Callable[..., int]:
    """`function` with `-debug` added, ready to be registered; returns its exit code."""

    @wraps(function)
    def run(debug: bool = False, **arguments: Any) -> int:
        try:
            return function(**arguments) or 0
        except BrokenPipeError:  # the reader has what it wanted
            leave_the_pipe()
            return 0
        except Exception:
            if debug or os.environ.get(DEBUG_VARIABLE):
                traceback.print_exc()
            raise

    set_signature(run, [*parameters(function), option("debug", Debug, False)])
    run.__doc__ = function.__doc__
    run.examples = examples  # type: ignore[attr-defined]
    return run


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Parameters of `function` with their annotations evaluated."""
    return list(inspect.signature(function, eval_str=True).parameters.values())


def option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A keyword parameter."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def set_signature(function: Any, params: list[inspect.Parameter]) -> None:
    """Make `function` look as if it had been written with `params`."""
    params = [param.replace(kind=inspect.Parameter.KEYWORD_ONLY) for param in params]
    function.__signature__ = inspect.Signature(params)
    function.__annotations__ = {param.name: param.annotation for param in params}


def _spelled(args: list[str], flags: dict[str, Any], command_path: str) -> Iterator[str]:
    """`args` with every flag in the spelling of its declaration, apart from its value."""
    rest = iter(args)
    for arg in rest:
        if arg == "--":
            yield arg
            yield from rest
        elif not arg.startswith("-") or arg == "-":
            yield arg
        else:
            name, equals, value = arg.partition("=")
            flag = _declared(name, flags, command_path)
            takes_value = not getattr(flags[flag], "is_flag", False)
            if equals and not takes_value:
                raise UsageError(f"{flag} takes no value", f"write {flag} alone")
            yield flag
            if equals:
                yield value
            elif takes_value:
                yield from _value(flag, rest)


def _declared(name: str, flags: dict[str, Any], command_path: str) -> str:
    flag = "-" + name.lstrip("-")
    if flag not in flags or name.startswith("---"):
        raise UsageError(
            f"{command_path.rpartition(' ')[2]} has no flag {name}",
            _nearest(flag, flags)
            or f"see {command_path} -help; text that begins with a dash goes after --",
        )
    return flag


def _value(flag: str, rest: Iterator[str]) -> Iterator[str]:
    value = next(rest, None)
    if value is None:
        raise UsageError(f"{flag} needs a value", f"write {flag} VALUE")
    yield value


def _nearest(name: str, names: Any) -> str:
    close = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""
