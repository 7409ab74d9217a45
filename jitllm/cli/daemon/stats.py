"""`jitllmd stats`: what a server does, once or again and again."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from jitllm.cli.command import INTERRUPTED, AsJson, verb
from jitllm.cli.daemon.remote import DEFAULT_ADDRESS, Address, ApiKey, Server
from jitllm.cli.daemon.report import device_lines, moves_line, pages_lines, prefixes_line
from jitllm.cli.screen import print_json, say
from jitllm.errors import UsageError
from jitllm.units import counted, format_duration, format_size

EXAMPLES = """
    jitllmd stats
    jitllmd stats -watch -interval 500
    jitllmd stats -json
"""

LEAST_INTERVAL_MS = 250


def stats(
    *,
    watch: Annotated[bool, typer.Option("-watch", help="Go on until Ctrl-C.")] = False,
    interval: Annotated[
        int, typer.Option("-interval", metavar="MS", help="Milliseconds between; with -watch.")
    ] = 1000,
    model: Annotated[
        str | None, typer.Option("-model", metavar="ID", help="Only this model.")
    ] = None,
    addr: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    json: AsJson = False,
) -> int:
    """Show a server's requests, steps, memory, page-ins, devices and moves.

    With -json, one object each time.
    """
    if interval < LEAST_INTERVAL_MS:
        raise UsageError(f"-interval {interval} is too small", f"the least is {LEAST_INTERVAL_MS}")
    server = Server(addr, api_key)
    before: dict[str, Any] | None = None
    try:
        while True:
            found = server.get("stats")
            if model is not None:
                found["models"] = [m for m in found["models"] if m["id"] == model]
            print_json(found) if json else say(_lines(found, before))
            if not watch:
                return 0
            before = found
            time.sleep(interval / 1000)
    except KeyboardInterrupt:
        if watch:
            return INTERRUPTED
        raise


def _lines(found: dict[str, Any], before: dict[str, Any] | None) -> str:
    server = found["server"]
    text = (
        f"jitllmd {server['version']}   up {format_duration(server['uptime_s'])}   "
        f"{counted(len(found['models']), 'model')}   {counted(server['sessions'], 'request')}\n"
    )
    steps_before = {m["id"]: m["steps"] for m in before["models"]} if before else {}
    passed_s = server["uptime_s"] - before["server"]["uptime_s"] if before else 0.0
    for m in found["models"]:
        text += "".join(f"{line}\n" for line in pages_lines(m))
        text += f"running {m['running']}   waiting {m['waiting']}   steps {m['steps']}"
        if passed_s > 0 and m["id"] in steps_before:
            text += f" ({(m['steps'] - steps_before[m['id']]) / passed_s:.1f} a second)"
        text += (
            f"   KV {format_size(m['kv_bytes'])}{_spilled(m['kv_spill'])}   "
            f"scratch {format_size(m['scratch_bytes'])}   "
            f"{counted(m['threads'], 'thread')} of {m['tier']}\n"
        )
        lines = (*device_lines(m["devices"]), *moves_line(m), *prefixes_line(m))
        text += "".join(f"{line}\n" for line in lines)
    return text


def _spilled(spill: dict[str, int]) -> str:
    return f" + {format_size(spill['num_bytes'])} in a file" if spill["num_bytes"] else ""


command = verb(stats, EXAMPLES)
