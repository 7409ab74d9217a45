"""Automatic placement: as many blocks as fit without paging, on the fewest and fastest devices.

Pure functions of plain values. A step reads all that is placed, so what a device reads in a step
stands for the time that it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from jitllm.devices.grammar import is_cpu
from jitllm.errors import PlacementError
from jitllm.schedule.placement import Decline, Placement, shown_blocks
from jitllm.units import format_size

SEAM_BYTES = 2 << 20
"""Weights that are read in the time that hidden states take to cross between devices."""
NO_CAP = -1


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What one block takes: its weights, read in every step, and its KV at full context."""

    weight_bytes: int
    kv_bytes: int

    @property
    def num_bytes(self) -> int:
        """Both together."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """A device to place blocks on."""

    name: str
    free_bytes: int
    fixed_bytes: int = 0
    """Taken once something is placed there: scratch, programs."""
    speed: float = 1.0
    """Bytes a second that it reads."""
    has_head: bool = False
    """Whether fixed_bytes has the weights of the head already, as a CPU's has."""

    @property
    def block_bytes(self) -> int:
        """For blocks: a tenth is left, because KV grows with the number of sequences."""
        return max(self.free_bytes - self.fixed_bytes, 0) * 9 // 10


@dataclass(frozen=True, slots=True)
class Need:
    """What a pager of some device would take of a budget that it shares. expert_bytes: for experts
    that come one by one, where some of them are of others' blocks."""

    name: str
    fixed_bytes: int
    block_bytes: int
    expert_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Filled:
    """Blocks laid over devices in order; None for what fits nowhere and goes to the host."""

    rooms: tuple[Room, ...]
    owners: tuple[Room | None, ...]
    head: Room | None
    host: Room | None

    @property
    def left(self) -> tuple[int, ...]:
        """Blocks that fit nowhere."""
        return tuple(i for i, owner in enumerate(self.owners) if owner is None)

    @property
    def is_whole(self) -> bool:
        """Whether everything fits."""
        return not self.left and self.head is not None

    @property
    def num_seams(self) -> int:
        """Times that hidden states cross between devices."""
        route = [owner or self.host for owner in (*self.owners, self.head)]
        return sum(one != other for one, other in pairwise(route))


def place(
    blocks: Sequence[BlockCost], head_bytes: int, rooms: Sequence[Room], *, gpu_layers: int = NO_CAP
) -> tuple[Placement, tuple[Decline, ...]]:
    """Where each block and the head go, and what could not go where it would be fastest.

    Each device gets one run of blocks. What fits nowhere goes to the host, the first CPU device,
    which pages. gpu_layers: most blocks that leave the CPU; -1: as many as fit. Raises
    PlacementError if something fits nowhere and there is no host.
    """
    if not rooms:
        raise PlacementError("no device is attached", "attach one: -devices auto")
    host = next((room for room in rooms if is_cpu(room.name)), None)
    best = _best(blocks, head_bytes, _chains(rooms, host), host, gpu_layers)
    if host is None and not best.is_whole:
        left = shown_blocks(best.left, head=best.head is None)
        raise PlacementError(
            f"no device has room for {left}", "attach the host, which pages: -devices with cpu"
        )
    names = [room.name for owner in (*best.owners, best.head) if (room := owner or host)]
    return Placement(tuple(names[:-1]), names[-1]), tuple(_declines(best, gpu_layers))


def divide_budget(total_bytes: int, needs: Sequence[Need]) -> tuple[int, ...]:
    """What each of `needs` gets of a budget, in their order; together they get all of it.

    Fixed parts first, or as much of each as the budget covers; the rest in proportion to the
    bytes of blocks, so that whoever has more blocks has more frames, whether all fit or few. Where
    somebody computes experts of others' blocks, blocks that fit come first, for every token needs
    all of them, and then experts count as blocks do.
    """
    fixed = [need.fixed_bytes for need in needs]
    if sum(fixed) > total_bytes:
        return _in_proportion(total_bytes, fixed)
    weights = [need.block_bytes for need in needs]
    experts = [need.expert_bytes for need in needs]
    if any(experts) and sum(fixed) + sum(weights) <= total_bytes:
        fixed = list(map(sum, zip(fixed, weights, strict=True)))
        weights = list(map(sum, zip(weights, experts, strict=True)))
    rest = _in_proportion(total_bytes - sum(fixed), weights if any(weights) else [1] * len(needs))
    return tuple(map(sum, zip(fixed, rest, strict=True)))


def _in_proportion(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """`total` in whole parts as `weights` are to each other, none of it lost to rounding."""
    whole = sum(weights)
    ends = [total * end // whole for end in accumulate(weights, initial=0)] if whole else [0]
    return tuple(stop - start for start, stop in pairwise(ends)) or (0,) * len(weights)


def _chains(rooms: Sequence[Room], host: Room | None) -> Iterator[tuple[Room, ...]]:
    """Devices to try in the order of their blocks: few first, fast first; all of them at last.

    Of equally fast devices those that come first, or, if these are too small, the largest. In the
    last chain the host is at the end, so that what it pages joins its own run.
    """
    order = sorted(rooms, key=lambda room: (-room.speed, is_cpu(room.name)))
    roomy = sorted(order, key=lambda room: (-room.speed, is_cpu(room.name), -room.block_bytes))
    for num in range(1, len(order) + 1):
        yield tuple(order[:num])
        yield tuple(sorted(roomy[:num], key=order.index))
    yield (*(room for room in order if room is not host), *([host] if host else []))


def _best(
    blocks: Sequence[BlockCost],
    head_bytes: int,
    chains: Iterator[tuple[Room, ...]],
    host: Room | None,
    gpu_layers: int,
) -> _Filled:
    """The first chain that holds everything; else the last one, with the least left over."""
    fills: list[_Filled] = []
    for chain in chains:
        tried = (
            _fill(blocks, head_bytes, chain, head, host, gpu_layers) for head in (*chain, None)
        )
        fills = [fill for fill in tried if fill is not None]
        if whole := [fill for fill in fills if fill.is_whole]:
            return min(whole, key=lambda fill: _seconds(fill, blocks, head_bytes))

    def cost(fill: _Filled) -> tuple[float, float]:
        paged = sum(blocks[i].weight_bytes for i in fill.left)
        paged += head_bytes if fill.head is None else 0
        return paged + SEAM_BYTES * fill.num_seams, _seconds(fill, blocks, head_bytes)

    return min(fills, key=cost)


def _fill(
    blocks: Sequence[BlockCost],
    head_bytes: int,
    chain: tuple[Room, ...],
    head: Room | None,
    host: Room | None,
    gpu_layers: int,
) -> _Filled | None:
    """Blocks laid over `chain` in order, the head on `head`; None if the head may not be there."""
    owners: list[Room | None] = []
    for room in chain:
        left = room.block_bytes - (head_bytes if room is head and not room.has_head else 0)
        if left < 0:
            return None
        stop = len(blocks)
        if not is_cpu(room.name) and gpu_layers != NO_CAP:
            stop = min(stop, gpu_layers)
        while len(owners) < stop and blocks[len(owners)].num_bytes <= left:
            left -= blocks[len(owners)].num_bytes
            owners.append(room)
    leaves_cpu = any(room is not None and not is_cpu(room.name) for room in owners)
    if head is not None and not is_cpu(head.name) and not leaves_cpu:
        return None  # alone on a GPU it would cost two crossings
    owners += [None] * (len(blocks) - len(owners))
    return _Filled(chain, tuple(owners), head, host)


def _seconds(fill: _Filled, blocks: Sequence[BlockCost], head_bytes: int) -> float:
    """What a step reads at the speed of its devices, crossings included."""
    read = [(owner, block.weight_bytes) for owner, block in zip(fill.owners, blocks, strict=True)]
    read.append((fill.head, head_bytes))
    crossing = SEAM_BYTES * fill.num_seams / max(_speed(room) for room in fill.rooms)
    return crossing + sum(num / _speed(room) for room, num in read if room is not None)


def _speed(room: Room) -> float:
    return room.speed or 1.0


def _declines(best: _Filled, gpu_layers: int) -> Iterator[Decline]:
    stop = 0
    for room in best.rooms:
        count = best.owners.count(room)
        stop += count
        rest = shown_blocks(range(stop, len(best.owners)), head=False)
        if not rest or room == best.host:
            break
        if not is_cpu(room.name) and stop >= gpu_layers != NO_CAP:
            yield Decline(rest, f"-gpu-layers {gpu_layers}")
        else:
            size = format_size(room.block_bytes)
            yield Decline(rest, f"{room.name} has room for {count}, {size}")
    if best.left and best.host is not None:
        yield Decline(shown_blocks(best.left, head=False), f"{best.host.name} pages them")
    gpus = [room for room in best.rooms if not is_cpu(room.name) and room in best.owners]
    if gpus and best.head not in gpus:
        why = f"{gpus[0].name} has no room for it beside blocks that read more"
        yield Decline("the head", why)
