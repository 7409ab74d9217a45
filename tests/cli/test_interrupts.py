"""Ctrl-C belongs to whoever is in the foreground."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from jitllm.cli.interrupts import finished, raised


@pytest.fixture
def ignored() -> Iterator[None]:
    """SIGINT as a background job inherits it from a shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


async def _interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.01)


def test_an_interrupt_ends_the_work() -> None:
    assert asyncio.run(finished(_interrupted())) is False


@pytest.mark.usefixtures("ignored")
def test_an_interrupt_that_was_ignored_from_the_start_stays_ignored() -> None:
    assert asyncio.run(finished(_interrupted())) is True
    with raised():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
