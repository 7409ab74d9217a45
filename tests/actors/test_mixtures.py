"""What is asked for and what is computed meanwhile end together, however they end."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.mixtures import meanwhile


async def test_what_was_asked_for_comes_after_what_was_done_meanwhile() -> None:
    done: list[str] = []

    async def asked() -> str:
        done.append("asked")
        return "said"

    with ThreadPoolExecutor(1) as compute:
        assert await meanwhile(asked(), compute, None) == "said"
        assert await meanwhile(asked(), compute, lambda: done.append("beside")) == "said"
    assert done.count("asked") == 2
    assert done.count("beside") == 1


async def test_a_refusal_waits_for_the_thread() -> None:
    """Which reads and writes what the next step is written in."""
    loop, began = asyncio.get_running_loop(), asyncio.Event()
    goes_on, done = threading.Event(), threading.Event()

    def beside() -> None:
        loop.call_soon_threadsafe(began.set)
        goes_on.wait(10)
        done.set()

    async def refused() -> str:
        await began.wait()
        loop.call_soon(goes_on.set)
        raise ValueError("not now")

    with ThreadPoolExecutor(1) as compute:
        asked = asyncio.create_task(meanwhile(refused(), compute, beside))
        await asyncio.wait([asked])
        assert done.is_set()
    assert isinstance(asked.exception(), ValueError)


async def test_a_thread_that_fails_leaves_nothing_asked_for() -> None:
    is_asked_for = asyncio.Event()

    async def never() -> str:
        is_asked_for.set()
        try:
            await asyncio.Event().wait()
            return ""
        finally:
            is_asked_for.clear()

    def beside() -> None:
        raise ValueError("not now")

    with ThreadPoolExecutor(1) as compute, pytest.raises(ValueError, match="now"):
        await meanwhile(never(), compute, beside)
    assert not is_asked_for.is_set()
