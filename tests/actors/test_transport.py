"""Messages between processes: order, errors, room, and what becomes of replies nobody takes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import transport
from actors.actor import Ref
from actors.caller import Caller
from actors.carry import MAX_FRAME_BYTES, Carrier, Frame, Frames, Kind, pack
from actors.local import LocalRef, Runtime
from actors.mailbox import Lost, Stopped
from actors.session import Session
from actors.transport import Door
from jitllm.errors import PageError
from tests.cluster.example import (
    Echo,
    Example,
    Fail,
    Give,
    Hold,
    Note,
    Notes,
    Open,
    Taken,
    Through,
    Wait,
)


@asynccontextmanager
async def called(max_queued: int = 256) -> AsyncIterator[tuple[Caller, LocalRef, Door]]:
    """An actor behind a door, and somebody who calls."""
    async with Runtime() as runtime:
        ref = await runtime.spawn(Example(), "example", max_queued=max_queued)
        carrier = Carrier(runtime.ref)
        door = Door(ref, carrier)
        await door.open()
        caller = Caller("example", carrier, partial(transport.connect, door.address))
        try:
            yield caller, ref, door
        finally:
            caller.close()
            door.close()


async def settled(ref: LocalRef, num_lost: int) -> tuple[object, ...]:
    """What was lost, once it is so much."""
    lost: tuple[object, ...] = ()
    while len(lost) < num_lost:
        lost = await ref.ask(Taken())
        await asyncio.sleep(0.001)
    return lost


@pytest.mark.parametrize("max_queued", [1, 256])
async def test_messages_are_handled_in_order(max_queued: int) -> None:
    async with called(max_queued) as (caller, _, _):
        for number in range(300):
            await caller.tell(Note("a", number))
        asked = [caller.ask(Note("a", 300 + i)) for i in range(100)]
        await asyncio.gather(*asked)
        assert await caller.ask(Notes("a")) == tuple(range(400))


async def test_values_of_any_size_arrive() -> None:
    async with called() as (caller, _, _):
        for size in (0, 1, 65_536, 5_000_000):
            assert await caller.ask(Echo(bytes(size))) == bytes(size)


async def test_refs_travel_by_name() -> None:
    async with called() as (caller, ref, _):
        assert await caller.ask(Echo((ref, 1))) == (ref, 1)


async def test_errors_travel_with_their_fields() -> None:
    async with called() as (caller, _, _):
        with pytest.raises(PageError, match="no luck") as caught:
            await caller.ask(Fail())
        assert (caught.value.path, caught.value.offset) == ("/some/file", 4096)
        with pytest.raises(RuntimeError, match="Untold could not travel"):
            await caller.ask(Fail(travels=False))
        await caller.tell(Fail())
        assert await caller.ask(Echo(1)) == 1


async def test_what_cannot_travel_concerns_nobody_else() -> None:
    async with called() as (caller, ref, _):
        with pytest.raises((AttributeError, TypeError)):
            await caller.ask(Echo(lambda: 0))
        assert await caller.ask(Echo(1)) == 1
        assert await ref.ask(Taken()) == ()


async def test_a_reply_that_nobody_waits_for_goes_back() -> None:
    async with called() as (caller, ref, _):
        asking = asyncio.create_task(caller.ask(Wait()))
        await caller.ask(Echo(0))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await caller.ask(Echo(0))
        await caller.ask(Open())
        assert await settled(ref, 1) == ("open",)


async def test_a_reply_that_crosses_with_a_cancel_goes_back() -> None:
    async with called() as (caller, ref, _):
        await caller.ask(Echo(0))
        for number in range(50):  # cancelled at all sorts of moments
            asking = asyncio.create_task(caller.ask(Echo(number)))
            for _ in range(number % 10):
                await asyncio.sleep(0)
            asking.cancel()
            done = await asyncio.gather(asking, return_exceptions=True)
            taken = done[0] == number
            assert taken or isinstance(done[0], asyncio.CancelledError)
        assert await caller.ask(Echo("still")) == "still"


async def test_what_a_dead_caller_asked_goes_back() -> None:
    async with called() as (caller, ref, _):
        asking = asyncio.create_task(caller.ask(Wait()))
        await caller.ask(Echo(0))
        caller.close()
        with pytest.raises(Stopped):
            await asking
        await asyncio.sleep(0.01)
        await ref.ask(Open())
        assert await settled(ref, 1) == ("open",)


async def test_a_full_mailbox_holds_senders_back() -> None:
    async with called(max_queued=2) as (caller, ref, _):
        await caller.tell(Hold(0.2))
        flood = asyncio.create_task(_flood(caller, 40, 1 << 20))
        await asyncio.sleep(0.1)
        assert not flood.done()
        assert ref.statistics().peak_queued <= 2
        await flood
        assert await caller.ask(Echo(1)) == 1


async def _flood(caller: Caller, count: int, num_bytes: int) -> None:
    for _ in range(count):
        await caller.tell(Echo(bytes(num_bytes)))


async def test_a_caller_learns_that_the_process_is_gone() -> None:
    async with called() as (caller, _, door):
        asking = asyncio.create_task(caller.ask(Wait()))
        await caller.ask(Echo(0))
        door.close()
        with pytest.raises(Lost, match="example was lost: its process ended"):
            await asking
        assert caller.is_lost
        with pytest.raises(Lost):
            await caller.tell(Echo(0))


async def test_a_stopped_actor_says_so() -> None:
    async with Runtime() as runtime:
        ref = await runtime.spawn(Example(), "example")
        carrier = Carrier(runtime.ref)
        door = Door(ref, carrier)
        await door.open()
        caller = Caller("example", carrier, partial(transport.connect, door.address))
        await caller.ask(Echo(0))
        await runtime.stop("example")
        with pytest.raises(Stopped, match="example has stopped"):
            await caller.ask(Echo(0))
        caller.close()
        door.close()


async def test_nobody_behind_the_door_is_an_error() -> None:
    async with Runtime() as runtime:
        carrier = Carrier(runtime.ref)
        caller = Caller("example", carrier, partial(transport.connect, "\0jitllm-nobody"))
        with pytest.raises(OSError, match="refused"):
            await caller.ask(Echo(0))
        with pytest.raises(OSError, match="refused"):
            await caller.tell(Echo(0))


async def test_a_peer_that_does_not_move_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.caller.PING_S", 0.01)
    monkeypatch.setattr("actors.caller.DEADLINE_S", 0.05)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind("\0jitllm-test-deaf")
        deaf.listen()
        async with Runtime() as runtime:
            carrier = Carrier(runtime.ref)
            connect = partial(transport.connect, "\0jitllm-test-deaf")
            caller = Caller("example", carrier, connect)
            with pytest.raises(Lost, match="it has not moved for"):
                await caller.ask(Echo(0))


async def test_a_slow_handler_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.caller.PING_S", 0.02)
    monkeypatch.setattr("actors.caller.DEADLINE_S", 0.1)
    async with called() as (caller, _, _):
        await caller.ask(Hold(0.5))


async def test_noise_at_the_door_harms_nobody() -> None:
    async with called() as (caller, _, door):
        reader, writer = await asyncio.open_unix_connection(door.address)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert await reader.read() == b""  # shown out
        writer.close()
        assert await caller.ask(Echo(1)) == 1


async def test_an_actor_asks_another_one() -> None:
    async with called() as (caller, ref, _), Runtime() as other:
        second: Ref = await other.spawn(Example(), "second")
        assert await ref.ask(Through(second, Echo(3))) == 3
        assert await caller.ask(Echo(4)) == 4


# --- replies in parts -----------------------------------------------------------------------------


async def all_of(ref: Ref | Caller, message: Give) -> list[object]:
    """Every part of a reply."""
    return [part async for part in ref.follow(message)]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("max_queued", [1, 256])
async def test_parts_arrive_in_order_and_once(max_queued: int, at_once: bool) -> None:
    async with called(max_queued) as (caller, ref, _):
        given = [range(stop) for stop in (0, 1, 2, 300, 1000)]
        told = [caller.tell(Note("a", number)) for number in range(20)]
        taken = [all_of(caller, Give(values, at_once)) for values in given]
        done = await asyncio.gather(*told, *taken)
        assert done[20:] == list(map(list, given))
        assert await caller.ask(Notes("a")) == tuple(range(20))
        assert await ref.ask(Taken()) == ()


async def test_parts_are_values_of_any_size_and_refs() -> None:
    async with called() as (caller, ref, _):
        values = [bytes(5_000_000), ref, b"", None]
        assert await all_of(caller, Give(values)) == values


async def test_what_a_reply_failed_with_comes_after_its_parts() -> None:
    async with called() as (caller, ref, _):
        parts = caller.follow(Give((0, 1), outcome="fails"))
        assert [await anext(parts), await anext(parts)] == [0, 1]
        with pytest.raises(PageError, match="no luck") as caught:
            await anext(parts)
        assert caught.value.offset == 4096
        assert await ref.ask(Taken()) == ()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("outcome", "says"), [("untold", "I stay"), ("unread", "could not be read: not here")]
)
async def test_a_part_that_cannot_travel_ends_its_reply_and_no_other(
    outcome: str, says: str, at_once: bool
) -> None:
    async with called() as (caller, ref, _):
        beside = caller.follow(Give((7,), outcome="stays"))
        assert await anext(beside) == 7
        bad = Give((0, 1), at_once, outcome)
        parts = caller.follow(bad)
        assert [await anext(parts), await anext(parts)] == [0, 1]
        with pytest.raises((TypeError, RuntimeError), match=says):
            await anext(parts)
        assert await settled(ref, 1) == (bad,)
        assert await all_of(caller, Give((1, 2, 3))) == [1, 2, 3]
        await beside.aclose()


@pytest.mark.parametrize("way", ["closed", "cancelled", "dead"])
async def test_an_actor_hears_that_who_followed_has_left(way: str) -> None:
    message = Give((0, 1), outcome="stays")
    async with called() as (caller, ref, _):
        parts = caller.follow(message)
        assert [await anext(parts), await anext(parts)] == [0, 1]
        if way == "closed":
            await parts.aclose()
        elif way == "cancelled":
            waiting = asyncio.ensure_future(anext(parts))
            await asyncio.sleep(0)
            waiting.cancel()
        else:
            caller.close()
            with pytest.raises(Stopped):
                await anext(parts)
        assert await settled(ref, 1) == (message,)
        await asyncio.sleep(0.01)
        assert await ref.ask(Taken()) == (message,)


async def test_leaving_before_the_first_part_is_heard_of() -> None:
    message = Give((), outcome="stays")
    async with called(max_queued=1) as (caller, ref, _):  # so that one comes with its answer
        await caller.tell(Hold(0.05))
        following = [asyncio.create_task(all_of(caller, message)) for _ in range(5)]
        await asyncio.sleep(0.01)
        for task in following:
            task.cancel()
        assert await settled(ref, 5) == (message,) * 5


async def test_a_reply_that_crosses_with_leaving_is_no_trouble() -> None:
    async with called() as (caller, _, _):
        for turns in range(100):  # left at all sorts of moments
            following = asyncio.create_task(all_of(caller, Give(range(turns))))
            for _ in range(turns % 20):
                await asyncio.sleep(0)
            following.cancel()
            await asyncio.wait([following])
        assert await caller.ask(Echo("still")) == "still"
        assert await all_of(caller, Give((1,))) == [1]


async def test_who_follows_learns_that_the_process_is_gone() -> None:
    async with called() as (caller, _, door):
        parts = caller.follow(Give((0, 1), at_once=True, outcome="stays"))
        assert await anext(parts) == 0
        door.close()
        assert await anext(parts) == 1  # it was here
        with pytest.raises(Lost, match="example was lost: its process ended"):
            await anext(parts)
        with pytest.raises(Lost):
            await anext(caller.follow(Give(())))


async def test_who_follows_learns_that_the_actor_has_stopped() -> None:
    async with Runtime() as runtime:
        ref = await runtime.spawn(Example(), "example")
        carrier = Carrier(runtime.ref)
        door = Door(ref, carrier)
        await door.open()
        caller = Caller("example", carrier, partial(transport.connect, door.address))
        parts = caller.follow(Give((0,), outcome="stays"))
        assert await anext(parts) == 0
        await runtime.stop("example")
        with pytest.raises(Stopped, match="example has stopped") as caught:
            await anext(parts)
        assert not isinstance(caught.value, Lost)
        caller.close()
        door.close()


async def test_silence_between_two_parts_is_not_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.caller.PING_S", 0.02)
    monkeypatch.setattr("actors.caller.DEADLINE_S", 0.1)
    async with called() as (caller, ref, _):
        parts = caller.follow(Give((0,), outcome="stays"))
        assert await anext(parts) == 0
        waiting = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        waiting.cancel()
        assert len(await settled(ref, 1)) == 1


async def test_a_peer_that_does_not_move_is_given_up_by_who_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.caller.PING_S", 0.01)
    monkeypatch.setattr("actors.caller.DEADLINE_S", 0.05)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind("\0jitllm-test-mute")
        deaf.listen()
        async with Runtime() as runtime:
            connect = partial(transport.connect, "\0jitllm-test-mute")
            caller = Caller("example", Carrier(runtime.ref), connect)
            with pytest.raises(Lost, match="it has not moved for"):
                await all_of(caller, Give(()))


async def test_asking_and_following_are_not_mixed_up() -> None:
    async with called() as (caller, ref, _):
        with pytest.raises(TypeError, match="Give is followed, not asked"):
            await caller.ask(Give(()))
        with pytest.raises(TypeError, match="Echo is asked, not followed"):
            await all_of(caller, Echo(5))  # type: ignore[arg-type]
        assert await settled(ref, 2) == (Give(()), 5)


async def test_parts_of_one_turn_go_in_one_write() -> None:
    """Whoever they are for: it is the number of times that a caller is woken which costs."""
    async with Runtime() as runtime:
        ref = await runtime.spawn(Example(), "example")
        carrier, sent = Carrier(runtime.ref), list[bytes]()
        session = Session(ref, carrier, sent.append)
        for question in (1, 2, 3):
            body = carrier.dump(Give(range(4), at_once=True))
            session.take(Frame(Kind.FOLLOW, question, body))
        while not sent:  # noqa: ASYNC110 - a session tells nobody
            await asyncio.sleep(0)
        [data] = sent
        frames = list(Frames().feed(data))
        for question in (1, 2, 3):
            kinds = [frame.kind for frame in frames if frame.question == question]
            assert kinds == [Kind.PART] * 4 + [Kind.REPLY]


@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.binary(max_size=50))),
    st.lists(st.integers(1, 40)),
)
def test_frames_come_out_as_they_went_in(
    sent: list[tuple[Kind, int, bytes]], cuts: list[int]
) -> None:
    data = b"".join(pack(kind, question, body) for kind, question, body in sent)
    frames, found = Frames(), []
    for cut in [*cuts, len(data)]:
        found += frames.feed(data[:cut])
        data = data[cut:]
    assert found == [Frame(*frame) for frame in sent]


@pytest.mark.parametrize("data", [b"\xff" * 13, pack(Kind.PONG).replace(b"\x0b", b"\x63")])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="a frame of kind"):
        list(Frames().feed(data))
    assert MAX_FRAME_BYTES < 0xFFFFFFFF
