"""`jitllm`: finds the verb, runs it, and turns whatever happens into an exit code.

0 is success, 1 a failure, 2 a command line that means nothing, 130 Ctrl-C. A failure is one line
on stderr; with -debug or $JITLLM_DEBUG its traceback stands before it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
    "score",
    "cache",
    "convert",
    "version",
)
"""A module of this package for each, in the order of `jitllm -help`."""

_ALIASES = {"-version": "version", "--version": "version", "help": "-help", "--help": "-help"}


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (by default the process's) and return its exit code."""
    args = list(sys.argv[1:] if args is None else args)
    if args:
        args[0] = _ALIASES.get(args[0], args[0])
    log.to_stderr()
    _never_fail_to_print()
    try:
        code = _program(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        leave_the_pipe()
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except JitllmError as error:
        return _fail(str(error), error.exit_code)
    except Exception as error:
        return _fail(*_explained(error))


def _program(args: list[str]) -> int:
    program = typer.Typer(
        name="jitllm",
        cls=Group,
        help="Run large language models, paged from disk under a memory budget.",
        epilog="jitllm VERB -help explains a verb and shows examples.",
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": HELP_FLAGS, "max_content_width": 100},
    )
    program.callback()(lambda: None)
    chosen = args[0] if args else ""
    for name in (chosen,) if chosen in VERBS else VERBS:
        function = import_module(f"jitllm.cli.{name}").command
        program.command(
            name,
            cls=Command,
            epilog=function.examples,
            context_settings={"help_option_names": HELP_FLAGS},
        )(function)
    if not args:
        print(_usage(), file=sys.stderr)
        return 2
    return int(program(args, prog_name="jitllm", standalone_mode=False) or 0)


def _usage() -> str:
    return (
        "usage: jitllm VERB [FLAGS] ...\n"
        f"verbs: {', '.join(VERBS)}\n"
        "jitllm -help says what they do, jitllm VERB -help how"
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


def _fail(message: str, code: int) -> int:
    try:
        sys.stdout.flush()
        print(f"jitllm: {one_line(message)}", file=sys.stderr, flush=True)
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
