"""What actors besides devices take of a host's budget.

Knows the pager that is charged, and under which name. Knows not what for.
"""

from __future__ import annotations

from contextlib import suppress

from actors.actor import Ref
from actors.mailbox import Stopped
from actors.messages.pager import Reserve
from actors.route import Route


class HostCharge:
    """Memory under one name, at the pager of the first block: one without blocks has no room but
    for what it was charged with before."""

    def __init__(self, route: Route, name: str) -> None:
        self._route = route
        self._name = name
        self._charged: tuple[Ref, int] | None = None
        self.num_bytes = 0
        """With which it is charged."""

    async def set(self, num_bytes: int) -> None:
        """So much it is from now on; blocks give way to it."""
        pager = self._route.sites[self._route.placement.blocks[0]].pager
        before, self._charged = self._charged, (pager, num_bytes)
        if before != self._charged and (num_bytes or (before and before[1])):
            with suppress(Stopped):  # then there is no budget either
                if before is not None and before[0] != pager:
                    await before[0].ask(Reserve(self._name, 0, self._name))
            with suppress(Stopped):
                await pager.ask(Reserve(self._name, num_bytes, self._name))
        self.num_bytes = num_bytes
