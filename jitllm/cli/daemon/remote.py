"""A client of a server's control plane, on the standard library alone.

Knows HTTP and the shape of our errors. An answer that is a refusal becomes a `JitllmError`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from http.client import HTTPException
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import typer

from jitllm.errors import JitllmError, UsageError

KEY_VARIABLE = "JITLLM_API_KEY"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8080
LOAD_TIMEOUT_S = 600.0
_MAX_ANSWER_BYTES = 64 << 20

Address = Annotated[
    str, typer.Option("-addr", metavar="ADDR", help="The server: HOST:PORT, :PORT or a URL.")
]
ApiKey = Annotated[
    str,
    typer.Option(
        "-api-key",
        metavar="KEY",
        help=f"What the server wants; default: ${KEY_VARIABLE}.",
        show_default=False,
    ),
]

DEFAULT_ADDRESS = f"{DEFAULT_HOST}:{DEFAULT_PORT}"


class Server:
    """A server somewhere."""

    def __init__(self, addr: str, api_key: str = "") -> None:
        self.url = base_url(addr)
        self._key = api_key or os.environ.get(KEY_VARIABLE, "")
        self._opener = build_opener(ProxyHandler({}))  # a server of ours is never behind a proxy

    def get(self, path: str, **query: object) -> Any:
        """What is at `path` of the control plane."""
        return self._call("GET", path, query=query)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to `body`."""
        return self._call("POST", path, body={} if body is None else body)

    def delete(self, path: str, **query: object) -> Any:
        """The answer to removing what is at `path`."""
        return self._call("DELETE", path, query=query)

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Any:
        given = {key: value for key, value in (query or {}).items() if value is not None}
        url = f"{self.url}/jitllm/v1/{path}" + (f"?{urlencode(given)}" if given else "")
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(url, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=LOAD_TIMEOUT_S) as answer:
                return json.loads(answer.read(_MAX_ANSWER_BYTES))
        except HTTPError as error:
            raise _refusal(error) from None
        except URLError as error:
            reason = getattr(error.reason, "strerror", None) or error.reason
            raise JitllmError(
                f"no server answers at {self.url}: {reason}",
                "start one with `jitllmd serve`, or say where it is with -addr",
            ) from None
        except (OSError, HTTPException, ValueError) as error:
            raise JitllmError(f"{self.url} gave no answer that makes sense: {error}") from error


def at(*parts: str) -> str:
    """A path of names."""
    return "/".join(quote(part, safe="/" if index else "") for index, part in enumerate(parts))


def base_url(addr: str) -> str:
    """`http://HOST:PORT` for what the user wrote. Raises UsageError."""
    if "://" in addr:
        parts = urlsplit(addr)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"-addr {addr!r} is no address", "write HOST:PORT or http://HOST:PORT")
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
        raise UsageError(f"-addr {addr!r} has no port", "write HOST:PORT, like 127.0.0.1:8080")
    return host, int(port)


def _refusal(error: HTTPError) -> JitllmError:
    try:
        problem = json.loads(error.read(1 << 20))["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        problem = f"{error.code} {error.reason}"
    finally:
        error.close()
    return JitllmError(str(problem))
