"""`jitllm`: finds the verb, runs it, and turns whatever happens into an exit code.

`jitllmd` is another program of the same kind.

0 is success, 1 a failure, 2 a command line that means nothing, 130 Ctrl-C. A failure is one line
on stderr; with -debug or $JITLLM_DEBUG its traceback stands before it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import typer

from jitllm import log
from jitllm.cli.command import HELP_FLAGS, INTERRUPTED, Command, Group
from jitllm.cli.screen import leave_the_pipe
from jitllm.errors import JitllmError, one_line

VERBS = (
    "run",
    "info",
    "tokenize",
    "hardware",
    "speed",
    "batch",
    "score",
    "verify",
    "asm",
    "cache",
    "convert",
    "version",
)
"""A module of this package for each, in the order of `jitllm -help`."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program and its verbs: a module of `package` for each, in the order of -help."""

    name: str
    package: str
    verbs: tuple[str, ...]
    help: str


JITLLM = Program(
    "jitllm",
    "jitllm.cli",
    VERBS,
    "Run large language models, paged from disk under a memory budget.",
)

_ALIASES = {"-version": "version", "--version": "version", "--help": "-help"}


def main(args: Sequence[str] | None = None, program: Program = JITLLM) -> int:
    """Run the command line `args` (by default the process's) and return its exit code."""
    args = list(sys.argv[1:] if args is None else args)
    if args[:1] == ["help"]:
        args = [*args[1:2], "-help"]
    if args:
        args[0] = _ALIASES.get(args[0], args[0])
    log.to_stderr()
    _never_fail_to_print()
    try:
        code = _run(program, args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        leave_the_pipe()
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except JitllmError as error:
        return _fail(program, str(error), error.exit_code)
    except Exception as error:
        return _fail(program, *_explained(error))


def _run(program: Program, args: list[str]) -> int:
    parser = typer.Typer(
        name=program.name,
        cls=Group,
        help=program.help,
        epilog=f"{program.name} VERB -help explains a verb and shows examples.",
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": HELP_FLAGS, "max_content_width": 100},
    )
    parser.callback()(lambda: None)
    chosen = args[0] if args else ""
    for name in (chosen,) if chosen in program.verbs else program.verbs:
        function = import_module(f"{program.package}.{name}").command
        parser.command(
            name,
            cls=Command,
            epilog=function.examples,
            context_settings={"help_option_names": HELP_FLAGS},
        )(function)
    if not args:
        print(_usage(program), file=sys.stderr)
        return 2
    return int(parser(args, prog_name=program.name, standalone_mode=False) or 0)


def _usage(program: Program) -> str:
    name = program.name
    return (
        f"usage: {name} VERB [FLAGS] ...\n"
        f"verbs: {', '.join(program.verbs)}\n"
        f"{name} -help says what they do, {name} VERB -help how"
    )


def _explained(error: Exception) -> tuple[str, int]:
    """Message and exit code of an exception that is not ours."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # the parser's
        return error.format_message().rstrip("."), int(error.exit_code)
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror}", 1
    if isinstance(error, MemoryError):
        return "out of memory; lower -maxmem or -ctx", 1
    return f"{type(error).__name__}: {error} (a bug: JITLLM_DEBUG=1 shows where)", 1


def _fail(program: Program, message: str, code: int) -> int:
    try:
        sys.stdout.flush()
        print(f"{program.name}: {one_line(message)}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        leave_the_pipe()
    return code


def _never_fail_to_print() -> None:
    """A terminal that lacks a character shows its escape."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
