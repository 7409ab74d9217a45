"""Devices as people name them: `-devices cpu:0,cuda:1=6G`, and `cpu:1` in a placement.

    auto | all | cpu[:N] | gpu[:N] | cuda[:N] | hip[:N] | vulkan[:INDEX|NAME] | metal

in a list with commas; a GPU may carry `=SIZE`, the most memory that is taken of it, and a device
of another node is written NODE/cpu:0. Bare `cpu` is cpu:0. Knows words only: what there is on a
machine comes from elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from jitllm.errors import UsageError, shown
from jitllm.units import parse_size

FLAG = "-devices"
SETS = ("auto", "all")
GPUS = ("cuda", "metal", "hip", "vulkan")
"""Kinds of GPU; of two ways to one card the earlier is taken."""
KINDS = (*SETS, "cpu", "gpu", *GPUS)
ALIASES = {"ptx": "cuda", "rocm": "hip", "amdgcn": "hip", "spirv": "vulkan", "msl": "metal"}

_NUMBER = re.compile(r"[0-9]{1,4}", re.ASCII)
_NODE = re.compile(r"[^/,=!~%*\s]+")


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """One entry of a device list, its kind in lower case and without aliases."""

    backend: str
    selector: int | str | None = None
    """Which one: an index, or for Vulkan part of a name; None: every one, or the only one."""
    budget_bytes: int | None = None
    """Most memory that is taken of each device that the entry names."""
    node: str = ""
    """Of a cluster; empty: the one that the model is loaded from."""

    @property
    def name(self) -> str:
        """The entry without its size, as a device of that name is called: "cpu:0"."""
        node = f"{self.node}/" if self.node else ""
        return f"{node}{self.backend}" + ("" if self.selector is None else f":{self.selector}")

    @property
    def is_set(self) -> bool:
        """Whether this may stand for several devices."""
        return self.selector is None and self.backend != "metal"

    def __str__(self) -> str:
        return self.name + ("" if self.budget_bytes is None else f"={self.budget_bytes}")


def parse_devices(text: str) -> tuple[DeviceEntry, ...]:
    """The entries of a device list. Raises UsageError, with the remedy, for what means nothing."""
    entries = tuple(_entry(part.strip(), text) for part in text.split(","))
    for entry in entries:
        _refuse_company(entry, entries)
    names: set[str] = set()
    for entry in entries:
        if entry.name.casefold() in names:
            raise UsageError(f"{FLAG} names {entry.name} twice", "name each device once")
        names.add(entry.name.casefold())
    return entries


def device_name(text: str) -> str:
    """The name of one device as everything prints it: "CPU" is "cpu:0", "ptx:1" is "cuda:1".

    Raises UsageError for what names no device, or more than one.
    """
    entry = _device(text.strip())
    if entry.backend in (*SETS, "gpu"):
        raise UsageError(f"{entry.name} is not the name of a device", "names are like cpu:0")
    if entry.is_set:
        raise UsageError(f"{entry.name} may be several devices", f"name one, like {entry.name}:0")
    if isinstance(entry.selector, str):
        raise UsageError(f"{shown(entry.selector)} is no device number", "names are like vulkan:0")
    return entry.name


def more_memory(name: str) -> str:
    """How a user gives a GPU's blocks, keys and values more memory."""
    return f"give it more ({FLAG} {name}=SIZE, or -vram SIZE)"


def is_cpu(name: str) -> bool:
    """Whether a device's name is that of a CPU device, on whatever node."""
    return name.rpartition("/")[2].startswith("cpu:")


def _entry(text: str, whole: str) -> DeviceEntry:
    if not text:
        raise UsageError(f"{FLAG} {shown(whole)} has an empty entry", "write devices like cpu:0")
    named, equals, size = text.partition("=")
    try:
        entry = _device(named.strip())
        return replace(entry, budget_bytes=_budget(entry, size.strip())) if equals else entry
    except UsageError as error:
        raise UsageError(f"{FLAG} {shown(text)}: {error.problem}", error.remedy) from None


def _budget(entry: DeviceEntry, size: str) -> int:
    if entry.backend == "cpu":
        raise UsageError("a CPU device has no budget of its own", "use -maxmem")
    num_bytes = parse_size(size)
    if num_bytes < 1:
        raise UsageError("no memory is left to the device", "write a size like 6G, or none")
    return num_bytes


def _device(text: str) -> DeviceEntry:
    """What stands before "="."""
    node, backend, selector = _cut(text)
    backend = ALIASES.get(backend, backend)
    if backend not in KINDS:
        raise UsageError(f"{shown(backend)} is no kind of device", f"there are {', '.join(KINDS)}")
    if node is not None and (backend in SETS or not _NODE.fullmatch(node)):
        raise UsageError("this is no device of a node", "write it like NODE/cpu:0")
    if selector == "":
        raise UsageError("a colon without a number", f"write {backend} or {backend}:0")
    if backend == "cpu" and selector is None:
        selector = "0"
    return DeviceEntry(backend, _selector(backend, selector), node=node or "")


def _cut(text: str) -> tuple[str | None, str, str | None]:
    """Node, kind and selector; None where its "/" or ":" is missing.

    Both may hold the other's sign: an IPv6 address has colons, and a graphics card's name slashes.
    """
    node = None
    head = text.partition(":")[0].strip().casefold()
    if "/" in text and head not in (*KINDS, *ALIASES):
        node, _, text = text.partition("/")
    backend, colon, selector = text.partition(":")
    return node, backend.strip().casefold(), selector.strip() if colon else None


def _selector(backend: str, text: str | None) -> int | str | None:
    if text is None:
        return None
    if backend in (*SETS, "metal"):
        raise UsageError(f"{backend} takes no number", f"write {backend}")
    if _NUMBER.fullmatch(text):
        return int(text)
    if backend == "vulkan":
        return text
    raise UsageError(f"{shown(text)} is no device number", f"write {backend}:0 or the like")


def _refuse_company(entry: DeviceEntry, entries: tuple[DeviceEntry, ...]) -> None:
    """`auto` and `all` are whole lists already, and bare `gpu` is every GPU."""
    if entry.backend in SETS:
        others, alone = [e for e in entries if e is not entry], "stands alone"
    elif entry.backend == "gpu" and entry.is_set:
        others = [e for e in entries if e is not entry and e.backend != "cpu"]
        alone = "means every GPU: only CPU devices go with it"
    else:
        return
    if others:
        raise UsageError(
            f"{FLAG} has {entry.name} beside {others[0].name}", f"{entry.name} {alone}"
        )
