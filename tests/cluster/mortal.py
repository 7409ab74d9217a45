"""Device processes that kill themselves at a message, as a file tells them to."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from actors.device import Device
from actors.recipes import DeviceRecipe


@dataclass(frozen=True)
class Plan:
    """A death to come: a file that is gone once it has happened."""

    path: Path

    def order(self, death: str) -> None:
        """DEVICE|MESSAGE|WHEN: an actor, the kind of a message, and before or after it is done."""
        draft = self.path.with_suffix(".draft")
        draft.write_text(death)
        draft.replace(self.path)  # nobody reads a part of it

    @property
    def is_open(self) -> bool:
        """Whether nobody has died of it yet."""
        return self.path.exists()

    def when(self, device: str, message: Any) -> str:
        """When to die of a message; empty: not."""
        try:
            of, kind, when = self.path.read_text().split("|")
        except OSError:
            return ""
        return when if (of, kind) == (device, type(message).__name__) else ""

    def carry_out(self) -> None:
        """End this process, at once."""
        self.path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class MortalRecipe(DeviceRecipe):
    """Of a device that looks at each message whether it is the one to die of."""

    plan: Plan = Plan(Path())

    async def make(self) -> Device:
        """See `Recipe`."""
        device = await DeviceRecipe.make(self)
        receive = device.receive

        async def mortal(message: Any) -> object:
            when = self.plan.when(device.context.me.name, message)
            if when == "before":
                self.plan.carry_out()
            reply = await receive(message)
            if when == "after":
                self.plan.carry_out()
            return reply

        device.receive = mortal  # type: ignore[method-assign]
        return device


def mortal(plan: Plan) -> Any:
    """What makes such recipes in place of `DeviceRecipe`."""

    def make(**choices: Any) -> MortalRecipe:
        assert choices.keys() <= {field.name for field in fields(DeviceRecipe)}
        return MortalRecipe(**choices, plan=plan)

    return make
