"""`jitllmd serve`: models behind an HTTP address."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jitllm import log
from jitllm.cli.command import AsJson, verb
from jitllm.cli.interrupts import raised
from jitllm.cli.options import engine_flags
from jitllm.cli.progress import Progress
from jitllm.cli.screen import note, print_json
from jitllm.config import EngineConfig
from jitllm.errors import JitllmError, UsageError
from jitllm.remote import KEY_VARIABLE, split_address
from jitllm.units import counted, format_duration, parse_size

if TYPE_CHECKING:
    from jitllm.api.service import Limits, Service
    from jitllm.cli.daemon.http import HttpServer
    from jitllm.cli.daemon.shelf import Shelf
    from jitllm.compose import Joined

EXAMPLES = """
    jitllmd serve -load model.jlm
    jitllmd serve -load big.jlm -id big -load small.jlm -id small -maxmem 12G
    jitllmd serve -load model.jlm -addr 0.0.0.0:8080 -api-key "$KEY"
    jitllmd serve -load model.jlm -ray local     (actors in processes of their own)
    jitllmd serve                                (no model yet: `jitllmd models -load FILE`)
"""

LOOPBACK = ("127.0.0.1", "::1", "localhost")
DEFAULT_FAIRNESS = 50
NO_DASHBOARD = "none; it comes with pip install 'jitllm[ray]'"


@engine_flags
def serve(
    *,
    load: Annotated[
        list[Path] | None,
        typer.Option("-load", metavar="MODEL.jlm", help="Serve this model; may be repeated."),
    ] = None,
    id: Annotated[
        list[str] | None,
        typer.Option(
            "-id",
            metavar="NAME",
            help="What requests call the model of the -load in the same place; default: its file.",
        ),
    ] = None,
    addr: Annotated[
        str, typer.Option("-addr", metavar="HOST:PORT", help="Where to listen; port 0: any.")
    ] = "127.0.0.1:8080",
    api_key: Annotated[
        str,
        typer.Option(
            "-api-key",
            metavar="KEY",
            help=f"What clients must bring as a bearer token; default: ${KEY_VARIABLE}.",
            show_default=False,
        ),
    ] = "",
    max_queue: Annotated[
        int, typer.Option("-max-queue", metavar="N", help="Requests that may wait; -1: any number.")
    ] = 64,
    max_batch: Annotated[
        int | None,
        typer.Option("-max-batch", metavar="N", help="Sequences of one step; default: the most."),
    ] = None,
    max_body: Annotated[
        str, typer.Option("-max-body", metavar="SIZE", help="The largest request.")
    ] = "16M",
    drain: Annotated[
        float,
        typer.Option(
            "-drain", metavar="SECONDS", help="Time for replies under way when the server stops."
        ),
    ] = 30.0,
    ray: Annotated[
        str | None,
        typer.Option(
            "-ray",
            metavar="local|auto|HOST:PORT",
            help="Run actors on a Ray cluster: start one on this machine, join the one that runs "
            "here, or one elsewhere. Default: everything in this process.",
        ),
    ] = None,
    json: AsJson = False,
    config: EngineConfig,
) -> int:
    """Serve models over HTTP, in the way that OpenAI's clients expect.

    Listens on this machine alone unless -addr says otherwise. -maxmem is for all models together.
    Ctrl-C, SIGTERM or a closed terminal takes no more requests and ends when those under way have
    ended. With -json, a line on stdout says when the server listens, and where.
    """
    if len(id or ()) > len(load or ()):
        raise UsageError("there are more -id than -load", "give each model one -id at most")
    if not 0 <= drain <= 1e6:
        raise UsageError(f"-drain {drain:g} makes no sense", "give seconds from 0")
    host, port = split_address(addr)
    fairness = DEFAULT_FAIRNESS if config.fairness is None else config.fairness
    config = replace(config, max_queue=max_queue, max_batch=max_batch, fairness=fairness)
    api = _server_packages(api_key, max_body)
    if not os.environ.get(log.LEVEL_VARIABLE):
        log.to_stderr("info")
    listener = _listen(host, port)
    with listener:
        if host not in LOOPBACK and not api.api_key:
            note(f"warning: {host} may be reached from elsewhere and there is no -api-key")
        names = [*(id or ()), *[None] * len(load or ())]
        wanted = list(zip(load or (), names, strict=False))
        with _cluster(ray) as cluster:
            code = asyncio.run(_serve(listener, host, wanted, config, api, drain, cluster, json))
    note("stopped")
    return code


@contextmanager
def _cluster(how: str | None) -> Iterator[Joined | None]:
    """A Ray cluster for all models of the server, until the last of them has stopped."""
    if how is None:
        yield None
        return
    from jitllm.compose import joined

    began_s = time.perf_counter()
    with joined(how) as cluster:
        did = "started a" if how == "local" else "joined the"
        took = format_duration(time.perf_counter() - began_s)
        note(f"{did} Ray cluster at {cluster.address} in {took}")
        if cluster.dashboard or how == "local":
            note(f"  its dashboard    {cluster.dashboard or NO_DASHBOARD}")
        yield cluster


def _server_packages(api_key: str, max_body: str) -> Limits:
    """The limits of the server. Raises JitllmError where the packages are missing."""
    try:
        import uvicorn  # noqa: F401

        from jitllm.api.service import Limits
    except ImportError as error:
        raise JitllmError(
            f"the server's packages are not installed ({error.name} is missing)",
            'pip install "jitllm[server]"',
        ) from error
    return Limits(
        api_key=api_key or os.environ.get(KEY_VARIABLE, ""),
        max_body_bytes=parse_size(max_body, "-max-body"),
    )


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket: an address that is taken is known before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise UsageError(f"-addr: there is no address {host!r}", "try 127.0.0.1:8080") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise JitllmError(
            f"cannot listen on {host}:{port}: {error.strerror}", "choose another with -addr"
        ) from error
    return listener


async def _serve(
    listener: socket.socket,
    host: str,
    wanted: list[tuple[Path, str | None]],
    config: EngineConfig,
    limits: Limits,
    drain_s: float,
    cluster: Joined | None,
    json: bool,
) -> int:
    from jitllm.api.app import create_app
    from jitllm.cli.daemon.http import HttpServer
    from jitllm.cli.daemon.shelf import Shelf
    from jitllm.jit.threads import let_steps_in

    compose = import_module("jitllm.compose")  # here, where no reply has to wait for it
    let_steps_in()
    async with AsyncExitStack() as stack:
        how, member = None, None
        if cluster is not None:
            how = cluster.how
            member = await stack.enter_async_context(compose.membership(how))
        shelf = Shelf(config, Progress, how, member)
        stack.push_async_callback(shelf.close)
        app = create_app(shelf, limits)
        await _load(shelf, wanted)
        stop = _signalled()
        server = HttpServer(app, drain_s)
        service: Service = app.state.service
        running = asyncio.create_task(server.serve(sockets=[listener]))
        await server.until_listening(running)
        url = _url(host, listener.getsockname()[1])
        _announce(url, shelf, cluster, json)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not running.done():
            note(f"stopping; {counted(len(service.sessions), 'request')} under way")
            stop.clear()
            server.should_exit = True
            await service.begin_drain()
            await _until_down(running, stop, server)
        running.result()
    return 0


async def _load(shelf: Shelf, wanted: list[tuple[Path, str | None]]) -> None:
    """Load what was asked for; Ctrl-C does not wait for a compiler."""
    from jitllm.api.models import Load

    for path, name in wanted:
        began_s = time.perf_counter()
        with raised():
            served = await shelf.load(Load(path=path, id=name))
        note(f"loaded {served.id} in {format_duration(time.perf_counter() - began_s)}")


def _signalled() -> asyncio.Event:
    """Is set by the signals that ask for the end, as far as whoever started us lets them."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop.set)
    return stop


async def _until_down(running: asyncio.Task[None], stop: asyncio.Event, server: HttpServer) -> None:
    """Wait for the end; a second signal does not wait for replies."""
    again = asyncio.create_task(stop.wait())
    await asyncio.wait({running, again}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        server.force_exit = True
        await asyncio.wait({running})
    again.cancel()


def _announce(url: str, shelf: Shelf, cluster: Joined | None, json: bool) -> None:
    ids = [served.id for served in shelf.list()]
    for line in (
        f"listening on {url}",
        f"  OpenAI clients   base_url={url}/v1",
        f"  endpoints        {url}/docs",
        f"  health, metrics  {url}/healthz {url}/metrics",
    ):
        note(line)
    if json:
        about = {"address": cluster.address, "dashboard": cluster.dashboard} if cluster else None
        print_json({"url": url, "models": ids, "pid": os.getpid(), "ray": about})


def _url(host: str, port: int) -> str:
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


command = verb(serve, EXAMPLES)
