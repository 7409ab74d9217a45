"""`jitllm cache`: the compiled kernels on disk."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from jitllm.cli.command import AsJson, verb
from jitllm.cli.screen import print_json, say
from jitllm.units import counted, format_size

EXAMPLES = """
    jitllm cache              (where it is and how large)
    jitllm cache clear        (the next start compiles again)
"""


class Action(StrEnum):
    """What is done with the cache."""

    SIZE = "size"
    CLEAR = "clear"


def cache(
    action: Annotated[
        Action, typer.Argument(metavar="[size|clear]", help="Show the size, or remove everything.")
    ] = Action.SIZE,
    *,
    json: AsJson = False,
) -> int:
    """Show or clear the cache of compiled kernels.

    It only saves compiling: what is in it depends on the processor, the compiler and the model's
    shapes, and an entry that does not fit is never used.
    """
    from jitllm.jit.cache import ObjectCache, default_directory

    objects = ObjectCache(default_directory())
    where = objects.directory or "no directory: set $XDG_CACHE_HOME"
    num_entries, size_bytes = len(objects.entries()), objects.size_bytes()
    num_removed = objects.clear() if action is Action.CLEAR else 0
    if json:
        print_json(
            {
                "directory": None if objects.directory is None else str(objects.directory),
                "entries": num_entries - num_removed,
                "bytes": objects.size_bytes(),
                "removed": num_removed,
            }
        )
    elif action is Action.CLEAR:
        say(f"removed {counted(num_removed, 'kernel')}, {format_size(size_bytes)}, from {where}\n")
    else:
        say(f"{counted(num_entries, 'kernel')}, {format_size(size_bytes)}, in {where}\n")
    return 0


command = verb(cache, EXAMPLES)
