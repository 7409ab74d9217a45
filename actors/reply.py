"""A request under way: what its client gets of it, and its clock.

Knows requests, results of steps and deltas. Knows no device and no plan.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from actors.parts import Parts
from jitllm.engine import Delta, Finish, Logits, Request, Usage
from jitllm.schedule.sequence import Sequence
from jitllm.schedule.step import SpanResult


@dataclass(slots=True)
class Reply:
    """One sequence of a request. losses: deaths of devices that it has survived."""

    request: Request
    sequence: Sequence
    deltas: Parts[Delta]
    submitted_s: float
    started_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    is_done: bool = False
    losses: int = 0

    def usage(self, now_s: float) -> Usage:
        """What the reply cost so far."""
        started = self.started_s or now_s
        first = self.first_s or now_s
        return Usage(
            prompt_tokens=self.sequence.num_prompt,
            cached_tokens=min(self.sequence.num_cached, self.sequence.num_prompt),
            generated_tokens=self.sequence.num_generated,
            queued_s=started - self.submitted_s,
            prefill_s=first - started,
            decode_s=(self.last_s or first) - first,
            ttft_s=first - self.submitted_s,
        )

    def advance(self, result: SpanResult, now_s: float) -> Finish | None:
        """Take a sampled token in; says why the sequence ends, if it does."""
        sequence = self.sequence
        if result.token is None and sequence.num_pending:
            return None
        self.first_s = self.first_s or now_s
        if result.token is None:
            return Finish.LENGTH
        self.last_s = now_s
        if result.token in self.request.stop_ids:
            return Finish.STOP
        sequence.tokens.append(result.token)
        return Finish.LENGTH if sequence.num_tokens >= sequence.max_tokens else None

    def delta(self, result: SpanResult, finish: Finish | None, logits: Logits | None) -> Delta:
        """What a step made known of it, after `advance`."""
        is_token = result.token is not None and finish is not Finish.STOP
        wants_top = self.request.logprobs and self.request.top_logprobs > 0
        # With the first token too: a client may leave before the last one.
        has_usage = finish is not None or (is_token and self.sequence.num_generated == 1)
        return Delta(
            tokens=(result.token,) if is_token and result.token is not None else (),
            logprobs=(result.logprob,) if is_token and self.request.logprobs else (),
            logits=logits,
            prompt_logprobs=result.prompt_logprobs,
            top_logprobs=(result.top_logprobs,) if is_token and wants_top else (),
            prompt_top_logprobs=result.prompt_top_logprobs,
            finish=finish,
            usage=self.usage(time.perf_counter()) if has_usage else None,
        )
