"""What a device is told and asked, and what it answers: seats, steps, blocks, history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from actors.actor import Message
from actors.messages.pager import Frame
from actors.parts import Parts
from jitllm.devices.memory import Handle
from jitllm.engine import KvSpill, Logits, Sampling
from jitllm.memory.use import Phase
from jitllm.schedule.step import Span, SpanResult


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
    expert_hits: int = 0
    """Experts that steps needed and found there, where they come one by one."""


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
    """Sequences have ended: free their seats. Twice is as good as once."""

    sequences: tuple[int, ...]


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
class AskExperts(Message[Carried]):
    """Compute what experts of `block` say to the tokens of a step that the sender is at.

    Answered with rows of what `Crossing.gives` names. Whoever has the block need not be you. Raises
    `PageError`, with the rows of the step that need it, for an expert that cannot be read.
    """

    block: int
    row_of: tuple[int, ...]
    """The row of the step that each token is of."""
    phase: Phase
    """Of the step."""
    data: Carried
    """Rows of what `Crossing.takes` names."""
    inline: bool = False
    """Whether the answer leaves the node."""


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
    | AskExperts
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
