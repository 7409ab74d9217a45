"""docs/messages.md names every message, with its receiver, its senders and its replies."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from actors.actor import Message
from actors.messages import device, manager, pager, scheduler
from actors.parts import Parts

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "messages.md").read_text()
MODULES = (scheduler, device, pager, manager)
RECEIVERS = {
    "scheduler": scheduler.SchedulerMessage,
    "device": device.DeviceMessage,
    "pager": pager.PagerMessage,
    "manager": manager.ManagerMessage,
}
SENDERS = {"client": "client", "scheduler": "scheduler", "device": "device", "pager": "pager"}
SENDERS |= {"recipes": "device"}  # a device is made by its recipe, which asks for what it needs
SENDERS |= {"experts": "pager", "leases": "pager", "mixtures": "device"}  # parts of them
SENDERS |= {"hosted": "device"}
SENDERS |= {"compute": "device", "seats": "device", "parcels": "device", "outbox": "device"}
SENDERS |= {"supply": "device", "copied_weights": "device", "vulkan_recipe": "device"}
SENDERS |= {"member": "member", "manager": "manager"}
SENDERS |= {"route": "scheduler", "relocate": "scheduler"}  # parts of it
SENDERS |= {name: "scheduler" for name in ("park", "charge", "remember")}
SENDERS |= {name: "scheduler" for name in ("admission", "departures", "stepper")}
KINDS = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and kind.__module__ == module.__name__
]
ALL = {kind for kind in KINDS if issubclass(kind, Message)}


def rows(receiver: str) -> dict[str, tuple[set[str], set[str]]]:
    """The table of a receiver: message to (senders, replies)."""
    section = next(s for s in TEXT.split("\n## ") if re.match(rf"To (the|a) {receiver}\n", s))
    found = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*)\|", section, re.MULTILINE)
    return {
        name: (set(re.findall(r"\w+", senders)), set(re.findall(r"`(\w+)`", replies)))
        for name, senders, replies in found
    }


def replies_of(kind: Any) -> set[str]:
    """What `ask` gets back, or `follow` in parts, by name."""
    [reply] = get_args(kind.__orig_bases__[0])
    kinds = get_args(reply) or (reply,)  # those of a union, or of parts
    return {kind.__name__ for kind in kinds if kind not in (None, type(None))}


def made_by() -> dict[str, set[str]]:
    """Message to those whose code makes it."""
    found: dict[str, set[str]] = {kind.__name__: set() for kind in ALL}
    for module, sender in SENDERS.items():
        for node in ast.walk(ast.parse((ROOT / "actors" / f"{module}.py").read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found.get(node.func.id, set()).add(sender)
    return found


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_every_message_stands_with_its_receiver_and_its_replies(receiver: str) -> None:
    expected = {kind.__name__: replies_of(kind) for kind in get_args(RECEIVERS[receiver])}
    assert {name: replies for name, (_, replies) in rows(receiver).items()} == expected


def test_replies_in_parts_are_said_to_be() -> None:
    told = set(re.findall(r"^\| `(\w+)` \| [^|]* \| [^|]*\bin parts\b", TEXT, re.MULTILINE))
    in_parts = {kind for kind in ALL if get_origin(get_args(kind.__orig_bases__[0])[0]) is Parts}
    assert told == {kind.__name__ for kind in in_parts} != set()


def test_every_message_has_a_receiver() -> None:
    assert {kind for union in RECEIVERS.values() for kind in get_args(union)} == ALL


def test_senders_are_those_whose_code_makes_the_message() -> None:
    told = {
        name: senders for receiver in RECEIVERS for name, (senders, _) in rows(receiver).items()
    }
    assert told == made_by()


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_every_message_is_in_the_module_of_its_receiver(receiver: str) -> None:
    modules = {kind.__module__ for kind in get_args(RECEIVERS[receiver])}
    assert modules == {f"actors.messages.{receiver}"}


def test_everything_in_the_modules_is_named() -> None:
    names = [kind.__name__ for kind in KINDS]
    assert [name for name in names if not re.search(rf"\b{name}\b", TEXT)] == []
