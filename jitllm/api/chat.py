"""POST /v1/chat/completions.

Knows the shape of a chat reply, whole and in chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request

from jitllm.api import costs
from jitllm.api.answer import DONE, PING, Answer, Parts, as_json, event
from jitllm.api.choices import Choice, Piece, Token, pieces, run_all
from jitllm.api.logprobs import chat_entry
from jitllm.api.openapi import REPLIES, reply_of
from jitllm.api.prompts import chat_choices
from jitllm.api.schema import ChatReply, ChatRequest
from jitllm.api.service import Service, Serving, service_of

router = APIRouter()

Plain = dict[str, Any]


@router.post(
    "/v1/chat/completions", responses={200: reply_of(ChatReply), **REPLIES}, tags=["openai"]
)
async def create_chat_completion(body: ChatRequest, request: Request) -> Answer:
    """The next turn of a conversation."""
    service = service_of(request)
    make = _stream if body.stream else _whole
    return Answer(
        lambda: make(service, request, body),
        is_stream=bool(body.stream),
        send_timeout_s=service.limits.send_timeout_s,
        param="messages",
    )


async def _whole(service: Service, request: Request, body: ChatRequest) -> Parts:
    with service.session(request, body.model, "chatcmpl") as serving:
        choices = await chat_choices(serving.served, body)
        texts = [""] * len(choices)
        tokens: list[list[Token]] = [[] for _ in choices]
        ids: list[list[int]] = [[] for _ in choices]

        async def collect(choice: Choice, piece: Piece) -> None:
            texts[choice.index] += piece.text
            tokens[choice.index] += piece.tokens
            ids[choice.index] += piece.ids

        with service.counts.request(serving.served.id, choices):
            await run_all(choices, serving.session, collect, serving.served.max_together)
        yield as_json(
            {
                **_envelope(serving, "chat.completion"),
                "choices": [
                    {
                        "index": choice.index,
                        "message": {
                            "role": "assistant",
                            "content": texts[choice.index],
                            "refusal": None,
                        },
                        "finish_reason": costs.finish_reason(choice),
                        "logprobs": _logprobs(serving, body, tokens[choice.index]),
                        **costs.token_ids(body, ids[choice.index]),
                    }
                    for choice in choices
                ],
                "usage": costs.usage(choices),
                "jitllm": costs.about(serving.served, choices),
            }
        )


async def _stream(service: Service, request: Request, body: ChatRequest) -> Parts:
    with service.session(request, body.model, "chatcmpl") as serving:
        choices = await chat_choices(serving.served, body)
        chunks = _Chunks(serving, body, choices)
        together = serving.served.max_together
        with service.counts.request(serving.served.id, choices):
            async with aclosing(
                pieces(choices, serving.session, together, service.limits.patience_s)
            ) as found:
                async for item in found:
                    if item is None:
                        yield PING
                        continue
                    for chunk in chunks.of(*item):
                        yield event(chunk)
        if body.wants_usage:
            yield event(chunks.usage())
        yield DONE


class _Chunks:
    """The chunks of one streamed reply."""

    def __init__(self, serving: Serving, body: ChatRequest, choices: list[Choice]) -> None:
        self._serving = serving
        self._body = body
        self._choices = choices
        self._begun: set[int] = set()
        self._num_open = len(choices)
        self._envelope = _envelope(serving, "chat.completion.chunk")

    def of(self, choice: Choice, piece: Piece) -> Iterator[Plain]:
        """What a piece of a choice adds: its role first, its finish last."""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        if piece.text or piece.tokens or (piece.ids and self._body.return_token_ids):
            yield self._chunk(choice, {"content": piece.text}, tokens=piece.tokens, ids=piece.ids)
        if piece.is_last:
            yield self._last(choice)

    def usage(self) -> Plain:
        """The chunk without choices that ends a stream if the client wants one."""
        return {
            **self._envelope,
            "choices": [],
            "usage": costs.usage(self._choices),
            "jitllm": costs.about(self._serving.served, self._choices),
        }

    def _last(self, choice: Choice) -> Plain:
        chunk = self._chunk(choice, {}, costs.finish_reason(choice))
        self._num_open -= 1
        if not self._num_open and not self._body.wants_usage:
            chunk["jitllm"] = costs.about(self._serving.served, self._choices)
        return chunk

    def _chunk(
        self,
        choice: Choice,
        delta: Plain,
        finish: str | None = None,
        tokens: Iterable[Token] = (),
        ids: Iterable[int] = (),
    ) -> Plain:
        chunk = {
            **self._envelope,
            "choices": [
                {
                    "index": choice.index,
                    "delta": delta,
                    "finish_reason": finish,
                    "logprobs": _logprobs(self._serving, self._body, tokens),
                    **costs.token_ids(self._body, ids),
                }
            ],
        }
        return chunk | {"usage": None} if self._body.wants_usage else chunk


def _envelope(serving: Serving, kind: str) -> Plain:
    return {
        "id": serving.session.id,
        "object": kind,
        "created": serving.created_s,
        "model": serving.name,
    }


def _logprobs(serving: Serving, body: ChatRequest, tokens: Iterable[Token]) -> Plain | None:
    if not body.logprobs:
        return None
    tokenizer = serving.served.tokenizer
    return {"content": [chat_entry(tokenizer, token) for token in tokens], "refusal": None}
