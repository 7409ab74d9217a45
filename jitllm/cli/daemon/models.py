"""`jitllmd models`: what a server has loaded; load and unload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jitllm.cli.command import AsJson, verb
from jitllm.cli.daemon.remote import DEFAULT_ADDRESS, Address, ApiKey, Server, at
from jitllm.cli.daemon.tables import columns
from jitllm.cli.screen import print_json, say, table
from jitllm.errors import UsageError
from jitllm.units import counted, format_size

EXAMPLES = """
    jitllmd models
    jitllmd models gemma                         (one of them)
    jitllmd models -load model.jlm -id small -maxmem 2G
    jitllmd models -unload small -force
    jitllmd models -drain small                  (no more requests, whoever has it)
"""


def models(
    model: Annotated[str | None, typer.Argument(metavar="ID", show_default=False)] = None,
    *,
    load: Annotated[
        Path | None, typer.Option("-load", metavar="MODEL.jlm", help="Load this container.")
    ] = None,
    id: Annotated[
        str | None, typer.Option("-id", metavar="NAME", help="What to call it; with -load.")
    ] = None,
    maxmem: Annotated[
        str | None, typer.Option("-maxmem", metavar="SIZE", help="Its own budget; with -load.")
    ] = None,
    ctx: Annotated[
        int | None, typer.Option("-ctx", metavar="N", help="Its longest history; with -load.")
    ] = None,
    unload: Annotated[
        str | None, typer.Option("-unload", metavar="ID", help="Give this model's memory back.")
    ] = None,
    force: Annotated[
        bool, typer.Option("-force", help="End its requests first; with -unload.")
    ] = False,
    drain: Annotated[
        str | None,
        typer.Option("-drain", metavar="ID", help="Let this model take no more requests."),
    ] = None,
    undrain: Annotated[
        str | None, typer.Option("-undrain", metavar="ID", help="Let it take requests again.")
    ] = None,
    addr: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    json: AsJson = False,
) -> int:
    """List the models of a server, and of the cluster that it is in; describe, load or unload one.

    The path after -load is the server's: it opens the file. A model that drains goes on with its
    requests and takes no more, also from others on the cluster; -drain may name one of theirs.
    """
    if sum(given is not None for given in (model, load, unload, drain, undrain)) > 1:
        raise UsageError("ID, -load, -unload and -drain are different things", "give one of them")
    server = Server(addr, api_key)
    if load is not None:
        asked = {"path": str(load.resolve()), "id": id, "maxmem": maxmem, "ctx": ctx}
        _show(server.post("models", {k: v for k, v in asked.items() if v is not None}), json)
    elif unload is not None:
        done = server.delete(at("models", unload), force=str(force).lower())
        print_json(done) if json else say(f"unloaded {done['id']}\n")
    elif drained := drain or undrain:
        done = server.post(at("models", drained, "drain"), {"draining": drain is not None})
        does = "takes no more requests" if done["draining"] else "takes requests"
        print_json(done) if json else say(f"{done['id']} {does}\n")
    elif model is not None:
        _show(server.get(at("models", model)), json)
    else:
        found = server.get("models")
        print_json(found) if json else say(
            _list(found["models"]) + _cluster(found.get("cluster", []))
        )
    return 0


def _show(model: dict[str, Any], json: bool) -> None:
    if json:
        print_json(model)
        return
    say(
        table(
            {
                "id": model["id"],
                "also": ", ".join(model["aliases"]),
                "path": model["path"],
                "architecture": f"{model['arch']}, {counted(model['blocks'], 'block')}, "
                f"{format_size(model['weight_bytes'])} of weights",
                "context": counted(model["context_tokens"], "token"),
                "chat": ", ".join(model["chat_templates"]) or "no template: a base model",
                "requests": str(model["sessions"]),
            }
        )
        + "\n"
    )


def _list(models: list[dict[str, Any]]) -> str:
    if not models:
        return "no model is loaded; jitllmd models -load FILE\n"
    return columns(
        ("ID", "ARCH", "BLOCKS", "WEIGHTS", "CONTEXT", "REQUESTS"),
        [
            (m["id"], m["arch"], m["blocks"], format_size(m["weight_bytes"]))
            + (m["context_tokens"], m["sessions"])
            for m in models
        ],
    )


def _cluster(models: list[dict[str, Any]]) -> str:
    """All models of a cluster; nothing where there is none, or nobody serves one."""
    if not models:
        return ""
    return "\non the cluster\n" + columns(
        ("ID", "STATE", "SERVED BY", "BLOCKS AT"),
        [
            (m["id"], m["state"], "this server" if m["is_here"] else m["member"], m["placement"])
            for m in models
        ],
    )


command = verb(models, EXAMPLES)
