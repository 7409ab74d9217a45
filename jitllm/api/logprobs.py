"""Log-probabilities in the two forms that OpenAI gave them.

Knows tokens and how they are spelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jitllm.api.choices import Token

if TYPE_CHECKING:
    from jitllm.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON lacks."""


def chat_entry(tokenizer: Tokenizer, token: Token) -> dict[str, Any]:
    """An entry of `logprobs.content`."""
    return {
        **_likely(tokenizer, token.id, token.logprob),
        "top_logprobs": [_likely(tokenizer, id, logprob) for id, logprob in token.top],
    }


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[Token], num_top: int
) -> dict[str, Any]:
    """`logprobs` of a completion: lists side by side.

    The likeliest tokens are keyed by their text, and the token itself is always among them.
    """
    return {
        "tokens": [_name(tokenizer, token.id) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(tokenizer, token, num_top) for token in tokens],
        "text_offset": [token.start for token in tokens],
    }


def _top(tokenizer: Tokenizer, token: Token, num_top: int) -> dict[str, float | None] | None:
    if token.logprob is None or not num_top:
        return None
    top: dict[str, float | None] = {}
    for token_id, logprob in (*token.top, (token.id, token.logprob)):
        top.setdefault(_name(tokenizer, token_id), _finite(logprob))  # of equal texts the likelier
    return top


def _likely(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    piece = _piece(tokenizer, token_id)
    return {
        "token": piece.decode(errors="replace"),
        "logprob": _finite(logprob),
        "bytes": list(piece),
    }


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of a token; one that is a part of a character is named by its bytes."""
    piece = _piece(tokenizer, token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _piece(tokenizer: Tokenizer, token_id: int) -> bytes:
    return tokenizer.piece(token_id) if token_id < tokenizer.num_tokens else b""


def _finite(logprob: float | None) -> float | None:
    if logprob is None or math.isnan(logprob):
        return None
    return min(max(logprob, LEAST), 0.0) if logprob < 0 else logprob
