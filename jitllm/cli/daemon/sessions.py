"""`jitllmd sessions`: the requests that a server works on; cancel one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jitllm.cli.command import AsJson, verb
from jitllm.cli.daemon.remote import DEFAULT_ADDRESS, Address, ApiKey, Server, at
from jitllm.cli.daemon.tables import columns
from jitllm.cli.screen import print_json, say
from jitllm.errors import UsageError
from jitllm.units import format_duration

EXAMPLES = """
    jitllmd sessions
    jitllmd sessions -model gemma
    jitllmd sessions -cancel chatcmpl-1f0c...
"""


def sessions(
    session: Annotated[str | None, typer.Argument(metavar="ID", show_default=False)] = None,
    *,
    model: Annotated[
        str | None, typer.Option("-model", metavar="ID", help="Only those of this model.")
    ] = None,
    cancel: Annotated[
        str | None,
        typer.Option("-cancel", metavar="ID", help="End this request; its client gets the rest."),
    ] = None,
    addr: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    json: AsJson = False,
) -> int:
    """List the requests under way, describe one, or cancel one.

    The id is that of the reply, or what the client sent as x-request-id.
    """
    if session is not None and cancel is not None:
        raise UsageError("ID and -cancel are different things", "give one of them")
    server = Server(addr, api_key)
    if cancel is not None:
        done = server.post(at("sessions", cancel, "cancel"))
        print_json(done) if json else say(f"cancelled {done['id']}\n")
        return 0
    if session is not None:
        found = server.get(at("sessions", session))
        print_json(found) if json else say(_list([found]))
        return 0
    listed = server.get("sessions", model=model)
    print_json(listed) if json else say(_list(listed["sessions"]))
    return 0


def _list(sessions: list[dict[str, Any]]) -> str:
    return columns(
        ("ID", "MODEL", "STATE", "AGE", "PROMPT", "GENERATED", "CLIENT"),
        [
            (s["id"], s["model"], s["state"], format_duration(s["age_s"]))
            + (sum(q["prompt_tokens"] for q in s["sequences"]),)
            + (sum(q["generated_tokens"] for q in s["sequences"]), s["client"])
            for s in sessions
        ],
    )


command = verb(sessions, EXAMPLES)
