"""Actors of the embedded runtime that die at a message, and what a process holds."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.device import Device
from actors.local import Runtime


@dataclass
class Reaper:
    """Kills devices at messages: `dies(name, message)` says which, `late` after it was handled.

    What a device was asked for is not answered then: whoever asked finds out by its death.
    """

    dies: Callable[[str, Any], bool] = lambda name, message: False
    late: bool = False
    has_successor: bool = True
    num_deaths: int = 0
    runtime: Runtime | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def kill(self, name: str) -> None:
        """End an actor, from within or not."""
        assert self.runtime is not None
        self.num_deaths += 1
        if not self.has_successor:
            self.runtime._recipes.pop(name, None)
        task = asyncio.create_task(self.runtime.kill(name))
        self.tasks.add(task)

    @staticmethod
    def installed(monkeypatch: pytest.MonkeyPatch) -> Reaper:
        """One for the engines that are opened from now on."""
        reaper = Reaper()

        class Watched(Runtime):
            def __init__(self, **choices: Any) -> None:
                super().__init__(**choices)
                reaper.runtime = self

        receive = Device.receive

        async def mortal(device: Device, message: Any) -> object:
            name = device.context.me.name
            if not reaper.dies(name, message):
                return await receive(device, message)
            if reaper.late:
                await receive(device, message)
            reaper.kill(name)
            return await asyncio.Event().wait()

        monkeypatch.setattr("jitllm.compose.Runtime", Watched)
        monkeypatch.setattr(Device, "receive", mortal)
        return reaper


def at(device: str, kind: type, *numbers: int) -> Callable[[str, Any], bool]:
    """The messages of a kind to a device that have these numbers, counted from 1."""
    count = 0

    def dies(name: str, message: Any) -> bool:
        nonlocal count
        is_meant = name == f"device {device}" and isinstance(message, kind)
        count += is_meant
        return is_meant and count in numbers

    return dies


@dataclass(frozen=True)
class Holdings:
    """What this process has of the system. threads: native ones, too."""

    files: int
    threads: int

    @staticmethod
    def now() -> Holdings:
        """Of this moment, but for the threads that an event loop keeps for whoever needs one."""
        pool = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
        return Holdings(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")) - pool)

    async def are_back(self) -> None:
        """Wait until there is no more than this; a thread that was joined takes a moment to go."""
        while True:
            now = Holdings.now()
            if now.files <= self.files and now.threads <= self.threads:
                return
            await asyncio.sleep(0.01)
