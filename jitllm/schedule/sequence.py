"""One token stream with its own history.

A sequence has `num_computed` chasing `num_tokens`: prefill, a chunk, decode, resume and recovery
are the same rule. Knows ids and counts. Knows no pages, no devices, no text.
"""

from __future__ import annotations

from dataclasses import dataclass

# tokens of a sequence
#   [0, num_computed)            keys and values exist
#   [num_computed, num_tokens)   known, still to compute
#   [num_prompt, num_tokens)     generated

MIN_PROMISED_TOKENS = 512
"""Room promised at admission to a reply of unknown or greater length."""

MAX_PASSED = 32
"""Later arrivals that may be admitted before a sequence; then all others wait for it."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A token stream. `tokens` begins as the prompt and grows as the device samples.

    max_tokens: prompt and reply together, at most the context. chunk_tokens: most tokens of this
    sequence in one step, None for no limit of its own. all_outputs: every prompt position gives
    logits, not only the last. is_high: admitted before others. prefix: digests of the full pages
    of the prompt that need not be computed where they exist (`jitllm.memory.prefix`). num_cached:
    positions that existed when it was admitted. num_passed: later arrivals that were admitted
    before it. num_reported: positions whose outputs were handed out before a restart; they give
    none again. queued_s: since when it waits, on the scheduler's clock. num_before: tokens that it
    had generated when it was admitted last. namespace: what the names of its prefixes begin with.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    chunk_tokens: int | None = None
    all_outputs: bool = False
    is_high: bool = False
    prefix: tuple[bytes, ...] = ()
    num_computed: int = 0
    num_cached: int = 0
    num_passed: int = 0
    num_reported: int = 0
    queued_s: float = 0.0
    num_before: int = 0
    namespace: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_served(self) -> int:
        """Tokens sampled since it was admitted."""
        return self.num_generated - self.num_before

    @property
    def num_pending(self) -> int:
        """Tokens known and not computed."""
        return self.num_tokens - self.num_computed

    @property
    def is_replying(self) -> bool:
        """Whether the next step gives one more token of a reply that has begun."""
        return self.num_pending == 1 and self.num_tokens > self.num_prompt

    @property
    def is_overdue(self) -> bool:
        """Whether enough others were admitted before it."""
        return self.num_passed >= MAX_PASSED

    def restart(self) -> None:
        """Keys and values are gone: everything is computed again, and nothing reported twice."""
        self.num_reported = max(self.num_reported, self.num_computed)
        self.num_computed = 0

    @property
    def promised_tokens(self) -> int:
        """Positions of KV that admission promises: what is known, and room to go on."""
        return min(self.max_tokens, self.num_tokens + MIN_PROMISED_TOKENS)
