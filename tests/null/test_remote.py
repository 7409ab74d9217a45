"""The client of a server against answers of every kind: none may hang it or end in a traceback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from jitllm.errors import JitllmError, UsageError
from jitllm.remote import Server, ServerError

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
STREAM = b'data: {"a": 1}\n\n: ping\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n'


def whole(body: bytes, head: bytes = OK) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return (
        CHUNKED + b"".join(b"%x;x=y\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    )


@asynccontextmanager
async def answering(answer: bytes, heard: list[bytes] | None = None) -> AsyncIterator[Server]:
    """A server that says `answer` to whatever it is asked, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split()[1]) for line in head.splitlines() if b"content-length" in line.lower()
        )
        body = await reader.readexactly(length)
        if heard is not None:
            heard.extend((head, body))
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        yield Server(f"127.0.0.1:{port}", "key")


@pytest.mark.parametrize(
    "answer", [whole(b'{"a": 1}'), chunked(b'{"a": 1}', 3), OK + b'\r\n{"a":1}']
)
async def test_an_answer_of_any_framing_is_read(answer: bytes) -> None:
    heard: list[bytes] = []
    async with answering(answer, heard) as server:
        assert await server.post("models", {"x": "ü"}) == {"a": 1}
        assert await server.get("stats", of=None, model="a b") == {"a": 1}
    assert heard[0].startswith(b"POST /jitllm/v1/models HTTP/1.1\r\n")
    assert b"Authorization: Bearer key\r\n" in heard[0]
    assert json.loads(heard[1]) == {"x": "ü"}
    assert heard[2].startswith(b"GET /jitllm/v1/stats?model=a+b HTTP/1.1\r\n")


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_events_come_whatever_the_parts_they_come_in(size: int) -> None:
    async with answering(chunked(STREAM, size)) as server:
        assert [e async for e in server.events("v1/x", {})] == [{"a": 1}, {"a": 2}]


NONSENSE: dict[str, bytes] = {
    "nothing": b"",
    "another protocol": b"SSH-2.0-OpenSSH\r\n",
    "no status": b"HTTP/1.1 xx\r\n\r\n",
    "half a head": OK + b"Content-Le",
    "a head without end": OK + b"a: b\r\n" * 1000,
    "a line without end": OK + b"x" * 100_000,
    "half a body": OK + b"Content-Length: 100\r\n\r\n{}",
    "half a chunk": CHUNKED + b"ff\r\n{}",
    "no size of a chunk": CHUNKED + b"zz\r\n{}",
    "a negative chunk": CHUNKED + b"-5\r\n{}",
    "a huge chunk": CHUNKED + b"ffffffffffff\r\n{}",
    "no JSON": whole(b"<html>"),
    "no text": whole(b"\xff\xfe"),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_what_is_no_answer_is_one_clear_line(name: str) -> None:
    async with answering(NONSENSE[name]) as server:
        with pytest.raises(JitllmError, match="gave no answer that makes sense") as error:
            await server.get("stats")
        assert str(error.value).count("\n") == 0


@pytest.mark.parametrize(
    "stream",
    [STREAM[:20], STREAM.replace(b"data: [DONE]\n\n", b""), b"data: {\n\n", b"data: \xff\n\n"],
)
async def test_a_stream_that_breaks_off_is_told(stream: bytes) -> None:
    async with answering(chunked(stream, 9)) as server:
        with pytest.raises(JitllmError, match="no answer that makes sense"):
            _ = [event async for event in server.events("v1/x", {})]


async def test_a_refusal_keeps_what_the_server_said() -> None:
    said = {"message": "64 wait", "type": "x", "param": "p", "code": "queue_full"}
    body = json.dumps({"error": said}).encode()
    head = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\n"
    async with answering(whole(body, head)) as server:
        with pytest.raises(ServerError) as refused:
            await server.get("stats")
    error = refused.value
    assert (error.status, error.param, error.code) == (429, "p", "queue_full")
    assert (str(error), error.retry_after_s) == ("64 wait", 3.0)


async def test_an_error_in_a_stream_is_raised_after_what_came() -> None:
    stream = b'data: {"a": 1}\n\ndata: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n'
    async with answering(chunked(stream, 1000)) as server:
        events = server.events("v1/x", {})
        assert await anext(events) == {"a": 1}
        with pytest.raises(ServerError, match="gone"):
            await anext(events)


@pytest.mark.parametrize("body", [b"<html>oops", b"{}", b"[]", b'{"error": "x"}'])
async def test_a_refusal_of_somebody_else_has_its_status(body: bytes) -> None:
    async with answering(whole(body, b"HTTP/1.1 502 Bad Gateway\r\n")) as server:
        with pytest.raises(ServerError, match="502 Bad Gateway"):
            await server.get("stats")


async def test_where_nobody_listens_the_message_says_what_to_do() -> None:
    with pytest.raises(JitllmError, match="no server answers at .*jitllmd serve"):
        await Server("127.0.0.1:1").get("stats")


async def test_closing_a_stream_hangs_up() -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"f\r\n" + b'data: {"a": 1}\n' + b"\r\n")
        await writer.drain()
        while await reader.read(100):
            pass
        gone.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        stream = Server(f"127.0.0.1:{port}").events("v1/x", {})
        assert await anext(stream) == {"a": 1}
        await stream.aclose()
        async with asyncio.timeout(30):
            await gone.wait()


@pytest.mark.parametrize("key", ["a\nb", "ü"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(UsageError):
        Server("x", key)
