"""What a reply cost: OpenAI's `usage`, and the `jitllm` object with places, times and rates.

Knows choices that have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jitllm.api.choices import Choice
from jitllm.api.models import Served
from jitllm.api.schema import GenerationRequest
from jitllm.engine import Finish

Plain = dict[str, Any]


def finish_reason(choice: Choice) -> str:
    """As OpenAI calls it; a reply that was cancelled has stopped."""
    return "length" if choice.finish is Finish.LENGTH else "stop"


def token_ids(body: GenerationRequest, ids: Iterable[int]) -> Plain:
    """The tokens of a reply, or of a part of it, for those who asked for them."""
    return {"token_ids": list(ids)} if body.return_token_ids else {}


def usage(choices: Sequence[Choice]) -> Plain:
    """Every prompt once, every choice."""
    firsts = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    prompt = sum(len(choice.request.prompt) for choice in firsts)
    generated = sum(choice.num_tokens for choice in choices)
    cached = sum(choice.costs().cached_tokens for choice in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def about(served: Served, choices: Sequence[Choice]) -> Plain:
    """The `jitllm` object. Of several choices: the longest times, the rates of all together."""
    costs = [choice.costs() for choice in choices]
    restored = sum(cost.cached_tokens for cost in costs)
    computed = sum(len(choice.request.prompt) for choice in choices) - restored
    decoded = sum(max(choice.num_tokens - 1, 0) for choice in choices)
    prefill_s = max(cost.prefill_s for cost in costs)
    decode_s = max(cost.decode_s for cost in costs)
    return {
        **served.where,
        "queued_ms": round(max(cost.queued_s for cost in costs) * 1e3, 3),
        "prefill_ms": round(prefill_s * 1e3, 3),
        "decode_ms": round(decode_s * 1e3, 3),
        "prefill_tokens_per_second": _rate(computed, prefill_s),
        "decode_tokens_per_second": _rate(decoded, decode_s),
        "restored_tokens": restored,
        "seeds": [choice.request.sampling.seed for choice in choices],
        "cancelled": any(choice.finish is Finish.CANCELLED for choice in choices),
    }


def _rate(num: int, seconds: float) -> float:
    return round(num / seconds, 3) if seconds > 0 else 0.0
