"""What happens to every request before and after its endpoint.

Knows ASGI. Names requests, asks for the key, reads the body within limits, and writes a line about
each request to the log.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jitllm.api.errors import ApiError, bad_request, explained
from jitllm.api.service import Limits
from jitllm.errors import one_line
from jitllm.log import logger

_log = logger("jitllm.api.access")

_OPEN_PATHS = ("/healthz", "/health")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_MAYBE_LONE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F])|.)",
    re.DOTALL,
)


class Edge:
    """The outermost layer of the app."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; everything else passes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"]}
        scope["jitllm.request_id"] = _request_id(headers)
        record = _Record(scope, send)
        try:
            await self._serve(scope, headers, receive, record.send)
        except ApiError as error:
            await record.fail(error, receive)
        except Exception as error:
            await record.fail(explained(error), receive)
        finally:
            record.write()

    async def _serve(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        head_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if head_bytes > (most := self._limits.max_head_bytes):
            raise ApiError(431, f"the headers are larger than {most} bytes", headers=_CLOSE)
        if self._limits.api_key and scope["path"] not in _OPEN_PATHS:
            _check_key(headers, self._limits.api_key)
        try:
            async with asyncio.timeout(self._limits.receive_timeout_s):
                body = await self._read(headers, receive)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within {self._limits.receive_timeout_s:g} s",
                headers=_CLOSE,
            ) from None
        if body is None:
            scope["jitllm.gone"] = True
            return
        _check_depth(body, self._limits.max_depth)
        _check_surrogates(body)
        await self._app(scope, _replayed(body, receive), send)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; None if the client went away meanwhile."""
        most = self._limits.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            raise _too_large(most)
        chunks: list[bytes] = []
        size, is_more = 0, True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > most:
                raise _too_large(most)
            is_more = message.get("more_body", False)
        return b"".join(chunks)


class _Record:
    """What is noted about a request."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._began_s = time.perf_counter()
        self._status = 0
        self._num_bytes = 0

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            request_id = self._scope["jitllm.request_id"].encode()
            headers = [*message.get("headers", ()), (b"x-request-id", request_id)]
            message = {**message, "headers": headers}
        else:
            self._num_bytes += len(message.get("body", b""))
        await self._send(message)

    async def fail(self, error: ApiError, receive: Receive) -> None:
        """Answer with an error, if nothing was answered yet."""
        if not self._status:
            await error.response()(self._scope, receive, self.send)

    def write(self) -> None:
        """One line into the log."""
        scope = self._scope
        client = scope.get("client")
        _log.info(
            "%s %s %s %d bytes %.1f ms client=%s model=%s id=%s%s",
            scope["method"],
            one_line(scope["path"])[:200],
            self._status or "-",
            self._num_bytes,
            (time.perf_counter() - self._began_s) * 1e3,
            f"{client[0]}:{client[1]}" if client else "-",
            scope.get("jitllm.model", "-"),
            scope["jitllm.request_id"],
            " client gone" if scope.get("jitllm.gone") else "",
        )


_CLOSE = {"Connection": "close"}


def _request_id(headers: dict[bytes, bytes]) -> str:
    """The client's name for its request, if it can be one; otherwise ours."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _check_key(headers: dict[bytes, bytes], api_key: str) -> None:
    given = headers.get(b"authorization", b"")
    scheme, _, key = given.partition(b" ")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), api_key.encode()):
        raise ApiError(
            401,
            "this server wants its API key as a bearer token",
            None,
            "invalid_api_key",
            {"WWW-Authenticate": "Bearer"},
        )


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", None, "too_large", _CLOSE)


def _check_depth(body: bytes, most: int) -> None:
    """Refuse JSON that is nested deeper: a parser would run out of stack."""
    if body.count(b"[") + body.count(b"{") <= most:
        return
    if depth_of(_STRING_OR_BRACKET.findall(body)) > most:
        raise bad_request(f"the body is nested more than {most} deep", None, "too_deep")


def _check_surrogates(body: bytes) -> None:
    """Refuse halves of surrogate pairs: no text has them, so no reply could repeat them."""
    if _MAYBE_LONE.search(body) and any(found[1] for found in _ESCAPE.finditer(body)):
        raise bad_request("the body has an escape that is half of a surrogate pair")


def depth_of(tokens: Iterable[bytes]) -> int:
    """The deepest nesting of brackets; strings count for nothing."""
    depth = deepest = 0
    for token in tokens:
        if token in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token in (b"]", b"}"):
            depth -= 1
    return deepest


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body` first."""
    was_given = False

    async def replay() -> Message:
        nonlocal was_given
        if was_given:
            return await receive()
        was_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
