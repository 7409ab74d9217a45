"""A client of a server, on the standard library alone: the control plane, and replies as they come.

Knows HTTP/1.1 and the shape of our errors. An answer that is a refusal becomes a `ServerError`. A
call is a connection of its own: closing it is how a client says that it wants no more.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from jitllm.errors import JitllmError, UsageError, one_line

if TYPE_CHECKING:
    from ssl import SSLContext

KEY_VARIABLE = "JITLLM_API_KEY"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8080
DEFAULT_ADDRESS = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
CONTROL = "jitllm/v1"
"""Where the control plane begins."""

LOAD_TIMEOUT_S = 600.0
"""How long an answer, or the next part of a stream, may take: loading a large model is slow."""

_MAX_LINE_BYTES = 64 << 10
_MAX_HEAD_LINES = 256
_MAX_ANSWER_BYTES = 64 << 20
_MAX_REFUSAL_BYTES = 1 << 20
_READ_BYTES = 64 << 10
_DONE = "[DONE]"


class ServerError(JitllmError):
    """A server refused. status: of HTTP; param: the field that it is about; retry_after_s: when to
    come again, if it said so."""

    def __init__(
        self,
        status: int,
        problem: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(problem)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class Server:
    """A server somewhere. api_key: what it wants; by default that of $JITLLM_API_KEY.

    Every method raises `ServerError` for a refusal, and `JitllmError` when nobody answers or the
    answer makes no sense.
    """

    def __init__(self, addr: str, api_key: str = "") -> None:
        self.url = base_url(addr)
        self._key = api_key or os.environ.get(KEY_VARIABLE, "")
        if not (self._key.isascii() and self._key.isprintable()):
            raise UsageError("the API key has letters that no header can hold")

    async def get(self, path: str, **query: object) -> Any:
        """What is at `path` of the control plane."""
        return await self._call("GET", path, query=query)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to `body`."""
        return await self._call("POST", path, body={} if body is None else body)

    async def delete(self, path: str, **query: object) -> Any:
        """The answer to removing what is at `path`."""
        return await self._call("DELETE", path, query=query)

    async def events(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Any, None]:
        """The JSON of each server-sent event that answers `body`, until the server says it is done.

        path: from the root. Closing it closes the connection.
        """
        async with self._exchange("POST", path, body, headers) as answer:
            async with aclosing(answer.lines()) as lines:
                async for line in lines:
                    kind, _, data = line.partition(":")
                    if kind != "data":
                        continue
                    if data.strip() == _DONE:
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise _refusal(500, event)
                    yield event
            raise ValueError("it ended in the middle of a reply")

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Any:
        given = {key: value for key, value in (query or {}).items() if value is not None}
        path = f"{CONTROL}/{path}" + (f"?{urlencode(given)}" if given else "")
        async with self._exchange(method, path, body) as answer:
            return json.loads(await answer.body(_MAX_ANSWER_BYTES))

    @asynccontextmanager
    async def _exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[_Answer]:
        """A request and the head of its answer; what the body cannot mean is explained, too."""
        reader, writer = await self._connect()
        try:
            writer.write(self._request(method, path, body, headers or {}))
            with suppress(ConnectionError):  # it may have refused before it heard everything
                await writer.drain()
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                answer = await _Answer.begin(reader)
                if answer.status >= 400:
                    raise await answer.refusal()
            yield answer
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            what = str(error) or type(error).__name__
            raise JitllmError(f"{self.url} gave no answer that makes sense: {what}") from error
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                return await asyncio.open_connection(
                    parts.hostname,
                    parts.port or (443 if secure else 80),
                    ssl=_ssl_context() if secure else None,
                    limit=_MAX_LINE_BYTES,
                )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            raise JitllmError(
                f"no server answers at {self.url}: {reason}",
                "start one with `jitllmd serve`, or say where it is with -addr",
            ) from None

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        head = {
            "Host": urlsplit(self.url).netloc,
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            "Connection": "close",
            **headers,
        }
        if self._key:
            head["Authorization"] = f"Bearer {self._key}"
        lines = [f"{method} /{path} HTTP/1.1", *(f"{name}: {head[name]}" for name in head), "", ""]
        return "\r\n".join(lines).encode("ascii") + data


@dataclass(slots=True)
class _Answer:
    """The answer to one request, whose body is still to be read. Raises ValueError, EOFError and
    OSError for what is no HTTP."""

    status: int
    reason: str
    headers: dict[str, str]
    reader: asyncio.StreamReader

    @classmethod
    async def begin(cls, reader: asyncio.StreamReader) -> _Answer:
        """Read its head."""
        version, _, rest = (await _line(reader)).partition(" ")
        status, _, reason = rest.partition(" ")
        if not (version.startswith("HTTP/1.") and status.isascii() and status.isdecimal()):
            raise ValueError("this is no HTTP")
        headers: dict[str, str] = {}
        for _ in range(_MAX_HEAD_LINES):
            line = await _line(reader)
            if not line:
                return cls(int(status), reason, headers, reader)
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        raise ValueError("its head has no end")

    async def body(self, max_bytes: int) -> bytes:
        """All of it."""
        data = bytearray()
        async with asyncio.timeout(LOAD_TIMEOUT_S), aclosing(self._parts()) as parts:
            async for part in parts:
                data += part
                if len(data) > max_bytes:
                    raise ValueError(f"it is larger than {max_bytes} bytes")
        return bytes(data)

    async def lines(self) -> AsyncGenerator[str, None]:
        """Lines of text, each as soon as it is complete."""
        held = b""
        async with aclosing(self._parts()) as parts:
            while True:
                async with asyncio.timeout(LOAD_TIMEOUT_S):
                    part = await anext(parts, None)
                if part is None:
                    return
                *lines, held = (held + part).split(b"\n")
                if len(held) > _MAX_ANSWER_BYTES:
                    raise ValueError("a line of it has no end")
                for line in lines:
                    yield line.decode().rstrip("\r")

    async def refusal(self) -> ServerError:
        """What it says, being one."""
        try:
            problem = json.loads(await self.body(_MAX_REFUSAL_BYTES))
        except (ValueError, EOFError, OSError):
            problem = None
        return _refusal(self.status, problem, self.reason, self.headers.get("retry-after", ""))

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        reader, length = self.reader, self.headers.get("content-length")
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await _line(reader)).partition(";")[0], 16):
                if size > _MAX_ANSWER_BYTES:
                    raise ValueError("a part of it is too large")
                yield await reader.readexactly(size)
                await reader.readexactly(len("\r\n"))
            return
        left = None if length is None else int(length)
        while left != 0:
            part = await reader.read(_READ_BYTES if left is None else min(left, _READ_BYTES))
            if not part and left is not None:
                raise EOFError(f"{left} bytes of it are missing")
            if not part:
                return
            left = None if left is None else left - len(part)
            yield part


def at(*parts: str) -> str:
    """A path of names."""
    return "/".join(quote(part, safe="/" if index else "") for index, part in enumerate(parts))


def base_url(addr: str) -> str:
    """`http://HOST:PORT` for what the user wrote. Raises UsageError."""
    if "://" in addr:
        try:
            parts = urlsplit(addr)
            is_sound = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_sound = is_sound and (parts.port is None or parts.port > 0)
        except ValueError:
            is_sound = False
        if not is_sound:
            raise UsageError(f"{addr!r} is no address", "write HOST:PORT or http://HOST:PORT")
        return f"{parts.scheme}://{parts.netloc}"
    host, port = split_address(addr)
    host = host or DEFAULT_HOST
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def split_address(addr: str) -> tuple[str, int]:
    """Host and port; either may be missing. Raises UsageError."""
    text = addr.strip()
    bracketed, bracket, rest = text.rpartition("]")
    if bracket:
        host, colon, port = bracketed.lstrip("["), *rest.partition(":")[1:]
    elif text.count(":") > 1:
        host, colon, port = text, "", ""
    else:
        host, colon, port = text.partition(":")
    if not colon:
        return host, DEFAULT_PORT
    if not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise UsageError(f"the address {addr!r} has no port", "write HOST:PORT: 127.0.0.1:8080")
    return host, int(port)


async def _line(reader: asyncio.StreamReader) -> str:
    """One line of a head."""
    line = await reader.readuntil(b"\n")
    return line.decode("latin-1").rstrip("\r\n")


def _refusal(status: int, body: Any, reason: str = "", retry_after: str = "") -> ServerError:
    """What a server said, or else what its status means."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or "message" not in error:
        return ServerError(status, one_line(f"{status} {reason}".strip()))
    retry_after_s = float(retry_after) if retry_after.isdecimal() else None
    param, code = error.get("param"), error.get("code")
    return ServerError(status, str(error["message"]), param, code, retry_after_s)


def _ssl_context() -> SSLContext:
    import ssl

    return ssl.create_default_context()
