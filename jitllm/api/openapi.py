"""What the OpenAPI document says about replies that FastAPI does not see being made."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jitllm.api.schema import ErrorReply

Response = dict[str, Any]

REPLIES: dict[int | str, Response] = {
    "4XX": {"model": ErrorReply, "description": "Refused; `param` names the field."},
    "5XX": {"model": ErrorReply, "description": "Failed."},
}

_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "A chunk as JSON; at last [DONE]."}},
}
"""Of a stream, whose schema says what each of its events is."""


def reply_of(model: type[BaseModel]) -> Response:
    """A reply that is JSON, or the same in server-sent events."""
    return {
        "model": model,
        "description": "The reply; with `stream` as server-sent events.",
        "content": {"text/event-stream": {"itemSchema": _EVENT}},
    }
