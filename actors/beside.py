"""Work that would hold up an event loop, done in a thread beside it.

Knows threads and cancelling. Knows no actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Event
from typing import TypeVar

T = TypeVar("T")


async def beside(work: Callable[[Event], T]) -> T:
    """Call `work` in a thread; its result. Raises what it raises.

    The thread has ended when this ends, so that who is cancelled may free what `work` uses. The
    event is set then: long work looks at it now and then, and ends early.
    """
    is_cancelled = Event()
    thread = asyncio.ensure_future(asyncio.to_thread(work, is_cancelled))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        is_cancelled.set()
        await asyncio.wait({thread})
        if not thread.cancelled():
            thread.exception()  # which nobody wants any more
        raise
