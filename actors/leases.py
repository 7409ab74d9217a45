"""The leases of a pager: who holds which blocks, and for how long.

Part of a pager. Knows devices by name, and where to tell them. Reads and evicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import NamedTuple

from actors.actor import Ref
from actors.mailbox import Stopped
from actors.messages.device import Recall
from actors.messages.pager import Lease
from jitllm.memory.read_ahead import Pace
from jitllm.memory.residency import Residency


class Granted(NamedTuple):
    """A lease and its holder. is_kept: it may be held for long: it stands, or was lent."""

    lease: Lease
    device: str
    since_s: float
    is_kept: bool


class Leases:
    """See above. pace: told how long devices compute under a lease. settle: one was released."""

    def __init__(self, residency: Residency, pace: Pace, settle: Callable[[], None]) -> None:
        self._residency = residency
        self._pace = pace
        self._settle = settle
        self._granted: dict[int, Granted] = {}
        self._devices: dict[str, Ref] = {}
        self._num_leases = 0

    def __len__(self) -> int:
        return len(self._granted)

    def knows(self, device: str) -> bool:
        """Whether a device can be told to give a lease back."""
        return device in self._devices

    def grant(
        self, start: int, stop: int, device: str, *, is_standing: bool = False, is_kept: bool
    ) -> Lease:
        """Pin resident blocks `[start, stop)` until they are released."""
        self._residency.pin(start, stop, kept=is_kept)
        lease = Lease(self._num_leases, start, stop, is_standing)
        self._num_leases += 1
        self._granted[lease.lease_id] = Granted(lease, device, perf_counter(), is_kept)
        return lease

    def release(self, lease: Lease) -> None:
        """Its blocks may go. Twice is as good as once."""
        granted = self._granted.pop(lease.lease_id, None)
        if granted is None:
            return
        lease = granted.lease
        self._residency.unpin(lease.start, lease.stop, kept=granted.is_kept)
        if not granted.is_kept:
            self._pace.computed(lease.stop - lease.start, perf_counter() - granted.since_s)
        self._settle()

    def has_any(self, granted: Iterable[Granted]) -> bool:
        """Whether some of them are held still."""
        return any(one.lease.lease_id in self._granted for one in granted)

    def standing(self) -> list[Granted]:
        """Those that are held for any number of steps."""
        return [granted for granted in self._granted.values() if granted.lease.is_standing]

    def begin(self, device: Ref) -> None:
        """A device begins; what its predecessor held is released."""
        self._devices[device.name] = device
        for granted in list(self._granted.values()):
            if granted.device == device.name:
                self.release(granted.lease)

    async def recall(self, kept: Sequence[Granted]) -> None:
        """Tell who holds `kept` to release it; who has stopped did."""
        for device in {granted.device for granted in kept}:
            try:
                await self._devices[device].tell(Recall())
            except Stopped:
                for granted in kept:
                    if granted.device == device:
                        self.release(granted.lease)
