"""`jitllm hardware`: what this machine has, what would be used, and why."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jitllm.cli.command import AsJson, verb
from jitllm.cli.screen import print_json, say, table
from jitllm.devices.choose import AvailableDevice, together
from jitllm.errors import one_line
from jitllm.units import format_size

EXAMPLES = """
    jitllm hardware
    jitllm hardware -json
"""

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def hardware(*, json: AsJson = False) -> int:
    """Describe the machine, and what would be used of it.

    Processor, instruction sets and why some are missing, cores and the quota on them, devices by
    the names that -devices takes, the memory budget and where it comes from, Ray clusters, huge
    pages. Nothing is measured.
    """
    found = _probe()
    if json:
        print_json(found)
        return 0
    memory, cores, cache = found["memory"], found["cores"], found["cache"]
    say(
        table(
            {
                "system": found["system"],
                "processor": found["cpu"],
                **{f"tier {tier['name']}": _why(tier, found["tier"]) for tier in found["tiers"]},
                "cores": _cores(cores),
                "threads": f"{cores['threads']}, the smaller of cores and quota; "
                "-threads changes it",
                **{f"device {d['name']}": _device(d) for d in together(found["devices"])},
                **({"vulkan": f"none: {found['vulkan']}"} if found["vulkan"] else {}),
                "memory": f"{_size(memory['available_bytes'])} available of "
                f"{_size(memory['total_bytes'])}",
                "budget": f"{memory['explanation']}; -maxmem changes it",
                "ray": _ray(found["ray"]),
                "huge pages": found["huge_pages"] or "the kernel does not tell",
                "kernel cache": f"{cache['directory']}, {_size(cache['free_bytes'])} free"
                if cache["directory"]
                else "none: there is no home; $XDG_CACHE_HOME may name a folder",
            }
        )
        + "\n"
    )
    return 0


def _probe() -> dict[str, Any]:
    from jitllm.devices.vulkan.found import find_vulkan
    from jitllm.jit import tiers
    from jitllm.jit.cache import default_directory
    from jitllm.memory import budget
    from jitllm.memory.host import total_bytes

    host = budget.probe()
    directory = default_directory()
    vulkan = find_vulkan()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": tiers.cpu_name(),
        "tier": tiers.choose().name,
        "tiers": [
            {
                "name": tier.name,
                "missing": list(tiers.missing(tier)),
                "obstacle": tiers.obstacle(tier),
            }
            for tier in tiers.TIERS
        ],
        "cores": _count_cores(),
        "devices": _devices(vulkan.devices),
        "vulkan": "; ".join(filter(None, (vulkan.problem, vulkan.remedy))),
        "memory": {
            "total_bytes": total_bytes(),
            "available_bytes": budget.available_bytes(),
            "usable_bytes": host.memory_bytes,
            "source": host.source,
            "budget_bytes": host.budget_bytes,
            "explanation": host.explanation,
        },
        "ray": {"version": _ray_version(), "clusters": _ray_clusters()},
        "huge_pages": _huge_pages(),
        "cache": {
            "directory": None if directory is None else str(directory),
            "free_bytes": None if directory is None else _free_bytes(directory),
        },
    }


def _count_cores() -> dict[str, Any]:
    from jitllm.jit import threads

    mask = threads.cpu_mask()
    return {
        "logical": os.cpu_count(),
        "mask": sorted(mask),
        "physical": threads.num_cores(mask),
        "quota": threads.cpu_quota(),
        "threads": threads.default_threads(),
    }


def _devices(gpus: Iterable[AvailableDevice]) -> list[dict[str, Any]]:
    """Those of this machine, and why -devices auto leaves some of them out."""
    from jitllm.devices.choose import choose_devices, reports
    from jitllm.devices.grammar import parse_devices
    from jitllm.jit.threads import default_threads
    from jitllm.memory.host import host_devices

    available = (*host_devices(default_threads()), *gpus)
    _, declined = choose_devices(parse_devices("auto"), available)
    return reports(available, declined)


def _device(found: dict[str, Any]) -> str:
    cores = found["cores"]
    parts = [
        found["label"],
        f"{cores} core{'s' * (cores != 1)}" if cores else "",
        f"{_size(found['free_bytes'])} free of {_size(found['total_bytes'])}",
    ]
    taken = f"not taken: {found['declined']}" if found["declined"] else "taken by -devices auto"
    return f"{', '.join(filter(None, parts))}; {taken}"


def _cores(cores: dict[str, Any]) -> str:
    quota = cores["quota"]
    allowed = "no quota" if quota is None else f"a quota of {quota:g}"
    return (
        f"{cores['physical']} in the CPU mask ({len(cores['mask'])} of {cores['logical']} "
        f"logical CPUs), {allowed}"
    )


def _why(tier: dict[str, Any], chosen: str) -> str:
    if tier["obstacle"]:
        return f"no: {tier['obstacle']}"
    return "yes, and the one that is used" if tier["name"] == chosen else "yes"


def _ray(found: dict[str, Any]) -> str:
    if found["version"] is None:
        return "not installed; pip install 'jitllm[ray]' for -ray"
    text = f"{found['version']}, no cluster runs here"
    if clusters := found["clusters"]:
        text = f"{found['version']}, a cluster at " + ", ".join(map(_ray_cluster, clusters))
    return text


def _ray_cluster(found: dict[str, Any]) -> str:
    address, niceness = one_line(found["address"]), found["niceness"]
    if not niceness:
        return str(address)
    return (
        f"{address} (its workers run at nice {niceness}, so that any busy process slows replies "
        "down: start it with RAY_worker_niceness=0)"
    )


def _ray_version() -> str | None:
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("ray")
    return None


def _ray_clusters() -> list[dict[str, Any]]:
    """Those with a node on this machine, found by its process; nothing is joined.

    niceness: of their workers; None while there are none.
    """
    import psutil

    found: dict[str, int | None] = {}
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"] != "raylet":
                continue
            flag = next((w for w in process.cmdline() if w.startswith("--gcs-address=")), "")
            nice = [child.nice() for child in process.children() if _is_worker(child.name())]
            if flag:
                found[flag.partition("=")[2]] = max(nice, default=None)
    return [{"address": address, "niceness": nice} for address, nice in sorted(found.items())]


def _is_worker(name: str) -> bool:
    return name.startswith("ray::") and not name.endswith("Agent")


def _huge_pages() -> str | None:
    """The kernel's mode for transparent huge pages: always, madvise or never."""
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return None
    return next((word.strip("[]") for word in text.split() if word.startswith("[")), None)


def _free_bytes(directory: Path) -> int | None:
    """Of the disk that the folder is on or will be; None where we may not look."""
    for path in (directory, *directory.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(path).free
    return None


def _size(num_bytes: int | None) -> str:
    return "an unknown amount" if num_bytes is None else format_size(num_bytes)


command = verb(hardware, EXAMPLES)
