"""How the verbs of `jitllmd` reach a server: flags that they share, and calls that wait.

Knows `jitllm.remote`, which knows HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from jitllm import remote
from jitllm.remote import DEFAULT_ADDRESS, KEY_VARIABLE, at

__all__ = ["DEFAULT_ADDRESS", "Address", "ApiKey", "Server", "at"]

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


class Server:
    """A server's control plane; see `jitllm.remote.Server`."""

    def __init__(self, addr: str, api_key: str = "") -> None:
        self._server = remote.Server(addr, api_key)

    def get(self, path: str, **query: object) -> Any:
        """What is at `path`."""
        return asyncio.run(self._server.get(path, **query))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to `body`."""
        return asyncio.run(self._server.post(path, body))

    def delete(self, path: str, **query: object) -> Any:
        """The answer to removing what is at `path`."""
        return asyncio.run(self._server.delete(path, **query))
