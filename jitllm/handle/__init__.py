"""Models in the hands of a program: the same handle for a file, a cluster and a server.

Knows which kind of handle an address means. Nothing but that kind is imported.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from jitllm.config import EngineConfig
from jitllm.errors import UsageError
from jitllm.handle.base import Completion, Handle, Settings, TextDelta
from jitllm.handle.sync import SyncHandle

__all__ = [
    "Completion",
    "Connecting",
    "Handle",
    "Settings",
    "SyncHandle",
    "TextDelta",
    "connect",
    "connect_sync",
]

Target = str | os.PathLike[str]

_RAY = "ray:"


class Connecting(AbstractAsyncContextManager[Handle]):
    """A handle to come: `await` it, or use it in an `async with` that closes it at its end."""

    def __init__(self, opening: Coroutine[Any, Any, Handle]) -> None:
        self._opening = opening
        self._handle: Handle | None = None

    def __await__(self) -> Generator[Any, None, Handle]:
        return self._opening.__await__()

    async def __aenter__(self) -> Handle:
        self._handle = await self._opening
        return self._handle

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            await self._handle.close()


def connect(
    target: Target,
    *,
    model: Target | None = None,
    maxmem: str | int | None = None,
    config: EngineConfig | None = None,
    api_key: str = "",
) -> Connecting:
    """A handle of the model at `target`.

    target: a container, which is opened in this process; the URL of a server (http, https); or
    "ray:ADDRESS" for actors on a cluster, where ADDRESS is "local" to start one on this machine,
    "auto" to join the one that runs here, or where it is. model: the name of a model that a server,
    or somebody on the cluster, has opened, needed where there are several; on a cluster also a
    container (a `Path`, or "FILE.jlm"), which is opened there. maxmem: all memory that the
    model may take ("12G", "512M", bytes), and config: everything else about the engine, where one
    is opened. api_key: what a server wants; by default $JITLLM_API_KEY.

    Raises UsageError for what does not go together, and what opening a model or asking a server
    raises.
    """
    where = os.fspath(target)
    if where.startswith(("http://", "https://")):
        if maxmem is not None or config is not None:
            raise UsageError("a server has opened its models already", "use place(maxmem=...)")
        from jitllm.handle.http import open_remote

        return Connecting(open_remote(where, None if model is None else os.fspath(model), api_key))
    if api_key:
        raise UsageError(f"{where!r} is no server, and wants no API key", "leave it out")
    from jitllm.handle.embedded import attach, open_here

    if not where.startswith(_RAY):
        if model is not None:
            raise UsageError(f"{where!r} is a model already", "leave `model` out")
        return Connecting(open_here(Path(where), maxmem, config))
    address = where.removeprefix(_RAY).removeprefix("//") or "auto"
    if model is not None and not _is_name(model):
        return Connecting(open_here(Path(model), maxmem, config, ray=address))
    if maxmem is not None or config is not None:
        raise UsageError(
            f"{model or 'the model'} has been opened already",
            "use place(maxmem=...), or name a container: FILE.jlm",
        )
    return Connecting(attach(address, None if model is None else str(model)))


def _is_name(model: Target) -> bool:
    """Whether this is no file, but what somebody has called a model."""
    return isinstance(model, str) and not model.endswith(".jlm")


def connect_sync(
    target: Target,
    *,
    model: Target | None = None,
    maxmem: str | int | None = None,
    config: EngineConfig | None = None,
    api_key: str = "",
) -> SyncHandle:
    """As `connect`, for programs without an event loop."""
    return SyncHandle(
        connect(target, model=model, maxmem=maxmem, config=config, api_key=api_key).__aenter__
    )
