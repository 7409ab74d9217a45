"""Work in a thread: what comes back, and what an end in the middle leaves."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest

from actors.beside import beside


async def test_the_loop_goes_on_meanwhile() -> None:
    go = Event()
    work = asyncio.create_task(beside(lambda _: go.wait() and "done"))
    await asyncio.sleep(0)
    go.set()
    assert await work == "done"


async def test_what_it_raises_comes_back() -> None:
    def fail(_: Event) -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        await beside(fail)


@pytest.mark.parametrize("fails", [False, True])
async def test_who_is_cancelled_finds_the_thread_ended(fails: bool) -> None:
    began, has_ended = Event(), False

    def work(is_cancelled: Event) -> None:
        nonlocal has_ended
        began.set()
        is_cancelled.wait()
        has_ended = True
        if fails:
            raise ValueError("which nobody wants any more")

    task = asyncio.create_task(beside(work))
    await asyncio.to_thread(began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert has_ended
