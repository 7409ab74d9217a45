"""`jitllmd sessions`: the requests that a server works on; cancel, park or resume one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jitllm.cli.command import AsJson, verb
from jitllm.cli.daemon.remote import DEFAULT_ADDRESS, Address, ApiKey, Server, at
from jitllm.cli.daemon.tables import columns
from jitllm.cli.screen import print_json, say
from jitllm.errors import UsageError
from jitllm.units import format_duration, format_size

EXAMPLES = """
    jitllmd sessions
    jitllmd sessions -model gemma
    jitllmd sessions -cancel chatcmpl-1f0c...
    jitllmd sessions -park chatcmpl-1f0c...             (its keys and values go to disk)
    jitllmd sessions -park chatcmpl-1f0c... -to memory
    jitllmd sessions -resume chatcmpl-1f0c...
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
    park: Annotated[
        str | None,
        typer.Option(
            "-park",
            metavar="ID",
            help="Let this request wait, its keys and values off the devices; its stream pauses.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("-to", metavar="PLACE", help="With -park: disk or memory; default: disk."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "-resume", metavar="ID", help="Let this request go on; nothing is computed again."
        ),
    ] = None,
    addr: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    json: AsJson = False,
) -> int:
    """List the requests under way, describe one, or cancel, park or resume one.

    The id is that of the reply, or what the client sent as x-request-id.
    """
    asked = {"ID": session, "-cancel": cancel, "-park": park, "-resume": resume}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are different things", "give one of them")
    if to not in (None, "disk", "memory"):
        raise UsageError(f"-to {to!r} is no place", "choose disk or memory")
    if to is not None and park is None:
        raise UsageError("-to is about a -park", "give one, or leave it out")
    server = Server(addr, api_key)
    if park is not None:
        return _told(server.post(at("sessions", park, "park"), {"to": to}), json)
    if resume is not None:
        return _told(server.post(at("sessions", resume, "resume")), json)
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


def _told(found: dict[str, Any], json: bool) -> int:
    """What became of a request that was parked or resumed."""
    print_json(found) if json else say(_list([found]))
    return 0


def _list(sessions: list[dict[str, Any]]) -> str:
    return columns(
        ("ID", "MODEL", "STATE", "AGE", "PROMPT", "GENERATED", "KV", "PARKED", "CLIENT"),
        [
            (s["id"], s["model"], s["state"], format_duration(s["age_s"]))
            + (sum(q["prompt_tokens"] for q in s["sequences"]),)
            + (sum(q["generated_tokens"] for q in s["sequences"]), format_size(s["kv_bytes"]))
            + (f"{format_size(s['parked_bytes'])} {s['parked_in']}".strip(), s["client"])
            for s in sessions
        ],
    )


command = verb(sessions, EXAMPLES)
