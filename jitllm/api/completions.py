"""POST /v1/completions.

Knows the shape of a text completion, whole and in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request

from jitllm.api.answer import Answer
from jitllm.api.choices import Choice, Piece, Token
from jitllm.api.generation import answer
from jitllm.api.logprobs import completion_logprobs
from jitllm.api.models import Served
from jitllm.api.openapi import REPLIES, reply_of
from jitllm.api.prompts import completion_choices
from jitllm.api.schema import CompletionReply, CompletionRequest

router = APIRouter()

Plain = dict[str, Any]


@router.post(
    "/v1/completions", responses={200: reply_of(CompletionReply), **REPLIES}, tags=["openai"]
)
async def create_completion(body: CompletionRequest, request: Request) -> Answer:
    """What goes on from one text, or from many."""
    return answer(_Completion(), request, body)


class _Completion:
    """See `Form`."""

    prefix, param = "cmpl", "prompt"
    kind = chunk_kind = "text_completion"

    async def choices(self, served: Served, body: CompletionRequest, name: str) -> list[Choice]:
        return await completion_choices(served, body, name)

    def whole(
        self, served: Served, body: CompletionRequest, text: str, tokens: Sequence[Token]
    ) -> Plain:
        logprobs = None
        if body.logprobs is not None:
            logprobs = completion_logprobs(served.tokenizer, tokens, body.logprobs)
        return {"text": text, "logprobs": logprobs}

    def parts(
        self, served: Served, body: CompletionRequest, piece: Piece, is_first: bool
    ) -> Iterator[tuple[Plain, Sequence[int]]]:
        yield self.whole(served, body, piece.text, piece.tokens), piece.ids
