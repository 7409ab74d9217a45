"""`jitllmd place`: how much memory a model may take, while it works."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jitllm.cli.command import AsJson, verb
from jitllm.cli.daemon.remote import DEFAULT_ADDRESS, Address, ApiKey, Server, at
from jitllm.cli.screen import print_json, say
from jitllm.units import format_size, parse_size

EXAMPLES = """
    jitllmd place -model gemma                   (where its blocks are)
    jitllmd place -model gemma -maxmem 200M
"""


def place(
    *,
    model: Annotated[str, typer.Option("-model", metavar="ID", help="The model.")],
    maxmem: Annotated[
        str | None, typer.Option("-maxmem", metavar="SIZE", help="Its budget from now on.")
    ] = None,
    addr: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    json: AsJson = False,
) -> int:
    """Show where a model's blocks are, or change the memory that it may take.

    A budget takes effect between two tokens; replies go on, and stay the same.
    """
    server, path = Server(addr, api_key), at("models", model, "placement")
    if maxmem is None:
        placement = server.get(path)
    else:
        placement = server.post(path, {"maxmem": parse_size(maxmem, "-maxmem")})
    print_json(placement) if json else say(describe(placement))
    return 0


def describe(placement: dict[str, Any]) -> str:
    """A placement in a few lines."""
    pages = placement["pages"]
    lines = [
        f"{placement['id']}   budget {format_size(pages['budget_bytes'])}   "
        f"always held {format_size(pages['fixed_bytes'])}   "
        f"frames {pages['frames']} of {pages['blocks']} blocks   "
        f"{'FITS' if placement['fits'] else 'PAGES'}",
        f"resident {pages['resident']}   page-ins {pages['page_ins']}   "
        f"evictions {pages['evictions']}   read {format_size(pages['bytes_read'])}",
    ]
    if pages["over_budget_bytes"] > 0:
        lines.append(f"* OVER BUDGET by {format_size(pages['over_budget_bytes'])}")
    return "".join(line + "\n" for line in lines)


command = verb(place, EXAMPLES)
