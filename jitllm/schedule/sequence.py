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


@dataclass(slots=True)
class Sequence:
    """A token stream. `tokens` begins as the prompt and grows as the device samples.

    max_tokens: prompt and reply together, at most the context. chunk_tokens: most tokens of this
    sequence in one step, None for no limit of its own. all_outputs: every prompt position gives
    logits, not only the last.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    chunk_tokens: int | None = None
    all_outputs: bool = False
    num_computed: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens known and not computed."""
        return self.num_tokens - self.num_computed

    @property
    def promised_tokens(self) -> int:
        """Positions of KV that admission promises."""
        return min(self.max_tokens, self.num_prompt + MIN_PROMISED_TOKENS)
