"""Parts that a thread sends: in order and none twice, whoever carries them."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from actors import transport
from actors.actor import Actor, Message
from actors.caller import Caller
from actors.carry import Carrier
from actors.local import Runtime
from actors.parts import Parts
from actors.transport import Door

NUM_PARTS = 400


@dataclass(frozen=True)
class Count(Message[Parts[bytes]]):
    """Parts from a thread, with bytes so many that a socket does not take all at once."""

    size: int
    pause_s: float = 0.0


@dataclass(frozen=True)
class Say(Message[bytes]):
    """Something that comes back meanwhile, over the same wire."""

    size: int


def part(number: int, size: int) -> bytes:
    return number.to_bytes(4, "little") + bytes(size)


class Counter(Actor):
    """Answers from a thread of its own."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.has_left = threading.Event()

    async def receive(self, message: Message[Any]) -> object:
        match message:
            case Count():
                parts: Parts[bytes] = Parts(self.has_left.set)
                loop = asyncio.get_running_loop()
                work = threading.Thread(target=self._count, args=(message, parts, loop))
                self.threads.append(work)
                work.start()
                return parts
            case Say():
                return bytes(message.size)
        raise NotImplementedError

    async def ends(self) -> None:
        """Until all threads have."""
        for thread in self.threads:
            await asyncio.to_thread(thread.join, 10)
            assert not thread.is_alive()

    def _count(self, message: Count, parts: Parts[bytes], loop: asyncio.AbstractEventLoop) -> None:
        pauses = random.Random(1)
        for number in range(NUM_PARTS):
            parts.send(part(number, message.size), loop)
            if message.pause_s:
                threading.Event().wait(pauses.random() * message.pause_s)
        loop.call_soon_threadsafe(lambda: None if parts.is_over else parts.end())


@asynccontextmanager
async def counting() -> AsyncIterator[tuple[Caller, Counter]]:
    """A counter, and who asks it over a wire."""
    async with Runtime() as runtime:
        counter, carrier = Counter(), Carrier(runtime.ref)
        door = Door(await runtime.spawn(counter, "counter"), carrier)
        await door.open()
        asking = Caller("counter", carrier, partial(transport.connect, door.address))
        try:
            yield asking, counter
        finally:
            asking.close()
            door.close()


@pytest.mark.parametrize("size", [0, 30_000], ids=["small", "more than the socket takes"])
@pytest.mark.parametrize("pause_s", [0.0, 0.001], ids=["at once", "now and then"])
async def test_parts_of_a_thread_come_in_order_with_other_frames_between(
    size: int, pause_s: float
) -> None:
    async with counting() as (asking, _):

        async def chat() -> None:
            for _ in range(100):
                assert len(await asking.ask(Say(size))) == size

        talk = asyncio.ensure_future(chat())
        found = [got async for got in asking.follow(Count(size, pause_s))]
        assert found == [part(number, size) for number in range(NUM_PARTS)]
        await talk


async def test_parts_of_a_thread_need_no_turn_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []
    send = transport._Writer.send

    def watched(writer: transport._Writer, data: bytes) -> None:
        threads.append(threading.current_thread())
        send(writer, data)

    monkeypatch.setattr(transport._Writer, "send", watched)
    async with counting() as (asking, counter):
        async for _ in asking.follow(Count(10, 0.002)):
            pass
        assert set(threads) == set(counter.threads)
        assert len(threads) > NUM_PARTS / 2  # all but those before it was known who follows


async def test_a_thread_goes_on_when_who_followed_has_left() -> None:
    async with counting() as (asking, counter):
        following = asking.follow(Count(100, 0.001))
        assert await anext(following) == part(0, 100)
        await following.aclose()
        assert await asyncio.to_thread(counter.has_left.wait, 10)
        assert await asking.ask(Say(3)) == bytes(3)
        await counter.ends()


async def test_a_thread_goes_on_when_who_followed_has_died() -> None:
    async with counting() as (asking, counter):
        following = asking.follow(Count(100, 0.001))
        assert await anext(following) == part(0, 100)
        asking.close()
        await counter.ends()


async def test_without_a_wire_parts_of_a_thread_come_through_the_event_loop() -> None:
    async with Runtime() as runtime:
        ref = await runtime.spawn(Counter(), "counter")
        found = [got async for got in ref.follow(Count(10))]
        assert found == [part(number, 10) for number in range(NUM_PARTS)]
