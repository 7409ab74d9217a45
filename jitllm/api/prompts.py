"""Requests to token ids, and to the sequences that continue them.

Knows request bodies, tokenizers and chat templates. Tokenizing happens on a thread, because a long
text would keep everybody else waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from jitllm.api.choices import Choice, Echo
from jitllm.api.errors import bad_request
from jitllm.api.models import Served
from jitllm.api.schema import ChatRequest, CompletionRequest, GenerationRequest
from jitllm.engine import Outputs, Request
from jitllm.errors import ContextOverflow, JitllmError


async def chat_choices(served: Served, body: ChatRequest, name: str) -> list[Choice]:
    """The choices of a chat request; name: what the engine calls it. Raises ApiError for a base
    model or a conversation that its template refuses, ContextOverflow."""
    if served.chat is None:
        raise bad_request(
            f"{served.id} is a base model without a chat template; "
            "use /v1/completions, or convert it again with -chat-template FILE",
            "messages",
            "no_chat_template",
        )
    turns = [message.plain() for message in body.messages]
    try:
        text = await served.chat.rendered(turns)
    except JitllmError as error:  # whose mistake it is, the template or these messages, who knows
        raise bad_request(str(error), "messages") from error
    ids = await asyncio.to_thread(served.tokenizer.encode_rendered, text)
    request = _request(
        served,
        body,
        _checked(served, ids, "messages"),
        name,
        limit=body.limit,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
    )
    return _choices(served, body, [request], [None])


async def completion_choices(served: Served, body: CompletionRequest, name: str) -> list[Choice]:
    """The choices of a completion request, those of a prompt side by side; name: what the engine
    calls it. Raises ApiError for token ids that the model lacks and for an empty prompt,
    ContextOverflow."""
    prompts = [_checked(served, await _ids(served, prompt), "prompt") for prompt in body.prompts]
    wants_logprobs = body.logprobs is not None
    requests, echoes = [], []
    for given, ids in zip(body.prompts, prompts, strict=True):
        request = _request(
            served,
            body,
            ids,
            name,
            limit=body.limit,
            logprobs=wants_logprobs,
            top_logprobs=body.logprobs or 0,
        )
        echo = None
        if body.echo:
            text = given if isinstance(given, str) else served.tokenizer.text(ids)
            echo = Echo(text, wants_logprobs)
            if wants_logprobs:
                request = replace(request, outputs=Outputs.ALL)
        requests.append(request)
        echoes.append(echo)
    return _choices(served, body, requests, echoes)


def _choices(
    served: Served,
    body: GenerationRequest,
    requests: Sequence[Request],
    echoes: Sequence[Echo | None],
) -> list[Choice]:
    """n for each request; choice i is what the seed plus i alone would give."""
    return [
        Choice(
            served,
            _seeded(request, number),
            index=at * body.num_choices + number,
            prompt_index=at,
            stops=body.stops,
            echo=echo,
        )
        for at, (request, echo) in enumerate(zip(requests, echoes, strict=True))
        for number in range(body.num_choices)
    ]


def _seeded(request: Request, number: int) -> Request:
    """The request of the choice of that number."""
    if not number:
        return request
    seed = request.sampling.seed + number
    return replace(request, sampling=replace(request.sampling, seed=seed))


def _request(
    served: Served,
    body: GenerationRequest,
    ids: tuple[int, ...],
    name: str,
    *,
    limit: int | None,
    logprobs: bool,
    top_logprobs: int,
) -> Request:
    for token_id, _ in (sampling := body.sampling()).logit_bias:
        if token_id >= served.vocab_tokens:
            raise bad_request(
                f"logit_bias: token {token_id} of a vocabulary of {served.vocab_tokens}",
                "logit_bias",
            )
    stop_ids = frozenset() if body.ignore_eos else frozenset(served.header.stop_ids)
    namespace = body.cache_salt or ""
    return Request(
        ids,
        limit,
        sampling,
        stop_ids,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        priority=body.priority,
        name=name,
        namespace=namespace,
    )


async def _ids(served: Served, prompt: str | tuple[int, ...]) -> Sequence[int]:
    if isinstance(prompt, str):
        return await asyncio.to_thread(partial(served.tokenizer.encode, prompt))
    return prompt


def _checked(served: Served, ids: Sequence[int], param: str) -> tuple[int, ...]:
    """`ids`, if they can be a prompt of this model."""
    if not ids:
        raise bad_request(
            f"{param}: it is empty, and this model needs a token to go on from", param
        )
    if max(ids) >= served.vocab_tokens:
        raise bad_request(
            f"{param}: token {max(ids)} of a vocabulary of {served.vocab_tokens}", param
        )
    if len(ids) > served.context_tokens:
        raise ContextOverflow(len(ids), served.context_tokens)
    return tuple(ids)
