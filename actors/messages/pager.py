"""What a pager is asked, and what it answers: leases, frames, reservations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from actors.actor import Message, Ref
from jitllm.devices.memory import Handle
from jitllm.errors import PageError
from jitllm.memory.use import ExpertUse, Phase, PhaseUse


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks `[start, stop)` are resident and stay so until the lease is released."""

    lease_id: int
    start: int
    stop: int
    is_standing: bool = False
    """It may be kept for any number of steps, until it is recalled."""


@dataclass(frozen=True, slots=True)
class ExpertLease:
    """Some experts of a block are resident and stay so until the lease is released."""

    lease_id: int
    block: int
    experts: tuple[int, ...]
    places: tuple[int, ...]
    """Where each of them lies: where the expert with that number would in a whole block."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An expert cannot be read, and why."""

    expert: int
    error: PageError


@dataclass(frozen=True, slots=True)
class Located:
    """Where the weights lie on this node, for as long as the pager lives."""

    dense: Handle
    """Of the dense region, to be read while it is placed here."""
    blocks: Handle
    """Of the memory for all blocks; to be read under a lease only."""
    offsets: tuple[int, ...]
    """Where in it the extent of each block begins."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A block's bytes in the memory of a pager of this node, to be read under a lease only."""

    handle: Handle
    """Of the memory for all blocks of that pager."""
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Lent:
    """A block that stays resident until `lease` is released, and where it lies."""

    lease: Lease
    frame: Frame


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of a fetch, and how long its turn took, pauses included."""

    num_bytes: int
    """That were copied or read for it."""
    seconds: float
    origin: Literal["here", "frames", "container", "none"]
    """Where the block was found; "none": there was no room, or it was needed otherwise."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """What is left for blocks after a reservation changed."""

    room_bytes: int
    """What all reservations leave for frames, taken or not."""
    frames: int
    """Blocks that can be held at once; one is always admitted."""
    over_budget_bytes: int
    """What the model takes beyond the budget, one block at the least."""
    spare_bytes: int
    """What may be kept besides, as long as it is given up on demand."""


@dataclass(frozen=True, slots=True)
class PagerStats:
    """What the pager holds, and all it did so far."""

    blocks: int
    """Of the model."""
    placed: int
    """How many of them are served from here."""
    placed_bytes: int
    """What those take."""
    resident: int
    frames: int
    """Placed blocks that can be held at once; one is always admitted."""
    page_ins: int
    """Blocks that came in, from the container or from another pager."""
    evictions: int
    bytes_read: int
    """From the container, its dense region included, its header not."""
    budget_bytes: int
    fixed_bytes: int
    """Dense region and reservations."""
    over_budget_bytes: int
    """What the model takes beyond the budget, one block at the least."""
    spare_bytes: int
    """What nobody needs, all blocks being there: what may be kept and given up on demand."""
    read_s: float
    """Time that page-ins took, overlapping or not, without pauses."""
    wait_s: float
    """Time that devices waited for a block."""
    reads_ahead: bool
    """Whether a frame is lent to the next block at the moment."""
    is_direct: bool
    """Whether reads go past the page cache."""
    experts: ExpertUse | None = None
    """Where they come one by one; blocks come without them then."""
    phases: Mapping[Phase, PhaseUse] = field(default_factory=dict)
    """What was read in each; tokens are the device's to count."""


@dataclass(frozen=True, slots=True)
class Acquire(Message[Lease]):
    """Lease a run of blocks that begins with `start` and ends before or at `stop`.

    Answered once `start` is resident; the run is as long as what is resident then, and ends before
    a block that is not placed here. Refused when `start` is not. Release a lease
    before the next one is acquired: with a small budget there may be room for one block only. And
    before anything is reserved: who waits for room must not be who takes it.
    """

    start: int
    stop: int
    device: str = ""
    """Who holds the lease."""
    phase: Phase | None = None
    """Of the step that waits for it; None where no step does."""


@dataclass(frozen=True, slots=True)
class AcquireExperts(Message[ExpertLease | Unreadable]):
    """Lease some of the `experts` of `block` that a step needs, where they come one by one.

    All of them are given a frame and read at once, as far as there is room, and kept. Answered with
    those that are there, and when there is none once half of those have come that are on their way.
    Release the lease and ask for the others, until none is left. Where one cannot be read, nothing
    is kept.
    """

    block: int
    experts: tuple[int, ...]
    device: str = ""
    """Who holds the lease; there is one that asks."""
    phase: Phase | None = None
    """Of the step that needs them; None where it is that of the last `Acquire`."""


@dataclass(frozen=True, slots=True)
class Release(Message[None]):
    """What is leased is not used any more. Twice is as good as once."""

    lease: Lease | ExpertLease


@dataclass(frozen=True, slots=True)
class Place(Message[None]):
    """Serve `blocks` and no others from now on.

    What is placed no more goes at once, or when the last lease on it is released; standing leases
    on it are recalled. Answered once the dense region is there, if that is asked for; before it is
    read, blocks give way to it as to a reservation.
    """

    blocks: tuple[int, ...]
    dense: bool | None = None
    """Whether the dense region is needed here; otherwise its memory and its charge go. None: as
    before."""
    experts: tuple[int, ...] | None = None
    """Serve experts of these blocks, where they come one by one. None: of those in `blocks`."""


@dataclass(frozen=True, slots=True)
class Fetch(Message[Fetched]):
    """Bring a placed block in ahead of its use, if there is free room for it.

    Nothing goes for it, and who needs the room for a reply meanwhile takes it away. Answered when
    the block is there or is given up; fetches take turns. Raises `PageError` for a block that
    cannot be read, `JitllmError` for one that is not placed or whose `source` cannot be read.
    """

    block: int
    source: Frame | None = None
    """Where to copy it from, under a lease that outlives the fetch; else the container is read."""
    share: float = 1.0
    """The part of the time, in (0, 1], that may be spent reading or copying."""


@dataclass(frozen=True, slots=True)
class Lend(Message[Lent | None]):
    """Lease a placed block for its bytes, if it is resident; nothing comes in for it."""

    block: int
    device: str = ""
    """Who holds the lease."""


@dataclass(frozen=True, slots=True)
class Locate(Message[Located]):
    """Say where the weights lie."""


@dataclass(frozen=True, slots=True)
class Reserve(Message[Reserved]):
    """Set what `name` (KV, scratch) takes of the budget, 0 for nothing; blocks give way to it.

    Never refused: `over_budget_bytes` tells what it came to.
    """

    name: str
    num_bytes: int
    device: str = ""
    """Who needs it: names of two devices are two names."""


@dataclass(frozen=True, slots=True)
class Forget(Message[None]):
    """What `device` held, it holds no more: it begins, perhaps after a death.

    From now on it may get standing leases, and be told to `Recall` one.
    """

    device: Ref


@dataclass(frozen=True, slots=True)
class SetBudget(Message[PagerStats]):
    """Change what the model may take on this host; answered with what was reached."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class PagerStatsRequest(Message[PagerStats]):
    """Say what is held and what was done."""


PagerMessage = (
    Acquire
    | AcquireExperts
    | Release
    | Place
    | Fetch
    | Lend
    | Locate
    | Reserve
    | Forget
    | SetBudget
    | PagerStatsRequest
)
