"""The port: what HTTP, terminals and callers see of a served model.

Knows requests and replies. Knows no actor, no device and no text: tokens in, tokens out.
`compose.py` builds an Engine; `actors/client.py` implements it.
"""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, Protocol

from jitllm.memory.use import ExpertUse, Phase, PhaseUse
from jitllm.schedule.placement import Decline, Placement
from jitllm.schedule.seam_trial import SeamTrial

MAX_TOP_LOGPROBS = 20
"""Likeliest tokens that can be named at a position."""

TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, natural logarithm of its probability), most likely first."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. The defaults are greedy.

    temperature: 0 takes the most likely token. top_k: 0 keeps all. top_p: 1 keeps all. min_p: 0
    keeps all. repeat_penalty: 1 is none, over the last `repeat_last_n`
    tokens (-1: all of them). seed: replies with
    the same seed are equal, whatever else runs beside them. logit_bias: (token id, added to its
    logit before anything else).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalises(self) -> bool:
        """Whether what was said before makes a difference."""
        penalties = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0)


class Priority(StrEnum):
    """Which waiting request is admitted first."""

    NORMAL = "normal"
    HIGH = "high"


class Outputs(StrEnum):
    """Which positions of the prompt give logits besides the last."""

    LAST = "last"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Request:
    """One call: continue `prompt`.

    prompt: token ids, at least one. max_tokens: tokens to generate; None goes on until a stop id
    or the end of the context; 0 only computes the prompt. stop_ids: ids that end the reply (they
    are not part of it). logits: hand out raw f32 logits (`Delta.logits`) of every output
    position. outputs ALL: every prompt position is an output, and `Delta.prompt_logprobs` says
    how likely each prompt token was after the ones before it. logprobs: say how likely each
    generated token was (it costs a pass over the vocabulary). chunk_tokens: most prompt tokens
    computed in one step; None leaves it to the engine. top_logprobs: how many of the likeliest
    tokens to name at every position that gives a log-probability, at most MAX_TOP_LOGPROBS. name:
    what the engine is asked about it by; requests that have one in common are as one. namespace:
    prefixes are shared with requests of the same one, and with no others.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    logits: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    priority: Priority = Priority.NORMAL
    outputs: Outputs = Outputs.LAST
    chunk_tokens: int | None = None
    name: str = ""
    namespace: str = ""


class Finish(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a reply cost. Times in seconds, from the moment the request was submitted.

    cached_tokens: tokens of the prompt whose keys and values existed already.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0


class Logits:
    """A handle to f32 rows [rows, vocab] that the receiver owns.

    Within one process the handle is the memory itself; a copy travels when it is pickled.
    """

    __slots__ = ("_memory", "rows", "vocab")

    def __init__(self, memory: mmap.mmap | bytes, rows: int, vocab: int) -> None:
        self._memory = memory
        self.rows = rows
        self.vocab = vocab

    def view(self) -> memoryview[float]:
        """The rows as a memoryview of format "f", shape (rows, vocab)."""
        data = memoryview(self._memory)[: self.rows * self.vocab * 4].cast("B")
        return data.cast("f", [self.rows, self.vocab])

    def __reduce__(self) -> tuple[Any, ...]:
        return Logits, (bytes(self._memory[: self.rows * self.vocab * 4]), self.rows, self.vocab)


@dataclass(frozen=True, slots=True)
class Delta:
    """What became known since the last delta.

    tokens, logprobs: generated ids and, if asked for, the natural logarithm of their
    probability before penalties, temperature and cuts. logits: rows for the output positions of
    this delta, if asked for. prompt_logprobs: for `Outputs.ALL`, one per prompt position of
    this delta except the first of the prompt. usage comes with the first token and with the last
    delta, that far each time; finish comes with the last delta, error with Finish.ERROR.
    top_logprobs, prompt_top_logprobs: for each entry of logprobs and prompt_logprobs the likeliest
    (token id, logprob) pairs, most likely first, if asked for.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    logits: Logits | None = None
    prompt_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Pages:
    """What paging did since the engine started. `frames` is how many of the largest blocks the
    budget holds now; `fixed_bytes` is the dense region, scratch and KV promised. experts: where
    they are paged one by one; blocks come without them then. phases: what was read in each."""

    blocks: int
    resident: int
    frames: int
    page_ins: int
    evictions: int
    bytes_read: int
    budget_bytes: int
    fixed_bytes: int
    over_budget_bytes: int
    read_s: float = 0.0
    wait_s: float = 0.0
    experts: ExpertUse | None = None
    phases: Mapping[Phase, PhaseUse] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether nothing has to go for anything else."""
        has_experts = self.experts is None or self.experts.room_bytes >= self.experts.all_bytes
        return self.frames >= self.blocks and has_experts


@dataclass(frozen=True, slots=True)
class Moved:
    """What moving some blocks came to.

    pause_s: from the end of the last step on the way before to when the next one could begin.
    prepare_s: all the time before that. bytes_before, bytes_paused: keys and values that travelled
    while replies went on, and in the pause. weight_bytes: weights that were copied or read, by
    `weights_from` (blocks by where their weights came from). pages: pages of the destination that
    history went into. tokens_meanwhile: sampled since the move was asked for.
    """

    blocks: str
    to: str
    placement: str
    epoch: int
    pause_s: float
    prepare_s: float
    bytes_before: int
    bytes_paused: int
    weight_bytes: int
    weights_from: dict[str, int]
    pages: int
    rounds: int
    tokens_meanwhile: int


@dataclass(frozen=True, slots=True)
class MoveTotals:
    """What all moves came to together; see `Moved`."""

    pause_s: float = 0.0
    prepare_s: float = 0.0
    bytes_before: int = 0
    bytes_paused: int = 0
    weight_bytes: int = 0
    pages: int = 0
    tokens_meanwhile: int = 0

    def plus(self, moved: Moved) -> MoveTotals:
        """With one move more."""
        sums = {
            field.name: getattr(self, field.name) + getattr(moved, field.name)
            for field in fields(self)
        }
        return MoveTotals(**sums)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a model has on one device.

    node: of the cluster, empty for this host. blocks: how many of them the device computes, and the
    head if `has_head`. placed, placed_bytes: blocks whose weights are served there, those that are
    on their way to it too. resident, frames: of those, how many are in memory and how many can be.
    page_tokens: positions in a page of keys and values. kv_pages: pages that sequences hold, and
    kv_bytes: what those in memory take. fixed_bytes: what is never paged. A device with memory of
    its own has a budget of its own: allocated_bytes is what its driver took, 0 for a CPU.
    """

    name: str
    node: str
    threads: int
    tier: str
    blocks: int
    has_head: bool
    placed: int
    placed_bytes: int
    resident: int
    frames: int
    page_tokens: int
    kv_pages: int
    kv_bytes: int
    kv_idle_bytes: int
    scratch_bytes: int
    budget_bytes: int
    fixed_bytes: int
    allocated_bytes: int = 0


ParkedIn = Literal["disk", "memory"]
"""Where keys and values wait while their request does."""


class SequenceState(StrEnum):
    """What becomes of a sequence. parked: it waits until somebody wants it to go on."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"


@dataclass(frozen=True, slots=True)
class SessionState:
    """One sequence under way; those of one request have its name.

    kv_bytes: its keys and values, wherever they are. parked_in, parked_bytes: where they wait and
    what of them; empty and 0 while they are in pages, and before there are any.
    """

    name: str
    state: SequenceState
    prompt_tokens: int
    generated_tokens: int
    kv_bytes: int
    parked_in: str = ""
    parked_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ParkTotals:
    """What parking came to so far.

    parks: of them `slices` made way for others, and the rest was asked for. resumes: sequences
    whose keys and values came back. bytes_out, bytes_in: of keys and values. failures: parks that
    did not come to pass, and histories that could not be read any more. park_s, resume_s: time that
    all of them took.
    """

    parks: int = 0
    slices: int = 0
    resumes: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    failures: int = 0
    park_s: float = 0.0
    resume_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KvSpill:
    """Keys and values that a budget has no room for in memory.

    num_bytes: what is in a file now. bytes_read, bytes_written: of pages, so far.
    """

    num_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def plus(self, other: KvSpill) -> KvSpill:
        """Both together."""
        return KvSpill(
            self.num_bytes + other.num_bytes,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )


@dataclass(frozen=True, slots=True)
class PrefixTotals:
    """What the prefix cache on disk did so far.

    hits: sequences that began with something from it, `whole` of them with all of their prompt;
    misses: those that found nothing. tokens: positions that were not computed for it. files: that
    were written, bytes_out, bytes_in: with what in them, and read. evictions: files that went
    because all of them took too much. damaged: files that were not whole, or no files of the cache.
    failures: reads and writes that the system refused. skipped: prefixes that were not stored
    because too much waited for the disk, or what they build on has no room. restore_s: time that
    filling in took.
    """

    hits: int = 0
    whole: int = 0
    misses: int = 0
    tokens: int = 0
    files: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    evictions: int = 0
    damaged: int = 0
    failures: int = 0
    skipped: int = 0
    restore_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """What a scheduler counts: sequences, steps, where blocks are, and what became of devices."""

    running: int
    waiting: int
    steps: int
    placement: Placement
    declines: tuple[Decline, ...] = ()
    """What was asked for of the placement and is not so."""
    moves: int = 0
    moved_blocks: int = 0
    """In all moves; the head counts as one."""
    move_totals: MoveTotals = field(default_factory=MoveTotals)
    last_move: Moved | None = None
    sent_home: int = 0
    """Blocks that went to the host because keys and values needed their room on a device."""
    brought_back: int = 0
    """Of those, how many came back once there was room."""
    seam_trials: tuple[SeamTrial, ...] = ()
    """Fewer blocks on a device, against what there was before; see `-tune-seam`."""
    losses: int = 0
    """Deaths of devices."""
    recovery_s: float = 0.0
    """After the last of them, until devices were ready again."""
    lost: tuple[str, ...] = ()
    """Devices that did not come back; others compute their blocks."""
    is_draining: bool = False
    """Whether it takes no more requests."""
    parked: int = 0
    """Sequences that wait until somebody wants them to go on."""
    parked_disk_bytes: int = 0
    """Keys and values that wait on disk, also of sequences that made way for others."""
    parked_memory_bytes: int = 0
    """The same in host memory; they count as `Pages.fixed_bytes`."""
    park_totals: ParkTotals = field(default_factory=ParkTotals)
    prefix_disk_bytes: int = 0
    """What the prefix cache takes on disk, for all models that have it in the same folder."""
    prefix_waiting_bytes: int = 0
    """What is on its way there; it counts as `Pages.fixed_bytes`."""
    prefix_totals: PrefixTotals = field(default_factory=PrefixTotals)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(SchedulerStats):
    """A snapshot of a served model: what its scheduler counts, and what its devices hold."""

    pages: Pages
    kv_bytes: int
    """Keys and values of sequences that run, as far as they are in memory."""
    scratch_bytes: int
    threads: int
    tier: str
    context_tokens: int
    kv_idle_bytes: int = 0
    """Keys and values of prefixes that are kept in case a prompt begins with them."""
    kv_spill: KvSpill = KvSpill()
    devices: tuple[DeviceUse, ...] = ()
    """Those that live, in the order of -devices."""


class Engine(Protocol):
    """A served model."""

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Submit and stream the reply. Closing the iterator cancels the request within a step.

        Raises ContextOverflow when the prompt does not fit the context, UsageError when a field
        cannot mean anything (a bias for no token of the vocabulary); the error names it.
        """

    async def set_budget(self, budget_bytes: int) -> Pages:
        """Change the host budget between two tokens; returns what was reached."""

    async def move(
        self, blocks: Iterable[int], to: str, *, head: bool = False, is_live: bool = True
    ) -> Moved:
        """Move blocks, and the head if asked, to a device; answered when it owns them.

        Replies go on meanwhile, unless `is_live` is off. Raises PlacementError, and nothing has
        changed.
        """

    async def place(self, placement: str, *, strict: bool = False) -> tuple[Moved, ...]:
        """Go from the present placement to what a map (`0-8=cpu:0,*=cpu:1!`) says, with as few
        moves as that takes; what it does not name stays where it is.

        Pins hold nothing back here. Without `strict`, what cannot be is left as it is and reported
        in `EngineStats.declines`; with it, PlacementError is raised and nothing has changed. Raises
        UsageError for what is no map, PlacementError for a device that there is not.
        """

    async def park(self, name: str, to: ParkedIn = "disk") -> tuple[SessionState, ...]:
        """Let the sequences of a request wait until they are resumed, without pages.

        Their keys and values go to a file or to host memory, byte for byte; those that have none
        yet just wait. Streams pause. Parked ones stay as they are. Raises UnknownSession, and what
        hinders it (DiskFull, say); then what is not parked yet goes on.
        """

    async def resume(self, name: str) -> tuple[SessionState, ...]:
        """Let the sequences of a request go on, once it is their turn; nothing is computed again.

        Those that are not parked stay as they are. Raises UnknownSession.
        """

    async def sessions(self) -> tuple[SessionState, ...]:
        """Every sequence under way, in order of arrival."""

    async def drain(self, *, is_draining: bool = True) -> None:
        """Refuse requests from now on with `Draining`, or take them again; those under way go on.

        It holds for everybody who uses the model.
        """

    async def stats(self) -> EngineStats:
        """A snapshot."""

    async def close(self) -> None:
        """Stop every actor and give all memory back."""
