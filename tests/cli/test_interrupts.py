"""Ctrl-C belongs to whoever is in the foreground."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from jitllm.cli.daemon.serve import _signalled
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_stops_a_server(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    try:
        stop = _signalled()
        os.kill(os.getpid(), number)
        await stop.wait()
    finally:
        _forget_signals()
        signal.signal(number, before)


async def test_a_server_in_the_background_ignores_what_its_shell_lets_it_ignore(
    ignored: None,
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        stop = _signalled()
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
        await asyncio.sleep(0.01)
        assert not stop.is_set()
    finally:
        _forget_signals()
        signal.signal(signal.SIGHUP, before)


def _forget_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().remove_signal_handler(number)
