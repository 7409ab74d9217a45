"""`jitllmd devices`: what a server could compute on."""

from __future__ import annotations

from jitllm.cli.command import AsJson, verb
from jitllm.cli.daemon.remote import DEFAULT_ADDRESS, Address, ApiKey, Server
from jitllm.cli.daemon.tables import columns
from jitllm.cli.screen import print_json, say
from jitllm.errors import one_line
from jitllm.units import format_size

EXAMPLES = """
    jitllmd devices
    jitllmd devices -json
"""


def devices(addr: Address = DEFAULT_ADDRESS, api_key: ApiKey = "", json: AsJson = False) -> int:
    """List a server's devices and their memory."""
    found = Server(addr, api_key).get("devices")
    if json:
        print_json(found)
        return 0
    say(
        columns(
            ("NAME", "KIND", "MEMORY", "TIER", "THREADS", "MODELS"),
            [
                (d["name"], d["kind"], format_size(d["memory_bytes"]), d.get("tier", ""))
                + (d.get("threads", ""), ", ".join(d.get("models", ())))
                for d in found["devices"]
            ],
        )
    )
    for note in dict.fromkeys(note for d in found["devices"] for note in d.get("notes", ())):
        say(f"* {one_line(note)}\n")
    return 0


command = verb(devices, EXAMPLES)
