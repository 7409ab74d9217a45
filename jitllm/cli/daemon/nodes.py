"""What a server has around it: CPU devices, here and on other nodes, and models of all members.

Knows what hosts and the manager of a cluster say, and makes reports of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jitllm.config import EngineConfig
from jitllm.devices.choose import AvailableDevice, DeclinedDevice, choose_devices, reports
from jitllm.devices.grammar import parse_devices
from jitllm.errors import JitllmError
from jitllm.jit import threads, tiers
from jitllm.memory.host import host_devices

if TYPE_CHECKING:
    from jitllm.compose import Listed, Member, NodeListed

Report = dict[str, Any]


async def device_reports(
    config: EngineConfig, member: Member | None, own_models: Sequence[str]
) -> list[Report]:
    """Devices of this machine and of other nodes, and why -devices leaves some of them out.

    member: who asks the manager of a cluster, where there is one. own_models: what may use the
    devices that are taken, where there is none.
    """
    nodes = {node.node_id: node for node in await member.nodes()} if member else {}
    own = nodes.pop(member.node_id, None) if member else None
    listed = await member.models() if member else None
    num_threads = config.threads or threads.default_threads()
    found = [(own, device) for device in host_devices(num_threads)]
    found += [(node, device) for node in nodes.values() for device in _devices_of(node)]
    available = [device for _, device in found]
    try:
        entries = parse_devices(config.devices)
        _, declined = choose_devices(entries, available, own.name if own else "")
    except JitllmError as error:  # a list that asks for what there is not takes nothing
        declined = tuple(DeclinedDevice(device.name, str(error)) for device in available)
    made = []
    for report, (node, device) in zip(reports(available, declined), found, strict=True):
        about = {"node": node.name if node else "", **_cpu(node if device.node else None)}
        if listed is None:
            models = [] if report["declined"] else list(own_models)
        else:
            models = _on(node, device, listed)
        made.append(report | about | {"models": models})
    return made


async def model_reports(member: Member) -> list[Report]:
    """Models of all members."""
    return [
        {
            "id": model.name,
            "path": str(model.path),
            "state": model.state,
            "member": model.member,
            "is_here": model.member == member.name,
            "placement": model.placement,
            "devices": [
                f"{near.node}/{_bare(near.name)}"
                for near in (model.working.devices if model.working else ())
            ],
        }
        for model in await member.models()
    ]


def _cpu(node: NodeListed | None) -> Report:
    """Of a node that said so; of this machine without one."""
    if node is not None and node.host is not None:
        return {"processor": node.host.processor, "tier": node.host.tier}
    return {"processor": tiers.cpu_name(), "tier": tiers.choose().name}


def _on(node: NodeListed | None, device: AvailableDevice, models: Iterable[Listed]) -> list[str]:
    """Models that may use a device of a node."""
    place = (node.node_id if node else "", _bare(device.name))
    return [
        model.name
        for model in models
        if model.working
        and place in [(near.node_id, _bare(near.name)) for near in model.working.devices]
    ]


def _bare(name: str) -> str:
    """What a device is called on its own node."""
    return name.rpartition("/")[2]


def _devices_of(node: NodeListed) -> Iterable[AvailableDevice]:
    """What another node offers, called as placements have it."""
    for device in node.host.devices if node.host else ():
        yield replace(device, node=node.name)
