"""Every message and what answers it, one section for each receiver.

Knows plain values. A message carries handles (addresses, names), never bytes, and is frozen: sender
and receiver may be in one process or in two.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.actor import Message, Ref
from jitllm.devices.memory import Handle
from jitllm.engine import Delta, Logits, Request, Sampling
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
class Located:
    """Where the weights lie on this node, for as long as the pager lives."""

    dense: Handle
    """Of the dense region, which is always resident."""
    blocks: Handle
    """Of the memory for all blocks; to be read under a lease only."""
    offsets: tuple[int, ...]
    """Where in it the extent of each block begins."""


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
    resident: int
    frames: int
    """Blocks that can be held at once; one is always admitted."""
    page_ins: int
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
    """Time that page-ins took, overlapping or not."""
    wait_s: float
    """Time that devices waited for a block."""
    reads_ahead: bool
    """Whether a frame is lent to the next block at the moment."""
    is_direct: bool
    """Whether reads go past the page cache."""


@dataclass(frozen=True, slots=True)
class Acquire(Message[Lease]):
    """Lease a run of blocks that begins with `start` and ends before or at `stop`.

    Answered once `start` is resident; the run is as long as what is resident then. Release a lease
    before the next one is acquired: with a small budget there may be room for one block only. And
    before anything is reserved: who waits for room must not be who takes it.
    """

    start: int
    stop: int
    device: str = ""
    """Who holds the lease."""


@dataclass(frozen=True, slots=True)
class Release(Message[None]):
    """The blocks of `lease` are not used any more. Twice is as good as once."""

    lease: Lease


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


PagerMessage = Acquire | Release | Locate | Reserve | Forget | SetBudget | PagerStatsRequest

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
    """There is no room for a sequence beside those that run."""

    need_bytes: int
    room_bytes: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step's results in the order of its spans; logits by sequence, where asked for."""

    step_id: int
    results: tuple[SpanResult, ...]
    logits: tuple[tuple[int, Logits], ...]


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """What a device holds."""

    kv_bytes: int
    """Of the sequences that have a seat."""
    kv_idle_bytes: int
    """Of prefixes that are kept for sequences to come."""
    scratch_bytes: int
    threads: int
    tier: str
    context_tokens: int
    compiled_kernels: int
    """How many the cache lacked."""
    compile_s: float
    """What compiling or linking the kernels took."""


@dataclass(frozen=True, slots=True)
class Open(Message[Opened | Refused]):
    """Give a sequence a seat and promise it KV room for `promised_tokens` positions.

    logprobs: say how likely each sampled token was. top_logprobs: how many of the likeliest tokens
    to name with every log-probability. tokens: what is known of it, where prefixes may be shared;
    empty where all of it has to be computed.
    must_fit: take it even over budget, because nothing else runs. stop_ids: tokens that end it.
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


@dataclass(frozen=True, slots=True)
class Close(Message[None]):
    """A sequence has ended: free its seat. Twice is as good as once."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Step(Message[StepDone]):
    """Compute one forward pass of a batch. logits: sequences whose rows are handed out.

    goes_on: most likely the next step is the same with the tokens that this one samples. The device
    may begin it before it is asked, and drops it when something else is asked then.
    """

    step_id: int
    spans: tuple[Span, ...]
    logits: tuple[int, ...] = ()
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Cut(Message[None]):
    """The next step will be another one: begin none ahead. Twice is as good as once."""


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


DeviceMessage = Open | Recall | Close | Step | Cut | Shrink | DeviceStatsRequest

# -------------------------------------------------------------------------------------- scheduler


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request was taken in."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Collected:
    """What became known of a request since the last pull; none when it is unknown."""

    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Sequences and steps."""

    running: int
    waiting: int
    steps: int


@dataclass(frozen=True, slots=True)
class Submit(Message[Submitted]):
    """Queue a request. Refused with an error when it cannot be served at all."""

    request: Request


@dataclass(frozen=True, slots=True)
class Collect(Message[Collected]):
    """Answer as soon as something of the request is known."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Cancel(Message[None]):
    """The client has gone: end the request between two steps, in whatever state it is."""

    request_id: int


@dataclass(frozen=True, slots=True)
class SchedulerStatsRequest(Message[SchedulerStats]):
    """Say what runs."""


SchedulerMessage = Submit | Collect | Cancel | SchedulerStatsRequest
