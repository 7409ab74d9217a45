"""POST /v1/chat/completions.

Knows the shape of a chat reply, whole and in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request

from jitllm.api.answer import Answer
from jitllm.api.choices import Choice, Piece, Token
from jitllm.api.generation import answer
from jitllm.api.logprobs import chat_entry
from jitllm.api.models import Served
from jitllm.api.openapi import REPLIES, reply_of
from jitllm.api.prompts import chat_choices
from jitllm.api.schema import ChatReply, ChatRequest

router = APIRouter()

Plain = dict[str, Any]


@router.post(
    "/v1/chat/completions", responses={200: reply_of(ChatReply), **REPLIES}, tags=["openai"]
)
async def create_chat_completion(body: ChatRequest, request: Request) -> Answer:
    """The next turn of a conversation."""
    return answer(_Chat(), request, body)


class _Chat:
    """See `Form`. In chunks: its role first, its finish last."""

    prefix, param = "chatcmpl", "messages"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    async def choices(self, served: Served, body: ChatRequest, name: str) -> list[Choice]:
        return await chat_choices(served, body, name)

    def whole(self, served: Served, body: ChatRequest, text: str, tokens: Sequence[Token]) -> Plain:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": _logprobs(served, body, tokens)}

    def parts(
        self, served: Served, body: ChatRequest, piece: Piece, is_first: bool
    ) -> Iterator[tuple[Plain, Sequence[int]]]:
        nothing = _logprobs(served, body, ())
        if is_first:
            yield {"delta": {"role": "assistant", "content": ""}, "logprobs": nothing}, ()
        if piece.text or piece.tokens or (piece.ids and body.return_token_ids):
            logprobs = _logprobs(served, body, piece.tokens)
            yield {"delta": {"content": piece.text}, "logprobs": logprobs}, piece.ids
        if piece.is_last:
            yield {"delta": {}, "logprobs": nothing}, ()


def _logprobs(served: Served, body: ChatRequest, tokens: Sequence[Token]) -> Plain | None:
    if not body.logprobs:
        return None
    return {
        "content": [chat_entry(served.tokenizer, token) for token in tokens],
        "refusal": None,
    }
