"""What `place` and `stats` say about a model's memory, devices and moves, a line for each thing.

Knows the replies of the control plane.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jitllm.cli.daemon.tables import columns
from jitllm.units import counted, format_duration, format_rate, format_size

Plain = Mapping[str, Any]


def pages_lines(found: Plain) -> list[str]:
    """What is in memory, and what paging did. found: with `pages` and `fits`."""
    pages = found["pages"]
    lines = [
        f"{found['id']}   budget {format_size(pages['budget_bytes'])}   "
        f"always held {format_size(pages['fixed_bytes'])}   "
        f"frames {pages['frames']} of {counted(pages['blocks'], 'block')}   "
        f"{'FITS' if found['fits'] else 'PAGES'}",
        f"resident {pages['resident']}   page-ins {pages['page_ins']}   "
        f"evictions {pages['evictions']}   read {format_size(pages['bytes_read'])}",
    ]
    for phase, use in pages.get("phases", {}).items():
        if use["requests"]:
            lines.append(_phase_line(phase, use))
    if use := pages.get("experts"):
        needed = use["hits"] + use["reads"]
        lines.append(
            f"experts {use['hits'] / max(needed, 1):.1%} of {needed} were there   "
            f"read {format_size(use['bytes_read'])}   waited {format_duration(use['wait_s'])}   "
            f"held {format_size(use['held_bytes'])} of {format_size(use['room_bytes'])}"
        )
    if pages["over_budget_bytes"] > 0:
        lines.append(f"* OVER BUDGET by {format_size(pages['over_budget_bytes'])}")
    return lines


def _phase_line(phase: str, use: Plain) -> str:
    """What was read in a phase."""
    rate = format_rate(use["bytes_read"] / use["seconds"]) if use["seconds"] else "at once"
    line = (
        f"  {phase:<6}   read {format_size(use['bytes_read'])}   "
        f"{counted(use['requests'], 'request')}   {counted(use['faults'], 'fault')}   {rate}"
    )
    if use["tokens"]:
        line += f"   {format_size(use['bytes_read'] / use['tokens'])} a token"
    return line


def device_lines(devices: Iterable[Plain]) -> list[str]:
    """A line for each device, under their names."""
    head = ("DEVICE", "THREADS", "BLOCKS", "RESIDENT", "WEIGHTS", "KV", "PAGES", "OF", "BUDGET")
    return columns(head, map(_device, devices)).splitlines()


def _device(use: Plain) -> tuple[object, ...]:
    return (
        use["name"],
        use["threads"] or "",
        f"{use['blocks']}{' + head' if use['has_head'] else ''}",
        f"{use['resident']} of {use['placed']}",
        format_size(use["placed_bytes"]),
        format_size(use["kv_bytes"]),
        use["kv_pages"],
        counted(use["page_tokens"], "token"),
        format_size(use["budget_bytes"]),
    )


def move_line(moved: Plain) -> str:
    """What one move came to."""
    origins = ", ".join(f"{num} from {where}" for where, num in moved["weights_from"].items())
    return (
        f"moved {moved['blocks']} to {moved['to']}   pause {moved['pause_s'] * 1e3:.2f} ms   "
        f"prepared in {format_duration(moved['prepare_s'])}   "
        f"history {format_size(moved['bytes_before'])} before, "
        f"{format_size(moved['bytes_paused'])} in the pause, {counted(moved['pages'], 'page')}   "
        f"weights {format_size(moved['weight_bytes'])} ({origins or 'none'})   "
        f"{counted(moved['tokens_meanwhile'], 'token')} meanwhile"
    )


def prefixes_line(found: Plain) -> list[str]:
    """What the prefix cache on disk did; nothing where there is none."""
    totals = found["prefix_totals"]
    if not any(totals.values()):
        return []
    return [
        f"prefixes {format_size(found['prefix_disk_bytes'])} on disk   hits {totals['hits']}   "
        f"misses {totals['misses']}   {counted(totals['tokens'], 'token')} from there   "
        f"stored {counted(totals['files'], 'file')}   evictions {totals['evictions']}   "
        f"damaged {totals['damaged']}   failures {totals['failures']}"
    ]


def moves_line(found: Plain) -> list[str]:
    """All moves so far, and what they took; nothing where there was none."""
    if not found["moves"]:
        return []
    totals = found["move_totals"]
    mean_ms = totals["pause_s"] / found["moves"] * 1e3
    return [
        f"moves {found['moves']}   of {counted(found['moved_blocks'], 'block')}   "
        f"pauses {mean_ms:.2f} ms on average   "
        f"history {format_size(totals['bytes_before'])} before, "
        f"{format_size(totals['bytes_paused'])} in pauses   "
        f"{counted(totals['tokens_meanwhile'], 'token')} meanwhile",
        *_home_lines(found),
    ]


def _home_lines(found: Plain) -> list[str]:
    """Blocks that a GPU had no room for beside keys and values; nothing where there was none."""
    if not found["sent_home"]:
        return []
    sent = counted(found["sent_home"], "block")
    return [f"room    {sent} went to the host for it   {found['brought_back']} came back"]
