"""`jitllmd place`: where the blocks of a model are, and what changes it while it works."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jitllm.cli.command import AsJson, verb
from jitllm.cli.daemon.remote import DEFAULT_ADDRESS, Address, ApiKey, Server, at
from jitllm.cli.daemon.report import device_lines, move_line, moves_line, pages_lines
from jitllm.cli.daemon.tables import columns
from jitllm.cli.screen import print_json, say
from jitllm.errors import UsageError, one_line
from jitllm.schedule.placement_map import parse_blocks, parse_map
from jitllm.units import format_size, parse_size

EXAMPLES = """
    jitllmd place -model gemma                   (where its blocks are)
    jitllmd place -session chatcmpl-1f0c...      (the same, of the model that answers it)
    jitllmd place -model gemma -move 0:9 -to cpu:1
    jitllmd place -model gemma -move 3,5-7,head -to host
    jitllmd place -model gemma -placement "0-8=cpu:0,*=cpu:1!" -strict
    jitllmd place -model gemma -maxmem 200M
"""


def place(
    *,
    model: Annotated[
        str | None, typer.Option("-model", metavar="ID", help="The model.", show_default=False)
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            "-session", metavar="ID", help="The model of this request.", show_default=False
        ),
    ] = None,
    move: Annotated[
        str | None,
        typer.Option(
            "-move",
            metavar="BLOCKS",
            help="Move these; with -to. A:B leaves out B, A-B does not; N, head, or several with "
            "commas.",
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option("-to", metavar="DEVICE", help="Where -move goes: cpu:1, or host.")
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            "-placement",
            metavar="MAP",
            help="Go from the present placement to this one, written as for `serve`; what it does "
            "not name stays.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("-strict", help="All of -placement, or nothing of it.")
    ] = False,
    maxmem: Annotated[
        str | None, typer.Option("-maxmem", metavar="SIZE", help="Its budget from now on.")
    ] = None,
    addr: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    json: AsJson = False,
) -> int:
    """Show where a model's blocks are, move some, or change the memory that it may take.

    Replies go on meanwhile, and stay the same. A move is answered when it is done.
    """
    body = _asked(move, to, placement, strict, maxmem)
    if (model is None) == (session is None):
        raise UsageError("which model?", "give one of -model and -session")
    server = Server(addr, api_key)
    if session is not None:
        model = str(server.get(at("sessions", session))["model"])
    path = at("models", model or "", "placement")
    found = server.post(path, body) if body else server.get(path)
    print_json(found) if json else say(describe(found))
    return 0


def describe(found: dict[str, Any]) -> str:
    """What moved, and where everything is."""
    lines = (
        *map(move_line, found["moved"]),
        *pages_lines(found),
        f"placement {found['placement']}   epoch {found['epoch']}",
        *_runs(found).splitlines(),
        *device_lines(found["devices"]),
        *moves_line(found),
        *(one_line(f"* not so: {d['what']}: {d['reason']}") for d in found["declines"]),
        *(f"* LOST {name}: others compute its blocks" for name in found["lost"]),
    )
    return "".join(f"{line}\n" for line in lines)


def _runs(found: dict[str, Any]) -> str:
    return columns(
        ("BLOCKS", "DEVICE", "WEIGHTS", ""),
        [
            (
                run["what"],
                run["device"],
                format_size(run["weight_bytes"]),
                " ".join(
                    [*(mark for mark in ("pinned", "streamed") if run[mark]), run["experts"]]
                ).rstrip(),
            )
            for run in found["runs"]
        ],
    )


def _asked(
    move: str | None, to: str | None, placement: str | None, strict: bool, maxmem: str | None
) -> dict[str, Any]:
    """The body of a request; empty for a report. Raises UsageError for what cannot be meant."""
    if sum(given is not None for given in (move, placement, maxmem)) > 1:
        raise UsageError("-move, -placement and -maxmem are different things", "give one of them")
    if (move is None) != (to is None):
        given, missing = ("-move", "-to") if to is None else ("-to", "-move")
        raise UsageError(f"{given} needs {missing}", "write -move 0:9 -to cpu:1")
    if strict and placement is None:
        raise UsageError("-strict is about a -placement", "give one, or leave it out")
    if move is not None:
        parse_blocks(move)
        return {"move": {"blocks": move, "to": to}}
    if placement is not None:
        parse_map(placement)
        return {"placement": placement, "strict": strict}
    return {} if maxmem is None else {"maxmem": parse_size(maxmem, "-maxmem")}


command = verb(place, EXAMPLES)
