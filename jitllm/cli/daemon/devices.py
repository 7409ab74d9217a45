"""`jitllmd devices`: what a server could compute on."""

from __future__ import annotations

from typing import Any

from jitllm.cli.command import AsJson, verb
from jitllm.cli.daemon.remote import DEFAULT_ADDRESS, Address, ApiKey, Server
from jitllm.cli.daemon.tables import columns
from jitllm.cli.screen import print_json, say
from jitllm.devices.choose import together
from jitllm.errors import one_line
from jitllm.units import format_size

EXAMPLES = """
    jitllmd devices
    jitllmd devices -json
"""


def devices(addr: Address = DEFAULT_ADDRESS, api_key: ApiKey = "", json: AsJson = False) -> int:
    """List a server's devices: what is free, who may use it, and why one was not taken."""
    found = Server(addr, api_key).get("devices")
    if json:
        print_json(found)
        return 0
    say(
        columns(
            ("NAME", "KIND", "CORES", "FREE", "OF", "MODELS", "NOT TAKEN BECAUSE"),
            [_row(device) for device in together(found["devices"])],
        )
    )
    for note in dict.fromkeys(note for d in found["devices"] for note in d.get("notes", ())):
        say(f"* {one_line(note)}\n")
    return 0


def _row(device: dict[str, Any]) -> tuple[str, ...]:
    return (
        device["name"],
        device["label"] or device["kind"],
        str(device["cores"] or ""),
        format_size(device["free_bytes"]),
        format_size(device["total_bytes"]),
        ", ".join(device["models"]),
        device["declined"] or "",
    )


command = verb(devices, EXAMPLES)
