"""The language of placements: `0-8=cpu:0,9-17=cpu:1!,head=host,*=cuda:0~%host`.

    N | A-B | head | *   =   host | DEVICE   then ! (pinned) and ~ (streamed), then %host or %card

Ranges include their end; `*` is whatever no other entry names, the head too; `host` is the first
CPU device. With %host it computes the routed experts of a block that is elsewhere; with %card they
come to a GPU one by one. Knows text and names. Knows nothing of what a device has room for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from jitllm.devices.grammar import device_name, is_cpu
from jitllm.errors import PlacementError, UsageError, shown
from jitllm.schedule.placement import (
    CARDED,
    HEAD,
    HOSTED,
    PIN,
    STREAM,
    Decline,
    Placement,
    range_text,
    shown_blocks,
)

FLAG = "-placement"
HOST = "host"
REST = "*"
MAX_BLOCKS = 100_000
"""More than any model has; what names a block beyond it is taken for a slip."""

_RANGE = re.compile(r"([0-9]+)(?:\s*-\s*([0-9]+))?", re.ASCII)
_SPAN = re.compile(r"([0-9]+)\s*:\s*([0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class MapEntry:
    """One entry: blocks [start, stop), or the head, or the rest, and where they go."""

    selector: str
    """As written: "3", "0-8", "head" or "*"."""
    start: int
    stop: int
    where: str
    """`host`, or the name of a device."""
    is_pinned: bool = False
    is_streamed: bool = False
    experts: str = ""
    """`HOSTED`, `CARDED`, or nothing where routed experts are with their blocks."""

    @property
    def is_head(self) -> bool:
        """Whether this names the output head."""
        return self.selector == HEAD

    @property
    def is_rest(self) -> bool:
        """Whether this names everything that no other entry does."""
        return self.selector == REST

    def __str__(self) -> str:
        marks = PIN * self.is_pinned + STREAM * self.is_streamed + self.experts
        return f"{self.selector}={self.where}{marks}"


@dataclass(frozen=True, slots=True)
class Selection:
    """Blocks that somebody named, in order, and perhaps the head."""

    blocks: tuple[int, ...]
    head: bool


@dataclass(frozen=True, slots=True)
class PlacementMap:
    """A parsed map, good for any model until it is resolved for one."""

    entries: tuple[MapEntry, ...]

    def resolve(
        self, num_blocks: int, devices: Sequence[str], base: Placement, *, strict: bool
    ) -> tuple[Placement, tuple[Decline, ...]]:
        """The placement that this map makes of `base`, with its epoch, and what was left out.

        What no entry names stays as it is in `base`, marks included. Where experts are stays as it
        is in any case: what an entry says of it has to be so in `base` already. Raises
        PlacementError for a device that is not in `devices`, for experts that are to be away from
        the host on the host, and if `strict` also for a block that there is not, and for what is
        not so of experts.
        """
        owners, head = list(base.blocks), base.head
        pinned, streamed = set(base.pinned), set(base.streamed)
        declines = []
        for entry in self.entries:
            device = attached(entry.where, devices)
            if entry.stop > num_blocks:
                beyond = Decline(str(entry), range_text(num_blocks))
                if strict:
                    raise PlacementError(f"{FLAG} {beyond}", "leave it out or -placement-strict")
                declines.append(beyond)
            blocks = self._blocks(entry, num_blocks)
            if entry.experts:
                declines += _check_experts(entry, blocks, device, devices, base, strict=strict)
            takes_head = entry.is_head or (entry.is_rest and not self._names_head)
            for i in blocks:
                owners[i] = device
            head = device if takes_head else head
            named = {*blocks, num_blocks} if takes_head else set(blocks)
            pinned = pinned | named if entry.is_pinned else pinned - named
            streamed = streamed | set(blocks) if entry.is_streamed else streamed - set(blocks)
        made = replace(
            base,
            blocks=tuple(owners),
            head=head,
            pinned=frozenset(pinned),
            streamed=frozenset(streamed),
        )
        return made, tuple(declines)

    def with_experts(self, mark: str, num_blocks: int) -> frozenset[int]:
        """The blocks with this mark: `HOSTED` or `CARDED`."""
        entries = (entry for entry in self.entries if entry.experts == mark)
        return frozenset(block for entry in entries for block in self._blocks(entry, num_blocks))

    @property
    def _names_head(self) -> bool:
        return any(entry.is_head for entry in self.entries)

    def _blocks(self, entry: MapEntry, num_blocks: int) -> Sequence[int]:
        if not entry.is_rest:
            return range(min(entry.start, num_blocks), min(entry.stop, num_blocks))
        named = {i for e in self.entries for i in range(e.start, min(e.stop, num_blocks))}
        return [i for i in range(num_blocks) if i not in named]

    def __str__(self) -> str:
        return ",".join(map(str, self.entries))


def parse_map(text: str) -> PlacementMap:
    """A map, as written behind -placement. Raises UsageError for what means nothing."""
    parts = (part.strip() for part in text.split(","))
    entries = tuple(_entry(part) for part in parts if part)
    if not entries:
        raise UsageError(f"{FLAG} {shown(text)} places nothing", "write a map like 0-8=cpu:0")
    _refuse_repeats(entries)
    return PlacementMap(entries)


def parse_blocks(text: str, flag: str = "-move") -> Selection:
    """Blocks behind -move: A:B without B, A-B with B, N, head, or several with commas.

    Raises UsageError for what means nothing, and for a block that is named twice.
    """
    blocks: set[int] = set()
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        found = _span(part, flag) if part != HEAD else range(0)
        if not blocks.isdisjoint(found) or (part == HEAD and parts.count(HEAD) > 1):
            raise UsageError(f"{flag} {shown(text)} names {part} twice", "name each block once")
        blocks.update(found)
    return Selection(tuple(sorted(blocks)), HEAD in parts)


def attached(where: str, devices: Iterable[str]) -> str:
    """The attached device that `where` means: its name in any spelling, or `host`.

    Raises PlacementError if it is not attached, and UsageError for what can be no device.
    """
    there = tuple(devices)
    if where == HOST:
        name = next(filter(is_cpu, there), None)
        if name is not None:
            return name
    elif (name := device_name(where)) in there:
        return name
    raise PlacementError(
        f"device {where} is not attached", f"-devices attaches; attached: {', '.join(there)}"
    )


def _entry(text: str) -> MapEntry:
    named, equals, place = (part.strip() for part in text.partition("="))
    if not equals or not named or not place:
        raise UsageError(
            f"{FLAG} {shown(text)} is no BLOCKS=DEVICE", "write entries like 0-8=cpu:0 or head=host"
        )
    place, experts = _experts(text, place)
    where = place.rstrip(PIN + STREAM)
    marks = place[len(where) :]
    if len(set(marks)) < len(marks):
        raise UsageError(f"{FLAG} {shown(text)} repeats a mark", "write ! and ~ once each")
    start, stop = (0, 0) if named in (HEAD, REST) else _range(named, text)
    entry = MapEntry(
        selector=named if named in (HEAD, REST) else _shown_range(start, stop),
        start=start,
        stop=stop,
        where=HOST if where.casefold() == HOST else _device(where.strip(), text),
        is_pinned=PIN in marks,
        is_streamed=STREAM in marks,
        experts=experts,
    )
    _refuse_stream(entry, text)
    _refuse_experts(entry, text)
    return entry


def _device(where: str, text: str) -> str:
    try:
        return device_name(where)
    except UsageError as error:
        raise UsageError(f"{FLAG} {shown(text)}: {error.problem}", error.remedy) from None


def _range(named: str, text: str) -> tuple[int, int]:
    """Half-open. Raises UsageError for what is neither a block nor a range, nor head or *."""
    match = _RANGE.fullmatch(named)
    if match is None:
        raise UsageError(
            f"{FLAG} {shown(text)}: {shown(named)} names no blocks", "write N, A-B, head or *"
        )
    return _bounds(match[1], match[2], f"{FLAG} {shown(text)}")


def _span(part: str, flag: str) -> range:
    """The blocks of one item behind -move."""
    what = f"{flag} {shown(part)}"
    if match := _SPAN.fullmatch(part):
        start, stop = _index(match[1], what), _index(match[2], what)
        if stop <= start:
            raise UsageError(f"{what} is empty: A:B leaves out B", f"block A alone is {start}")
        return range(start, stop)
    if match := _RANGE.fullmatch(part):
        return range(*_bounds(match[1], match[2], what))
    raise UsageError(
        f"{what} names no blocks", "write A:B (without B), A-B (with B), N or head, with commas"
    )


def _bounds(first: str, last: str | None, what: str) -> tuple[int, int]:
    """[first, last + 1) of what is written with its last block."""
    start = _index(first, what)
    stop = start + 1 if last is None else _index(last, what) + 1
    if stop <= start:
        raise UsageError(f"{what} ends before it begins", "write the smaller block first")
    return start, stop


def _index(digits: str, what: str) -> int:
    if len(digits) > 9 or int(digits) > MAX_BLOCKS:
        raise UsageError(f"{what} goes beyond any model", f"blocks are below {MAX_BLOCKS}")
    return int(digits)


def _shown_range(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _experts(text: str, place: str) -> tuple[str, str]:
    """What stands before %, and from there on."""
    where, percent, experts = place.partition("%")
    if percent and percent + experts not in (HOSTED, CARDED):
        raise UsageError(
            f"{FLAG} {shown(text)}: {shown(experts)} after % is no place of experts",
            f"write {HOSTED} or {CARDED} at the end, after ! and ~",
        )
    return where.rstrip(), percent + experts


def _refuse_stream(entry: MapEntry, text: str) -> None:
    if entry.is_streamed and entry.is_head:
        raise UsageError(f"{FLAG} {shown(text)}: the head cannot be streamed", "leave ~ out")
    if entry.is_streamed and (entry.where == HOST or is_cpu(entry.where)):
        raise UsageError(
            f"{FLAG} {shown(text)}: a CPU device has nothing to stream into",
            "leave ~ out: its blocks are paged as -maxmem allows",
        )


def _refuse_experts(entry: MapEntry, text: str) -> None:
    if entry.experts and entry.is_head:
        raise UsageError(
            f"{FLAG} {shown(text)}: the head has no experts", f"leave {entry.experts} out"
        )
    if entry.experts == HOSTED and entry.where == HOST:
        raise _on_host(shown(text))
    if entry.experts == CARDED and (entry.where == HOST or is_cpu(entry.where)):
        raise UsageError(
            f"{FLAG} {shown(text)}: a CPU device has no memory to bring experts to",
            f"leave {CARDED} out: they are paged as -maxmem allows, or name a GPU before it",
        )


def _on_host(what: str) -> UsageError:
    return UsageError(
        f"{FLAG} {what}: on the host experts are there anyway",
        f"leave {HOSTED} out, or name another device before it",
    )


def _check_experts(
    entry: MapEntry,
    blocks: Sequence[int],
    device: str,
    devices: Sequence[str],
    base: Placement,
    *,
    strict: bool,
) -> list[Decline]:
    """What an entry says of experts and is not so. Raises instead where it cannot be, or `strict`
    is wanted."""
    what, marked = "come one by one", base.carded
    if entry.experts == HOSTED:
        what, marked = "the host computes", base.hosted
        if device == attached(HOST, devices):
            raise _on_host(str(entry))
    if not (others := sorted(set(blocks) - marked)):
        return []
    have = "has" if len(others) == 1 else "have"
    reason = f"{shown_blocks(others, False)} {have} no experts that {what}"
    decline = Decline(str(entry), reason)
    if strict:
        raise PlacementError(
            f"{FLAG} {decline}",
            f"{entry.experts} is for blocks with experts, and said when a model is opened",
        )
    return [decline]


def _refuse_repeats(entries: Sequence[MapEntry]) -> None:
    for name, problem in ((HEAD, "the head"), (REST, "the rest (*)")):
        if sum(entry.selector == name for entry in entries) > 1:
            raise UsageError(f"{FLAG} names {problem} twice", "name it once")
    ranges = sorted((e for e in entries if e.start < e.stop), key=lambda entry: entry.start)
    for before, after in pairwise(ranges):
        if after.start < before.stop:
            raise UsageError(
                f"{FLAG} names block {after.start} twice", f"it is in {before} and in {after}"
            )
