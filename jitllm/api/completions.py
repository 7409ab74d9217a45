"""POST /v1/completions.

Knows the shape of a text completion, whole and in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request

from jitllm.api import costs
from jitllm.api.answer import DONE, PING, Answer, Parts, as_json, event
from jitllm.api.choices import Choice, Piece, Token, pieces, run_all
from jitllm.api.logprobs import completion_logprobs
from jitllm.api.openapi import REPLIES, reply_of
from jitllm.api.prompts import completion_choices
from jitllm.api.schema import CompletionReply, CompletionRequest
from jitllm.api.service import Service, Serving, service_of

router = APIRouter()

Plain = dict[str, Any]


@router.post(
    "/v1/completions", responses={200: reply_of(CompletionReply), **REPLIES}, tags=["openai"]
)
async def create_completion(body: CompletionRequest, request: Request) -> Answer:
    """What goes on from one text, or from many."""
    service = service_of(request)
    make = _stream if body.stream else _whole
    return Answer(
        lambda: make(service, request, body),
        is_stream=bool(body.stream),
        send_timeout_s=service.limits.send_timeout_s,
        param="prompt",
    )


async def _whole(service: Service, request: Request, body: CompletionRequest) -> Parts:
    with service.session(request, body.model, "cmpl") as serving:
        choices = await completion_choices(serving.served, body)
        texts = [""] * len(choices)
        tokens: list[list[Token]] = [[] for _ in choices]
        ids: list[list[int]] = [[] for _ in choices]

        async def collect(choice: Choice, piece: Piece) -> None:
            texts[choice.index] += piece.text
            tokens[choice.index] += piece.tokens
            ids[choice.index] += piece.ids

        with service.counts.request(serving.served.id, choices):
            await run_all(choices, serving.session, collect, serving.served.max_together)
        replies = [
            _choice(serving, body, choice, texts[choice.index], tokens[choice.index])
            | {"finish_reason": costs.finish_reason(choice)}
            | costs.token_ids(body, ids[choice.index])
            for choice in choices
        ]
        yield as_json({**_envelope(serving), "choices": replies, **_costs(serving, choices)})


async def _stream(service: Service, request: Request, body: CompletionRequest) -> Parts:
    with service.session(request, body.model, "cmpl") as serving:
        choices = await completion_choices(serving.served, body)
        num_open, envelope = len(choices), _envelope(serving)
        no_usage = {"usage": None} if body.wants_usage else {}
        together = serving.served.max_together
        with service.counts.request(serving.served.id, choices):
            async with aclosing(
                pieces(choices, serving.session, together, service.limits.patience_s)
            ) as found:
                async for item in found:
                    if item is None:
                        yield PING
                        continue
                    choice, piece = item
                    reply = _choice(serving, body, choice, piece.text, piece.tokens)
                    reply |= costs.token_ids(body, piece.ids)
                    chunk = {**envelope, "choices": [reply], **no_usage}
                    if piece.is_last:
                        reply["finish_reason"] = costs.finish_reason(choice)
                        num_open -= 1
                        if not num_open and not body.wants_usage:
                            chunk["jitllm"] = costs.about(serving.served, choices)
                    yield event(chunk)
        if body.wants_usage:
            yield event({**envelope, "choices": [], **_costs(serving, choices)})
        yield DONE


def _choice(
    serving: Serving, body: CompletionRequest, choice: Choice, text: str, tokens: Sequence[Token]
) -> Plain:
    logprobs = None
    if body.logprobs is not None:
        logprobs = completion_logprobs(serving.served.tokenizer, tokens, body.logprobs)
    return {"index": choice.index, "text": text, "finish_reason": None, "logprobs": logprobs}


def _envelope(serving: Serving) -> Plain:
    return {
        "id": serving.session.id,
        "object": "text_completion",
        "created": serving.created_s,
        "model": serving.name,
    }


def _costs(serving: Serving, choices: Sequence[Choice]) -> Plain:
    return {"usage": costs.usage(choices), "jitllm": costs.about(serving.served, choices)}
