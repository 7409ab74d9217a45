"""The server below the app: connections that say nothing or too little."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import h11
import pytest
from fastapi import FastAPI

from jitllm.cli.daemon.http import HttpServer, Protocol
from tests.api.conftest import events


class Hasty(Protocol):
    """Waits for the head of a request hardly at all."""

    head_timeout_s = 0.5


@pytest.fixture
async def port(app: FastAPI) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(app, 1, Hasty)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    await server.until_listening(running)
    yield listener.getsockname()[1]
    server.should_exit = True
    await running


async def test_a_head_that_does_not_end_is_given_up(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_a_head_that_comes_in_pieces_is_answered(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(b"GET /healthz HTTP/1.1\r\nHo")
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(b"st: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert b'"ok"' in await reader.readuntil(b'"notes":[]}')
        await asyncio.sleep(0.7)  # idle between two requests is fine
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""])
async def test_a_head_that_is_too_large_is_refused(port: int, end: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000 + end)
    status = int((await reader.readline()).split()[1])
    assert status in (400, 431)  # read in pieces, read as a whole
    await reader.read()
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_replies_are_framed_as_their_protocol_says(
    port: int, version: str, stream: bool
) -> None:
    """To the letter, as another implementation reads them: one after the other, the last at the
    end of its connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = h11.Connection(h11.CLIENT)
    ask = {"model": "fake", "prompt": "Hi", "temperature": 0, "stream": stream}
    body = json.dumps(ask).encode()
    for number in range(1 if version == "1.0" else 3):
        is_last = number == 2
        head = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body))}
        head |= {"Connection": "close"} if is_last else {}
        sent = client.send(
            h11.Request(method="POST", target="/v1/completions", headers=[*head.items()])
        )
        client.send(h11.Data(data=body))
        client.send(h11.EndOfMessage())
        writer.write(sent.replace(b"HTTP/1.1", f"HTTP/{version}".encode()) + body)
        said = b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                client.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Data):
                said += event.data
        if stream:
            chunks = events(said.decode())
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, world"
        else:
            assert json.loads(said)["choices"][0]["text"] == "Hello, world"
        if not is_last and version == "1.1":
            client.start_next_cycle()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("cut", [0, 1, 60, 200, 240])
async def test_who_offers_another_protocol_is_answered_in_this_one(port: int, cut: int) -> None:
    """As `curl --http2` does, in whatever pieces it comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"model": "fake", "prompt": "a b c", "max_tokens": 2}'
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    whole = head.encode() + body
    for part in (whole[:cut], whole[cut:]):
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.02)
    async with asyncio.timeout(10):
        status = int((await reader.readline()).split()[1])
        answer = await reader.readuntil(b"text_completion")
    assert status == 200, answer
    writer.close()
    await writer.wait_closed()


async def test_a_server_that_cannot_start_says_why(app: FastAPI) -> None:
    server = HttpServer(app, 1)

    async def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await server.until_listening(asyncio.create_task(fail()))
