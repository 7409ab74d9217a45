"""The embedded runtime: order, errors, replies that take a while, and a clean end."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import assert_never

import pytest

from actors.actor import Actor, Message, Ref
from actors.local import Runtime
from actors.mailbox import Stopped
from actors.parts import Parts
from jitllm.errors import PageError


@dataclass(frozen=True, slots=True)
class Add(Message[int]):
    """Add, and say the sum."""

    number: int


@dataclass(frozen=True, slots=True)
class Fail(Message[None]):
    """Raise a page error."""


@dataclass(frozen=True, slots=True)
class Wait(Message[str]):
    """Answer once `Open` has come; `later`: while other messages are handled."""

    later: bool = True


@dataclass(frozen=True, slots=True)
class Open(Message[None]):
    """Answer who waits."""


@dataclass(frozen=True, slots=True)
class Carry(Message[object]):
    """Answer with `value`."""

    value: object


@dataclass(frozen=True, slots=True)
class Promise(Message[int]):
    """Answer with a future that the test holds."""


@dataclass(frozen=True, slots=True)
class Give(Message[Parts[object]]):
    """Answer with parts that the test holds; `later`: with a future of them, after `Open`."""

    later: bool = False


Any = Add | Fail | Wait | Open | Carry | Promise | Give


class Example(Actor):
    def __init__(self, life: list[str] | None = None, name: str = "example") -> None:
        self.sum = 0
        self.gate = asyncio.Event()
        self.promise: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.lost: list[object] = []
        self.parts: Parts[object] = Parts(lambda: self.lost.append("left"))
        self.life = [] if life is None else life
        self.name = name

    async def on_start(self) -> None:
        self.life.append(f"{self.name} starts")

    async def on_stop(self) -> None:
        self.life.append(f"{self.name} stops")

    async def receive(self, message: Any) -> object:
        match message:
            case Add():
                self.sum += message.number
                return self.sum
            case Fail():
                raise PageError("/some/file", 4096, "no luck")
            case Wait():
                return (
                    self.context.later(self.wait(), "wait") if message.later else await self.wait()
                )
            case Open():
                self.gate.set()
                return None
            case Carry():
                return message.value
            case Promise():
                return self.promise
            case Give():
                return self.context.later(self.give(), "give") if message.later else self.parts
            case _:
                assert_never(message)

    async def wait(self) -> str:
        await self.gate.wait()
        return "open"

    async def give(self) -> Parts[object]:
        await self.gate.wait()
        return self.parts

    def on_lost(self, message: object, reply: object) -> None:
        self.lost.append(reply)


@pytest.fixture(params=[False, True], ids=["plain", "strict"])
async def runtime(request: pytest.FixtureRequest) -> AsyncIterator[Runtime]:
    async with Runtime(strict=request.param) as runtime:
        yield runtime


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_messages_are_handled_in_order(runtime: Runtime) -> None:
    ref = await runtime.spawn(Example(), "example")
    assert await ref.ask(Add(1)) == 1
    await ref.tell(Add(10))
    await ref.tell(Add(100))
    assert await ref.ask(Add(1000)) == 1111
    assert runtime.ref("example").name == "example"
    assert ref.statistics().num_put == 4


async def test_an_error_reaches_the_asker_and_the_actor_lives_on(runtime: Runtime) -> None:
    ref = await runtime.spawn(Example(), "example")
    with pytest.raises(PageError, match="no luck") as caught:
        await ref.ask(Fail())
    assert caught.value.offset == 4096
    assert await ref.ask(Add(1)) == 1


async def test_an_error_without_an_asker_is_logged(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    ref = await runtime.spawn(Example(), "example")
    with caplog.at_level(logging.ERROR, "jitllm"):
        await ref.tell(Fail())
        assert await ref.ask(Add(1)) == 1
    assert "example could not handle Fail" in caplog.text


async def test_a_reply_that_takes_a_while_keeps_nobody_waiting(runtime: Runtime) -> None:
    ref = await runtime.spawn(Example(), "example")
    waiting = asyncio.create_task(ref.ask(Wait()))
    await settle()
    assert await ref.ask(Add(1)) == 1
    assert not waiting.done()
    await ref.tell(Open())
    assert await waiting == "open"


async def test_a_handler_that_waits_keeps_its_turn(runtime: Runtime) -> None:
    example = Example()
    ref = await runtime.spawn(example, "example")
    waiting = asyncio.create_task(ref.ask(Wait(later=False)))
    adding = asyncio.create_task(ref.ask(Add(1)))
    await settle()
    assert not adding.done()
    example.gate.set()
    assert (await waiting, await adding) == ("open", 1)


@pytest.mark.parametrize("outcome", [7, PageError("x", 0, "late")])
async def test_a_future_is_a_reply(runtime: Runtime, outcome: object) -> None:
    example = Example()
    ref = await runtime.spawn(example, "example")
    asking = asyncio.create_task(ref.ask(Promise()))
    await settle()
    if isinstance(outcome, Exception):
        example.promise.set_exception(outcome)
        with pytest.raises(PageError, match="late"):
            await asking
    else:
        example.promise.set_result(outcome)  # type: ignore[arg-type]
        assert await asking == outcome


async def test_a_reply_that_nobody_took_goes_back(runtime: Runtime) -> None:
    class Late(Example):
        async def receive(self, message: Any) -> object:
            if isinstance(message, Add):  # the asker gives up when the answer is on its way
                asyncio.get_running_loop().call_soon(asking.cancel)
            return await super().receive(message)

    example = Late()
    ref = await runtime.spawn(example, "example")
    asking = asyncio.create_task(ref.ask(Wait()))
    await settle()
    asking.cancel()
    await ref.tell(Open())
    await settle()
    assert example.lost == ["open"]

    asking = asyncio.create_task(ref.ask(Add(5)))
    await settle()
    assert asking.cancelled()
    assert example.lost == ["open", 5]


async def test_the_latest_stops_first_and_who_waits_is_told() -> None:
    life: list[str] = []
    async with Runtime() as runtime:
        first = await runtime.spawn(Example(life, "a"), "a")
        second = await runtime.spawn(Example(life, "b"), "b")
        waiting = [
            asyncio.create_task(first.ask(message))
            for message in (Wait(), Promise(), Wait(later=False), Add(1))
        ]
        await settle()
    assert life == ["a starts", "b starts", "b stops", "a stops"]
    for task in waiting:
        with pytest.raises(Stopped, match="a has stopped"):
            await task
    with pytest.raises(Stopped):
        await second.tell(Add(1))


async def test_an_error_in_the_body_stops_everybody_and_is_raised() -> None:
    life: list[str] = []

    async def serve() -> None:
        async with Runtime() as runtime:
            await runtime.spawn(Example(life), "example")
            raise KeyError

    with pytest.raises(KeyError):
        await serve()
    assert life == ["example starts", "example stops"]


async def test_cancelling_stops_everybody() -> None:
    life: list[str] = []

    async def serve() -> None:
        async with Runtime() as runtime:
            ref = await runtime.spawn(Example(life), "example")
            await ref.ask(Wait())

    task = asyncio.create_task(serve())
    await settle()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert life == ["example starts", "example stops"]


async def test_a_start_that_fails_is_raised_by_spawn() -> None:
    life: list[str] = []

    class Broken(Example):
        async def on_start(self) -> None:
            raise PageError("x", 0, "cannot start")

    async with Runtime() as runtime:
        with pytest.raises(PageError, match="cannot start"):
            await runtime.spawn(Broken(life), "broken")
        assert life == ["example stops"]
        with pytest.raises(KeyError):
            runtime.ref("broken")
        await runtime.spawn(Example(life), "broken")


async def test_a_name_is_taken_once(runtime: Runtime) -> None:
    await runtime.spawn(Example(), "example")
    with pytest.raises(ValueError, match="called 'example' already"):
        await runtime.spawn(Example(), "example")
    await runtime.stop("example")
    await runtime.spawn(Example(), "example")


async def test_work_beside_the_handler_is_watched_and_ends_with_the_actor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("forever")

    async def breaks() -> None:
        raise ValueError("broken work")

    class Busy(Example):
        async def on_start(self) -> None:
            self.context.begin(forever(), "forever")
            self.context.begin(breaks(), "breaks")

    async with Runtime() as runtime:
        ref = await runtime.spawn(Busy(), "busy")
        with caplog.at_level(logging.ERROR, "jitllm"):
            await settle()
        assert await ref.ask(Add(1)) == 1
    assert ended == ["forever"]
    assert "busy: breaks failed" in caplog.text


async def test_an_actor_can_tell_itself(runtime: Runtime) -> None:
    class Echo(Example):
        async def on_start(self) -> None:
            await self.context.me.tell(Add(41))

    ref = await runtime.spawn(Echo(), "echo")
    assert await ref.ask(Add(1)) == 42


async def test_strict_finds_what_cannot_travel() -> None:
    async with Runtime(strict=True) as runtime:
        ref: Ref = await runtime.spawn(Example(), "example")
        with pytest.raises(Exception, match="pickle"):
            await ref.ask(Carry(lambda: None))

        class Local(Exception):
            pass

        class Odd(Example):
            async def receive(self, message: Any) -> object:
                if isinstance(message, Fail):
                    raise Local
                return lambda: None

        odd = await runtime.spawn(Odd(), "odd")
        with pytest.raises(Exception, match="pickle"):
            await odd.ask(Add(1))
        with pytest.raises(RuntimeError, match="Local could not travel"):
            await odd.ask(Fail())


async def test_refs_travel_by_name(runtime: Runtime) -> None:
    ref = await runtime.spawn(Example(), "example")
    back = await ref.ask(Carry((ref, 1)))
    assert back == (ref, 1)


# --- replies in parts -----------------------------------------------------------------------------


async def all_of(ref: Ref, message: Give) -> list[object]:
    """Every part of a reply."""
    return [part async for part in ref.follow(message)]


@pytest.mark.parametrize("later", [False, True])
async def test_parts_arrive_in_order_and_once(runtime: Runtime, later: bool) -> None:
    example = Example()
    ref = await runtime.spawn(example, "example")
    example.parts.put(0)
    following = asyncio.create_task(all_of(ref, Give(later)))
    await ref.tell(Open())
    await settle()
    for number in range(1, 100):
        example.parts.put(number)
        if number % 7 == 0:
            await asyncio.sleep(0)
    assert await ref.ask(Add(1)) == 1
    assert not following.done()
    example.parts.end()
    assert await following == list(range(100))
    assert example.lost == []


async def test_what_a_reply_failed_with_comes_after_its_parts(runtime: Runtime) -> None:
    example = Example()
    ref = await runtime.spawn(example, "example")
    example.parts.put(1)
    example.parts.put(2)
    example.parts.fail(PageError("/some/file", 4096, "no luck"))
    parts = ref.follow(Give())
    assert [await anext(parts), await anext(parts)] == [1, 2]
    with pytest.raises(PageError, match="no luck") as caught:
        await anext(parts)
    assert (caught.value.offset, example.lost) == (4096, [])


async def test_a_refusal_comes_before_any_part(runtime: Runtime) -> None:
    class Refusing(Example):
        async def receive(self, message: Any) -> object:
            raise PageError("/some/file", 4096, "not you")

    ref = await runtime.spawn(Refusing(), "refusing")
    with pytest.raises(PageError, match="not you"):
        await all_of(ref, Give())


@pytest.mark.parametrize("num_put", [0, 1, 3])
@pytest.mark.parametrize("way", ["closed", "cancelled", "forgotten"])
async def test_an_actor_hears_once_that_who_followed_has_left(
    runtime: Runtime, way: str, num_put: int
) -> None:
    example = Example()
    ref = await runtime.spawn(example, "example")

    async def read() -> None:
        async with aclosing(ref.follow(Give())) as parts:
            async for part in parts:
                if way == "closed" and part == num_put - 1:
                    return

    for number in range(num_put):
        example.parts.put(number)
    if way == "forgotten":
        stream = ref.follow(Give())
        waiting = asyncio.create_task(anext(stream))
        await settle()
        waiting.cancel()
        del stream, waiting
        await settle()
        gc.collect()
    else:
        reading = asyncio.create_task(read())
        await settle()
        reading.cancel()
    await settle()
    assert example.lost == ["left"]
    assert example.parts.is_over
    example.parts.put("nobody reads this")
    example.parts.end()
    assert example.parts.take() == []
    assert await ref.ask(Add(1)) == 1


@pytest.mark.parametrize("handled", ["first", "later"])
async def test_leaving_before_the_first_part_is_heard_of(runtime: Runtime, handled: str) -> None:
    example = Example()
    ref = await runtime.spawn(example, "example")
    if handled == "later":
        blocking = asyncio.create_task(ref.ask(Wait(later=False)))
        await settle()
    following = asyncio.create_task(all_of(ref, Give(later=handled == "first")))
    await settle()
    following.cancel()
    await settle()
    assert example.lost == []
    example.gate.set()
    await settle()
    assert example.lost == ["left"]
    if handled == "later":
        assert await blocking == "open"


async def test_who_left_after_the_end_is_no_news(runtime: Runtime) -> None:
    example = Example()
    ref = await runtime.spawn(example, "example")
    example.parts.put(1)
    example.parts.put(2)
    example.parts.end()
    async with aclosing(ref.follow(Give())) as parts:
        assert await anext(parts) == 1
    assert example.lost == []


async def test_parts_without_an_end_fail_when_the_actor_stops(runtime: Runtime) -> None:
    example = Example()
    ref = await runtime.spawn(example, "example")
    parts = ref.follow(Give())
    example.parts.put(1)
    example.parts.put(2)
    assert await anext(parts) == 1
    await runtime.stop("example")
    assert await anext(parts) == 2
    with pytest.raises(Stopped, match="example has stopped"):
        await anext(parts)
    with pytest.raises(Stopped):
        await all_of(ref, Give())
    assert example.lost == []


async def test_after_the_end_comes_nothing() -> None:
    parts = Parts[int]()
    parts.end()
    for late in (lambda: parts.put(1), parts.end, lambda: parts.fail(ValueError())):
        with pytest.raises(ValueError, match="has ended"):
            late()
    assert [part async for part in parts] == []


async def test_asking_and_following_are_not_mixed_up(runtime: Runtime) -> None:
    example = Example()
    ref = await runtime.spawn(example, "example")
    with pytest.raises(TypeError, match="Give is followed, not asked"):
        await ref.ask(Give())
    assert example.lost == ["left"]
    with pytest.raises(TypeError, match="Add is asked, not followed"):
        await all_of(ref, Add(5))  # type: ignore[arg-type]
    assert example.lost == ["left", 5]


async def test_parts_for_nobody_are_left(runtime: Runtime) -> None:
    example = Example()
    ref = await runtime.spawn(example, "example")
    await ref.tell(Give())
    assert await ref.ask(Add(1)) == 1
    assert example.lost == ["left"]


async def test_an_error_of_who_is_left_stays_there(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks() -> None:
        raise ValueError("broken")

    example = Example()
    example.parts = Parts(breaks)
    ref = await runtime.spawn(example, "example")
    example.parts.put(1)
    with caplog.at_level(logging.ERROR, "jitllm"):
        async with aclosing(ref.follow(Give())) as parts:
            assert await anext(parts) == 1
    assert "example could not take a reply back" in caplog.text


async def test_strict_carries_every_part() -> None:
    async with Runtime(strict=True) as runtime:
        example = Example()
        ref = await runtime.spawn(example, "example")
        part = (ref, [1])
        example.parts.put(part)
        example.parts.put(lambda: None)
        parts = ref.follow(Give())
        copy = await anext(parts)
        assert copy == part
        assert copy is not part
        with pytest.raises(Exception, match="pickle"):
            await anext(parts)
        assert example.lost == ["left"]
