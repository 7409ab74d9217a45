"""Which devices an engine gets: what was asked for against what there is.

Knows values that describe devices. Opens none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from jitllm.devices.grammar import FLAG, GPUS, SETS, DeviceEntry
from jitllm.errors import PlacementError, UsageError


@dataclass(frozen=True, slots=True)
class AvailableDevice:
    """A device that was found."""

    backend: str
    ordinal: int
    label: str = ""
    """What its maker calls it."""
    uuid: str | None = None
    """Of the card, the same under every backend; None or zeros: unknown."""
    is_software: bool = False
    """A GPU that is computed by a CPU: taken when named, never as one of a set."""
    is_unified: bool = False
    """A GPU whose memory is the host's: what it holds counts there too."""
    lacks: str = ""
    """What it would need to be of use: it is never taken then."""
    on_request: bool = False
    """A share of something that another device has whole: taken when named."""
    num_cores: int = 0
    """Of a CPU device; with `on_request` those that are shared."""
    free_bytes: int = 0
    total_bytes: int = 0
    speed: float = 0.0
    """Bytes a second that it reads of its memory, or any number that ranks it."""
    node: str = ""
    """Where it is in a cluster; empty: here."""

    @property
    def name(self) -> str:
        """As placements have it: "cpu:0", "NODE/cpu:0", "metal"."""
        node = f"{self.node}/" if self.node else ""
        return f"{node}{self.backend}" + ("" if self.backend == "metal" else f":{self.ordinal}")

    @property
    def is_gpu(self) -> bool:
        """Whether this is a GPU, be it one in software."""
        return self.backend in GPUS


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """A device that is taken, and the most memory of it; None: as the device itself decides."""

    device: AvailableDevice
    budget_bytes: int | None = None

    @property
    def name(self) -> str:
        """The device's."""
        return self.device.name


@dataclass(frozen=True, slots=True)
class DeclinedDevice:
    """A device that is there and is not taken, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_devices(
    entries: Sequence[DeviceEntry], available: Sequence[AvailableDevice], here: str = ""
) -> tuple[tuple[ChosenDevice, ...], tuple[DeclinedDevice, ...]]:
    """The devices that `entries` name, in their order, and those of `available` left out.

    A set names GPUs fastest first, then CPU devices. here: the name of this node, for entries
    that say it. Raises PlacementError for a device that there is not, and UsageError for a device
    or a card that is named twice.
    """
    chosen: dict[str, ChosenDevice] = {}
    reasons: dict[str, str] = {}
    for entry in entries:
        local = replace(entry, node="") if entry.node == here else entry
        found, declined = (_set if entry.is_set else _one)(local, available)
        reasons |= {one.name: one.reason for one in declined}
        if not found and entry.backend not in SETS:
            raise _missing(local, declined, available)
        for device in found:
            twin = next((c.name for c in chosen.values() if is_same(c.device, device)), None)
            if twin is None:
                budget = entry.budget_bytes if device.is_gpu else None
                chosen[device.name] = ChosenDevice(device, budget)
            elif entry.is_set and twin != device.name:
                reasons[device.name] = _same_card(twin)
            else:
                raise _repeated(device.name, twin)
    left = (device for device in available if device.name not in chosen)
    return tuple(chosen.values()), tuple(
        DeclinedDevice(d.name, reasons.get(d.name) or _why(d, chosen.values())) for d in left
    )


def is_same(one: AvailableDevice, other: AvailableDevice) -> bool:
    """Whether two devices are one: by name, or one card under two backends by its UUID."""
    uuid = _uuid(one)
    return one.name == other.name or (bool(uuid) and uuid == _uuid(other))


def listing(devices: Iterable[AvailableDevice]) -> str:
    """Names for messages, neighbours together: "cpu:0 to cpu:3, cuda:0"."""
    return ", ".join(_runs(devices))


def reports(
    available: Iterable[AvailableDevice], declined: Iterable[DeclinedDevice]
) -> list[dict[str, Any]]:
    """What is known of each device, for JSON. `declined` is the reason; None: it is taken."""
    reasons = {one.name: one.reason for one in declined}
    return [
        {
            "name": device.name,
            "kind": device.backend,
            "label": device.label,
            "cores": device.num_cores or None,
            "free_bytes": device.free_bytes,
            "total_bytes": device.total_bytes,
            "declined": reasons.get(device.name),
        }
        for device in available
    ]


def together(found: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Reports for people: neighbours that differ in name alone as one, "cpu:1 to cpu:63"."""
    for _, run in groupby(found, lambda report: {**report, "name": ""}):
        first, *rest = map(dict, run)
        yield first | {"name": f"{first['name']} to {rest[-1]['name']}"} if rest else first


def _one(
    entry: DeviceEntry, available: Sequence[AvailableDevice]
) -> tuple[list[AvailableDevice], list[DeclinedDevice]]:
    """The one device that an entry with a number or a name means, in a list."""
    there = [device for device in available if device.node == entry.node]
    if entry.backend == "gpu":
        gpus, declined = _gpus(there)
        return [gpu for i, gpu in enumerate(gpus) if i == entry.selector], declined
    found = [d for d in there if (d.backend, d.ordinal) == (entry.backend, entry.selector or 0)]
    if entry.backend == "vulkan" and not found:
        wanted = str(entry.selector).casefold()  # a number may be part of a name too
        found = [d for d in there if d.backend == "vulkan" and wanted in d.label.casefold()]
    if len(found) == 1 and found[0].lacks:
        return [], [DeclinedDevice(found[0].name, _unasked(found[0]))]
    if len(found) > 1:
        raise UsageError(
            f"{FLAG} {entry.name} may be {listing(found)}", "name the device by its number"
        )
    return found, []


def _set(
    entry: DeviceEntry, available: Sequence[AvailableDevice]
) -> tuple[list[AvailableDevice], list[DeclinedDevice]]:
    """What an entry without a number stands for, and what it leaves out of its kind."""
    there = [d for d in available if d.node == entry.node or entry.backend == "all"]
    kinds = (entry.backend,) if entry.backend in GPUS else GPUS
    gpus, declined = _gpus([device for device in there if device.backend in kinds])
    gpus.sort(key=lambda device: -device.speed)
    if entry.backend == "auto":
        declined += [DeclinedDevice(d.name, "auto takes the fastest GPU only") for d in gpus[1:]]
        gpus = gpus[:1]
    if entry.backend in SETS:
        gpus += [d for d in there if not d.is_gpu and not d.on_request]
    return gpus, declined


def _gpus(
    devices: Sequence[AvailableDevice],
) -> tuple[list[AvailableDevice], list[DeclinedDevice]]:
    """Cards, each once, and why the others are none."""
    cards: list[AvailableDevice] = []
    declined = []
    for device in sorted((d for d in devices if d.is_gpu), key=lambda d: GPUS.index(d.backend)):
        twin = next((card.name for card in cards if is_same(card, device)), None)
        if device.lacks or device.is_software:
            declined.append(DeclinedDevice(device.name, _unasked(device)))
        elif twin is not None:
            declined.append(DeclinedDevice(device.name, _same_card(twin)))
        else:
            cards.append(device)
    return cards, declined


def _missing(
    entry: DeviceEntry, declined: Sequence[DeclinedDevice], available: Sequence[AvailableDevice]
) -> PlacementError:
    why = f" ({', '.join(map(str, declined))})" if declined else ""
    return PlacementError(
        f"{FLAG} {entry.name}: no such device here{why}", f"there is {listing(available) or 'none'}"
    )


def _repeated(name: str, twin: str) -> UsageError:
    if name == twin:
        return UsageError(f"{FLAG} names {name} twice", "name each device once")
    return UsageError(f"{FLAG} names one card twice, as {twin} and as {name}", "name it once")


def _why(device: AvailableDevice, chosen: Iterable[ChosenDevice]) -> str:
    twin = next((one.name for one in chosen if is_same(one.device, device)), None)
    return _unasked(device) if twin is None else _same_card(twin)


def _same_card(twin: str) -> str:
    return f"the same card as {twin}"


def _unasked(device: AvailableDevice) -> str:
    if device.lacks:
        return f"it lacks {device.lacks}"
    if device.is_software:
        return "computed in software: only when named"
    return "only when named" if device.on_request else f"not in {FLAG}"


def _uuid(device: AvailableDevice) -> str:
    """Hexadecimal digits without what drivers put around them; empty if it tells nothing."""
    digits = (device.uuid or "").casefold().removeprefix("gpu-").replace("-", "")
    return digits if digits.strip("0") else ""


def _runs(devices: Iterable[AvailableDevice]) -> Iterator[str]:
    order = sorted(devices, key=lambda d: (d.node, d.backend, d.ordinal))
    numbered = enumerate(order)
    for _, run in groupby(numbered, lambda at: (at[1].node, at[1].backend, at[1].ordinal - at[0])):
        names = [device.name for _, device in run]
        yield names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
