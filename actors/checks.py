"""What a scheduler refuses before anything is computed, so that no request can fail a step.

Knows requests and a model's two limits. Remembers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jitllm.engine import MAX_TOP_LOGPROBS, Request, Sampling
from jitllm.errors import ContextOverflow, UsageError

_F32_MAX = (2 - 2**-23) * 2.0**127
_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty"),
)
"""Settings that a sampling record holds as f32."""


def check(request: Request, *, vocab: int, context_tokens: int) -> None:
    """Raise ContextOverflow or UsageError when `request` cannot be served at all."""
    num_prompt = len(request.prompt)
    if not num_prompt:
        raise UsageError("the prompt is empty", "give at least one token")
    if num_prompt > context_tokens:
        raise ContextOverflow(num_prompt, context_tokens)
    bad = next((t for t in request.prompt if not 0 <= t < vocab), None)
    if bad is not None:
        raise UsageError(f"token id {bad} is not in the vocabulary of {vocab} tokens")
    problem = next(_problems(request, vocab), None)
    if problem is not None:
        raise UsageError(problem)


def _problems(request: Request, vocab: int) -> Iterator[str]:
    if request.max_tokens is not None and request.max_tokens < 0:
        yield f"max_tokens is {request.max_tokens}, not 0 or more"
    if request.chunk_tokens is not None and request.chunk_tokens < 1:
        yield f"chunk_tokens is {request.chunk_tokens}, not 1 or more"
    if not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        yield f"top_logprobs is {request.top_logprobs}, not 0 to {MAX_TOP_LOGPROBS}"
    yield from _sampling_problems(request.sampling, vocab)


def _sampling_problems(sampling: Sampling, vocab: int) -> Iterator[str]:
    for name in _NUMBERS:
        number = getattr(sampling, name)
        if not abs(number) <= _F32_MAX:
            yield f"{name} is {number}, no number of 32 bits"
    if not -(2**31) <= sampling.top_k < 2**31:
        yield f"top_k is {sampling.top_k}, no integer of 32 bits"
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab:
            yield f"logit_bias: token id {token} is not in the vocabulary of {vocab} tokens"
        if not (abs(bias) <= _F32_MAX or bias == -math.inf):
            yield f"logit_bias: {bias} for token id {token} is no number of 32 bits"
