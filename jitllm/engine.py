"""The port: what HTTP, terminals and callers see of a served model.

Knows requests and replies. Knows no actor, no device and no text: tokens in, tokens out.
`compose.py` builds an Engine; `actors/client.py` implements it.
"""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

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
    tokens to name at every position that gives a log-probability, at most MAX_TOP_LOGPROBS.
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
    this delta except the first of the prompt. finish and usage come with the last delta; error
    with Finish.ERROR. top_logprobs, prompt_top_logprobs: for each entry of logprobs and
    prompt_logprobs the likeliest (token id, logprob) pairs, most likely first, if asked for.
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
    budget holds now; `fixed_bytes` is the dense region, scratch and KV promised."""

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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of a served model."""

    pages: Pages
    running: int
    waiting: int
    steps: int
    kv_bytes: int
    """Keys and values of sequences that run."""
    scratch_bytes: int
    threads: int
    tier: str
    context_tokens: int
    kv_idle_bytes: int = 0
    """Keys and values of prefixes that are kept in case a prompt begins with them."""


class Engine(Protocol):
    """A served model."""

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Submit and stream the reply. Closing the iterator cancels the request within a step.

        Raises ContextOverflow when the prompt does not fit the context, UsageError when a field
        cannot mean anything (a bias for no token of the vocabulary); the error names it.
        """

    async def set_budget(self, budget_bytes: int) -> Pages:
        """Change the host budget between two tokens; returns what was reached."""

    async def stats(self) -> EngineStats:
        """A snapshot."""

    async def close(self) -> None:
        """Stop every actor and give all memory back."""
