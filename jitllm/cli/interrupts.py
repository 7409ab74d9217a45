"""Ctrl-C: it ends a reply, not the program that reports on it.

Knows signals and asyncio. Knows no engine: closing a reply's stream is what stops it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


async def finished(work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to its end; False if Ctrl-C cancelled it. A second Ctrl-C ends the program."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    was_interrupted = False

    def interrupt() -> None:
        nonlocal was_interrupted
        was_interrupted = True
        loop.remove_signal_handler(signal.SIGINT)
        task.cancel()

    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # a background job of a shell: whoever started it said so
        await task
        return True
    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not was_interrupted:
            raise
        return False
    else:
        return True
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if not was_interrupted:
            signal.signal(signal.SIGINT, before)


@contextmanager
def raised() -> Iterator[None]:
    """In this block Ctrl-C raises KeyboardInterrupt, also where asyncio would wait."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
