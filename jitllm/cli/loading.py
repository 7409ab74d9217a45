"""From a path to an engine at work, with progress on the way.

Knows `compose`, which is imported when the first engine is wanted.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jitllm.cli.interrupts import raised
from jitllm.cli.progress import Progress
from jitllm.config import EngineConfig

if TYPE_CHECKING:
    from jitllm.compose import Loaded


@asynccontextmanager
async def opened(path: Path, config: EngineConfig) -> AsyncIterator[Loaded]:
    """The model of `path`, closed at the end of the block."""
    from jitllm import compose

    with Progress() as progress, raised():  # compiling does not wait for anything
        loaded = await compose.open_engine(path, config, progress=progress)
    # What is there now stays to the end: the garbage collector need not go over it in the
    # middle of a reply.
    gc.freeze()
    try:
        yield loaded
    finally:
        gc.unfreeze()
        await loaded.close()
