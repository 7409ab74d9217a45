"""Refusals and failures in OpenAI's shape, each with its HTTP status.

Knows `jitllm.errors` and HTTP. What is nobody's mistake but ours is logged and told without
details.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jitllm.errors import (
    BadContainer,
    ContextOverflow,
    DiskFull,
    Draining,
    HistoryError,
    JitllmError,
    NotConverted,
    OverBudget,
    PlacementError,
    QueueFull,
    UnknownSession,
    UnsupportedModel,
    UsageError,
)
from jitllm.log import logger

_log = logger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A refusal: status, message, the field it is about, and a word that programs can read."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object, as replies and streams carry it."""
        kind = _TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The reply that says so."""
        return JSONResponse(self.body(), self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """What the client can mend."""
    return ApiError(400, message, param, code)


def unknown_model(model_id: str, known: Sequence[str]) -> ApiError:
    """No model of that name is here."""
    here = f"loaded: {', '.join(known)}" if known else "no model is loaded"
    return ApiError(
        404, f"the model {model_id[:200]!r} does not exist; {here}", "model", "model_not_found"
    )


def explained(error: BaseException, param: str | None = None) -> ApiError:
    """Any exception as a refusal. param: the field that the prompt came in."""
    match error:
        case ApiError():
            return error
        case BaseExceptionGroup():
            return explained(error.exceptions[0], param)
        case ContextOverflow():
            return bad_request(str(error), param, "context_length_exceeded")
        case QueueFull():
            after = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(429, str(error), None, "queue_full", after)
        case Draining():
            return ApiError(503, str(error), "model", "draining", {"Retry-After": "5"})
        case OverBudget():
            return ApiError(503, str(error), None, "over_budget", {"Retry-After": "1"})
        case PlacementError():
            return ApiError(409, str(error), param, "placement")
        case UnknownSession():
            return ApiError(404, str(error), "session")
        case DiskFull() | HistoryError(is_lost=False):
            return ApiError(507, str(error), None, "disk_full")
        case UsageError():
            return bad_request(str(error), param)
        case BadContainer() | NotConverted() | UnsupportedModel():
            return bad_request(str(error), "path")
        case JitllmError():
            _log.error("a request failed: %s", error)
            return ApiError(500, str(error))
        case _:
            _log.error("a request failed", exc_info=error)
            return ApiError(500, "the server made a mistake; its log says which")


def install(app: FastAPI, field_names: frozenset[str]) -> None:
    """Let `app` answer every failure in OpenAI's shape. field_names: of all request bodies."""

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first: Mapping[str, Any] = error.errors()[0]
        return invalid_body(first, first["loc"][1:], field_names).response()

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return _refused(request, error).response()

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return explained(error).response()

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(ApiError, failed)
    app.add_exception_handler(JitllmError, failed)


def _refused(request: Request, error: HTTPException) -> ApiError:
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(404, f"there is nothing at {path[:200]}", None, "unknown_url")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return ApiError(
            405, f"{request.method} does not go with {path[:200]}", headers=error.headers
        )
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def invalid_body(
    first: Mapping[str, Any], where: Sequence[object], field_names: frozenset[str]
) -> ApiError:
    """The first thing that is wrong with a body, as Pydantic tells it, and where in the body."""
    kind = first["type"]
    if kind == "json_invalid":
        problem = first.get("ctx", {}).get("error", "")
        return bad_request(f"the body is no JSON: {problem} at character {where[0]}")
    if kind == "extra_forbidden":
        name = _path(where, frozenset(map(str, where)))
        return bad_request(f"there is no field {name[:200]!r} here", name, "unknown_field")
    message = str(first["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    param = _path(where, field_names)
    if param:
        return bad_request(f"{param}: {message}", param)
    if kind == "value_error":  # of fields that do not go together; the first word is one of them
        word = message.partition(" ")[0].rstrip(":")
        return bad_request(message, word if word in field_names else None)
    return bad_request(f"the body must be a JSON object, sent as application/json: {message}")


def _path(parts: Sequence[object], names: frozenset[str]) -> str:
    """`messages[0].role`; the tags that unions put between are left out."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in names:
            path += f".{part}" if path else str(part)
    return path
