"""Every message and what answers it, one section for each receiver.

Knows plain values. A message carries handles (addresses, names), never bytes, and is frozen: sender
and receiver may be in one process or in two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from actors.actor import Message, Ref
from actors.parts import Parts
from jitllm.config import ResolvedConfig
from jitllm.devices.memory import Handle
from jitllm.engine import (
    Delta,
    KvSpill,
    Logits,
    Moved,
    MoveTotals,
    ParkedIn,
    ParkTotals,
    PrefixTotals,
    Request,
    Sampling,
    SessionState,
)
from jitllm.errors import PageError
from jitllm.memory.host import HostReport
from jitllm.memory.use import ExpertUse, Phase, PhaseUse
from jitllm.schedule.placement import Decline, Placement
from jitllm.schedule.placement_map import PlacementMap
from jitllm.schedule.seam_trial import SeamTrial
from jitllm.schedule.step import Span, SpanResult

# ------------------------------------------------------------------------------------------ pager


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
    phase: Phase = "decode"
    """What it is needed in."""


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

# ----------------------------------------------------------------------------------------- device


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence has a seat: its page table, and the KV room it was promised.

    num_cached: its first positions whose keys and values exist; its steps begin there.
    """

    sequence: int
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no room for a sequence beside those that run.

    room_bytes: less than nothing where those have outgrown what they were promised.
    """

    need_bytes: int
    room_bytes: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes in another process of this node: `[offset, offset + num_bytes)` of a span.

    Good until the message after the one that brought it.
    """

    handle: Handle
    offset: int
    num_bytes: int


Carried = Slice | bytes
"""Bytes on their way: where they lie, or between nodes the bytes themselves."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step's results in the order of its spans; logits by sequence, where asked for.

    hidden: after a leg that is not the last one, what the next one begins with. is_short: there is
    no memory for one more page of every sequence. last_hidden: by sequence the hidden state of the
    last token of its span, where asked for.
    """

    step_id: int
    results: tuple[SpanResult, ...]
    logits: tuple[tuple[int, Logits], ...]
    hidden: Carried | None = None
    is_short: bool = False
    last_hidden: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions of a sequence from `start` on, and the tokens that are there."""

    sequence: int
    start: int
    tokens: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Position after the last one."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Keys and values of pieces, one after the other, for each of some blocks.

    How they lie is `jitllm.memory.history`'s to say. seconds: what it took to pack. epoch, number:
    of the move that it is for, and of the parcel in that move.
    """

    blocks: tuple[int, ...]
    pieces: tuple[Piece, ...]
    data: Carried
    seconds: float
    epoch: int
    number: int

    @property
    def num_bytes(self) -> int:
        """What travels."""
        return self.data.num_bytes if isinstance(self.data, Slice) else len(self.data)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A parcel has been taken in. num_pages: pages of the receiver that it went into."""

    num_pages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Brought:
    """A block's weights are there, or there was no room ahead of their use.

    num_bytes: what was copied or read for it.
    """

    num_bytes: int
    origin: str


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a model has of the memory of a device that is not the host.

    used_bytes: of spans. allocated_bytes: by the driver's count. weight_bytes: of `blocks` whole
    blocks, and of the tensors beside them that they or the head need.
    """

    budget_bytes: int
    used_bytes: int
    allocated_bytes: int
    weight_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """What a device holds."""

    kv_bytes: int
    """Of the sequences that have a seat."""
    kv_pages: int
    """Which those hold, of all blocks."""
    kv_idle_bytes: int
    """Of prefixes that are kept for sequences to come."""
    page_tokens: int
    scratch_bytes: int
    threads: int
    tier: str
    context_tokens: int
    compiled_kernels: int
    """How many the cache lacked."""
    compile_s: float
    """What compiling or linking the kernels took."""
    memory: DeviceMemory | None = None
    """Of the device's own, if it has one."""
    kv_spill: KvSpill = KvSpill()
    """Beyond the budget of keys and values, if there is one."""
    prompt_tokens: int = 0
    """Computed in steps with a part of a prompt."""
    decode_tokens: int = 0
    """Computed in the other steps."""


@dataclass(frozen=True, slots=True)
class Open(Message[Opened | Refused]):
    """Give a sequence a seat and promise it KV room for `promised_tokens` positions.

    logprobs: say how likely each sampled token was. top_logprobs: how many of the likeliest tokens
    to name with every log-probability. tokens: what is known of it, where prefixes may be shared;
    empty where all of it has to be computed.
    must_fit: take it even over budget, because nothing else runs. stop_ids: tokens that end it.
    max_cached: no more positions than that can have been computed, because another device of the
    route has no more. namespace: what the names of its prefixes begin with.
    """

    sequence: int
    tokens: tuple[int, ...]
    max_tokens: int
    promised_tokens: int
    sampling: Sampling
    logprobs: bool
    top_logprobs: int
    must_fit: bool
    stop_ids: frozenset[int] = frozenset()
    max_cached: int = 1 << 62
    namespace: bytes = b""


@dataclass(frozen=True, slots=True)
class Close(Message[None]):
    """A sequence has ended: free its seat. Twice is as good as once."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Step(Message[StepDone]):
    """Compute one leg of a forward pass of a batch: blocks `[start, stop)`, then perhaps the head.

    hidden: what the leg before ended with; None for the first leg, which begins with the tokens.
    inline: hand hidden states on as bytes, because the next leg is on another node. logits:
    sequences whose rows are handed out. last_hidden: sequences of which the hidden state of the
    last token is, before the head.
    """

    step_id: int
    spans: tuple[Span, ...]
    start: int
    stop: int
    has_head: bool
    hidden: Carried | None = None
    inline: bool = False
    logits: tuple[int, ...] = ()
    last_hidden: tuple[int, ...] = ()


class Outcome(NamedTuple):
    """What sampling gave in a step: a record for each output (`kernels.sample`), and room for as
    many lists of the likeliest tokens where anybody wants them. `decode.results` reads it.
    is_short: see `StepDone`."""

    records: bytes
    tops: bytes
    is_short: bool = False


@dataclass(frozen=True, slots=True)
class Steps(Message[Parts[Outcome]]):
    """Compute a step, and then the same again with the tokens that it sampled, and so on.

    Only where the device has the whole model, and nobody wants logits. Each step is answered as
    soon as it is done, in the form that costs the device least. They end, with one at the least,
    when a sequence ends or needs a page, and after `Cut`.
    """

    first: Step


@dataclass(frozen=True, slots=True)
class Own(Message[None]):
    """These blocks are yours from now on, and no others: a beginning, or the end of a loss.

    No sequence has a seat after it. Twice is as good as once.
    blocks: the number after the last one stands for the output head, here and in what follows.
    epoch: of the placement that says so.
    """

    blocks: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class Stream(Message[Refused | None]):
    """Of the blocks that you have or will have, exactly these pass through your memory.

    Refused where others then have no room to stay; nothing has changed in that case.
    """

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepare(Message[Refused | None]):
    """These blocks will come to you in `epoch`: make room for their weights, keys and values."""

    blocks: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class Bring(Message[Brought]):
    """Have the weights of a block that is prepared for brought, if there is room ahead of its use.

    source: where they lie in another pager's memory of this node. share: most of the time that may
    be spent on it, so that replies go on.
    """

    block: int
    source: Frame | None
    share: float


@dataclass(frozen=True, slots=True)
class Missing(Message[int]):
    """From which position on a sequence lacks keys and values of the blocks to come."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Pack(Message[Parcel]):
    """Keys and values of some positions, to be taken somewhere else. Nothing changes here.

    inline: as bytes, because the receiver is on another node.
    """

    blocks: tuple[int, ...]
    pieces: tuple[Piece, ...]
    inline: bool
    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Unpack(Message[Unpacked]):
    """Take keys and values in. A parcel that comes twice, or late, changes nothing."""

    parcel: Parcel


@dataclass(frozen=True, slots=True)
class Restore(Message[Unpacked]):
    """Keys and values of your own blocks come back, of a sequence that has a seat here.

    start, stop: positions outside of these are passed over. whole: below it everything of these
    positions is there now, of all your blocks, so that others may share it. Refused with `Lost` by
    a device that knows nothing of the sequence or does not own the blocks. Twice is as good as
    once.
    """

    parcel: Parcel
    start: int = 0
    stop: int = 1 << 62
    whole: int = 0


@dataclass(frozen=True, slots=True)
class Hand(Message[None]):
    """These blocks are not yours from now on; keep what is there of them. Comes between steps."""

    blocks: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class Adopt(Message[None]):
    """What you prepared for `epoch` is yours from now on: all of its history is there."""

    blocks: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class Drop(Message[None]):
    """What you handed over in `epoch` has arrived: give its memory back. Twice does no harm."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Abandon(Message[None]):
    """The move of `epoch` does not take place: forget what was prepared, take back what was
    handed over. Twice does no harm."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Cut(Message[None]):
    """The next step will be another one: end `Steps` after this one. Twice is as good as once."""


@dataclass(frozen=True, slots=True)
class Shrink(Message[None]):
    """Give up kept prefixes until they take `max_bytes` at the most."""

    max_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceStatsRequest(Message[DeviceStats]):
    """Say what is held."""


@dataclass(frozen=True, slots=True)
class Recall(Message[None]):
    """Release what lease you keep: the pager needs the room."""


Command = Own | Close | Cut | Recall | Shrink | Hand | Adopt | Drop | Abandon
"""What a device is told to do, and answers when it is done."""

DeviceMessage = (
    Open
    | Step
    | Steps
    | DeviceStatsRequest
    | Stream
    | Prepare
    | Bring
    | Missing
    | Pack
    | Unpack
    | Restore
    | Command
)

# -------------------------------------------------------------------------------------- scheduler


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Sequences, steps, where blocks are, and what became of devices."""

    running: int
    waiting: int
    steps: int
    placement: Placement
    declines: tuple[Decline, ...]
    """What was asked for of the placement and is not so."""
    moves: int
    """How many there were."""
    moved_blocks: int
    move_totals: MoveTotals
    last_move: Moved | None
    losses: int
    """Deaths of devices."""
    recovery_s: float
    """After the last of them, until devices were ready again."""
    lost: tuple[str, ...]
    """Devices that did not come back."""
    sent_home: int = 0
    """Blocks that went home, to the host, because keys and values needed their room."""
    brought_back: int = 0
    """Of those, how many came back."""
    seam_trials: tuple[SeamTrial, ...] = ()
    is_draining: bool = False
    """Whether requests are refused."""
    parked: int = 0
    """Sequences that wait until they are resumed."""
    parked_disk_bytes: int = 0
    parked_memory_bytes: int = 0
    park_totals: ParkTotals = field(default_factory=ParkTotals)
    prefix_disk_bytes: int = 0
    prefix_waiting_bytes: int = 0
    prefix_totals: PrefixTotals = field(default_factory=PrefixTotals)


@dataclass(frozen=True, slots=True)
class Arranged:
    """The moves that a map took, in order."""

    moves: tuple[Moved, ...]


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sequences under way, in order of arrival."""

    states: tuple[SessionState, ...]


@dataclass(frozen=True, slots=True)
class Submit(Message[Parts[Delta]]):
    """Queue a request; its reply comes in deltas, as they become known.

    Refused with an error, before the first of them, when it cannot be served at all. Who follows no
    more ends the request between two steps, in whatever state it is.
    """

    request: Request


@dataclass(frozen=True, slots=True)
class Move(Message[Moved]):
    """Move blocks, and the head if asked, to a device while replies go on.

    is_live: copy ahead of the hand-over; otherwise replies stand still all the time. Refused with
    `PlacementError`; nothing has changed then.
    """

    blocks: tuple[int, ...]
    to: str
    head: bool = False
    is_live: bool = True


@dataclass(frozen=True, slots=True)
class Arrange(Message[Arranged]):
    """Go from the present placement to what a map makes of it, while replies go on.

    strict: all of it or nothing, refused with `PlacementError`; otherwise what cannot be is noted.
    """

    wanted: PlacementMap
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Park(Message[Sessions]):
    """Let the sequences of a request wait without pages, until they are resumed.

    Answered once their keys and values are where they wait. Refused with `UnknownSession`.
    """

    name: str
    to: ParkedIn = "disk"


@dataclass(frozen=True, slots=True)
class Resume(Message[Sessions]):
    """Let the sequences of a request go on when it is their turn."""

    name: str


@dataclass(frozen=True, slots=True)
class SessionsRequest(Message[Sessions]):
    """Say which sequences are under way."""


@dataclass(frozen=True, slots=True)
class Rebudget(Message[None]):
    """Change what the model may take on each host."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Drain(Message[None]):
    """Refuse requests from now on, or take them again; those that are here go on."""

    is_draining: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerStatsRequest(Message[SchedulerStats]):
    """Say what runs."""


SchedulerMessage = (
    Submit
    | Move
    | Arrange
    | Park
    | Resume
    | SessionsRequest
    | Rebudget
    | Drain
    | SchedulerStatsRequest
)

# ---------------------------------------------------------------------------------------- manager


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A device of a model as others reach it: its name in placements, its node, its actors.

    node: as it was called when the model was opened: the names of nodes depend on each other.
    """

    name: str
    node: str
    node_id: str
    device: Ref
    pager: Ref


@dataclass(frozen=True, slots=True)
class Working:
    """What a model that is open works with: all that others need to use it too."""

    scheduler: Ref
    devices: tuple[Neighbour, ...]
    config: ResolvedConfig
    fingerprint: tuple[tuple[str, str | int], ...]
    """Of the container, so that another file under the same path is noticed."""


ModelState = Literal["loading", "ready", "draining", "lost"]
"""lost: its scheduler is dead, and whoever serves it has not closed it yet."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A model of the cluster. member: who serves it. placement: where its blocks are."""

    name: str
    path: Path
    member: str
    state: ModelState = "loading"
    placement: str = ""
    working: Working | None = None
    """None while it loads."""


@dataclass(frozen=True, slots=True)
class NodeListed:
    """A node of the cluster, and what it offers; None before it said so, or when it is gone."""

    name: str
    node_id: str
    host: HostReport | None


@dataclass(frozen=True, slots=True)
class Listing:
    """Every model of the cluster, in the order of loading."""

    models: tuple[Listed, ...]


@dataclass(frozen=True, slots=True)
class NodeListing:
    """Every node that is up."""

    nodes: tuple[NodeListed, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """What is wrong with a cluster. lost: nodes that are gone and had devices of models."""

    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Join(Message[Parts[Health]]):
    """Be a member until this is followed no more: what a member serves is forgotten then.

    models: what it serves already, because the manager that knew them is gone. Answered at once
    with how the cluster is, and then whenever that changes.
    """

    member: str
    models: tuple[Listed, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim(Message[str]):
    """Keep a name for a model that a member is about to load; which one it is.

    is_exact: this name or none, refused with `UsageError`; otherwise a number makes it unique.
    """

    member: str
    name: str
    path: Path
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Publish(Message[None]):
    """A model is open: others may use it. Twice is as good as once."""

    model: Listed


@dataclass(frozen=True, slots=True)
class Withdraw(Message[None]):
    """A model is closed, or will not be opened: its name is free. Twice does no harm."""

    member: str
    name: str


@dataclass(frozen=True, slots=True)
class DrainModel(Message[None]):
    """Have the scheduler of a model `Drain`. Raises `UsageError` for a model that there is not."""

    name: str
    is_draining: bool = True


@dataclass(frozen=True, slots=True)
class ModelsRequest(Message[Listing]):
    """Say which models there are, and where their blocks are by now."""


@dataclass(frozen=True, slots=True)
class NodesRequest(Message[NodeListing]):
    """Say which nodes there are, and what they have to offer by now."""


ManagerMessage = Join | Claim | Publish | Withdraw | DrainModel | ModelsRequest | NodesRequest
