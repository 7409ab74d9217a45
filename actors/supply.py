"""How the weights of its blocks get to a device, and whose budget it lives on.

A CPU device computes in its pager's frames, under leases, on the host's budget; a GPU has memory
and a budget of its own (`actors.copied_weights`). Knows the pager. Knows no sequence and no step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from actors.actor import Ref
from actors.messages.device import Brought, DeviceMemory
from actors.messages.pager import (
    Acquire,
    AcquireExperts,
    ExpertLease,
    Fetch,
    Fetched,
    Forget,
    Frame,
    Lease,
    Place,
    Release,
    Reserve,
    Reserved,
    Unreadable,
)
from jitllm.memory.use import Phase


class Supply(Protocol):
    """What a device needs of it. Blocks have the numbers that messages give them; the one after the
    last stands for the head."""

    place_name: str
    """Where keys and values are, for messages."""
    remedy: str
    """How to give the device more memory."""

    async def begin(self, me: Ref, host_bytes: int) -> None:
        """A device begins, perhaps in place of one that died; what it takes of the host."""
        ...

    async def acquire(self, start: int, stop: int, phase: Phase) -> Lease:
        """A lease of block `start` and what follows, at most up to `stop`."""
        ...

    async def release(self, lease: Lease) -> None:
        """A run of blocks is computed."""
        ...

    async def let_go(self) -> None:
        """Release the leases that were kept from the last step."""
        ...

    def has_all(self, num_blocks: int) -> bool:
        """Whether all blocks are here for any number of steps."""
        ...

    def stream(self, blocks: frozenset[int]) -> bool:
        """Which blocks pass through, once they are placed again; whether that changes anything."""
        ...

    async def place(self, held: frozenset[int], wanted: frozenset[int]) -> int:
        """Have room for these blocks and for no others; how many bytes of it there are not.

        held: those of which something has to stay. wanted: those that are, or will be, computed.
        """
        ...

    async def charge(self, kv_bytes: int, spilled_bytes: int) -> Reserved:
        """What keys and values take from now on, promises included; spilled_bytes: beyond their
        budget."""
        ...

    def room_bytes(self) -> int | None:
        """What is left here for more pages; None where blocks give way to them."""
        ...

    async def bring(self, block: int, source: Frame | None, share: float) -> Brought:
        """Have a block's weights here, if there is room ahead of their use; see `Bring`."""
        ...

    async def complete(self, blocks: Iterable[int]) -> None:
        """These blocks are computed from now on: what they lack comes at once."""
        ...

    def memory(self) -> DeviceMemory | None:
        """What is held of a memory of its own, if it has one."""
        ...

    async def close(self) -> None:
        """Nothing is on its way any more."""
        ...


class LeasedWeights:
    """Weights in the frames of a pager. head: the number that stands for it. keeps_dense: the pager
    has the dense region, for all devices of the node."""

    place_name = "the host"
    remedy = "raise -maxmem"

    def __init__(self, pager: Ref, head: int, *, keeps_dense: bool) -> None:
        self._pager = pager
        self._head = head
        self._keeps_dense = keeps_dense
        self._name = ""
        self._leases: dict[int, Lease] = {}

    async def begin(self, me: Ref, host_bytes: int) -> None:
        """See `Supply`."""
        self._name = me.name
        await self._pager.ask(Forget(me))
        await self._pager.ask(Reserve("scratch", host_bytes, self._name))

    async def acquire(self, start: int, stop: int, phase: Phase) -> Lease:
        """See `Supply`; one that may be kept is."""
        kept = self._leases.get(start)
        if kept is not None and kept.stop >= stop:
            return kept
        await self.let_go()
        lease: Lease = await self._pager.ask(Acquire(start, stop, self._name, phase))
        if lease.is_standing:
            self._leases[start] = lease
        return lease

    async def release(self, lease: Lease) -> None:
        """See `Supply`."""
        if not lease.is_standing:
            await self._pager.tell(Release(lease))

    async def acquire_experts(
        self, block: int, experts: tuple[int, ...], phase: Phase
    ) -> ExpertLease | Unreadable:
        """A lease of some of these experts, where they come one by one."""
        return await self._pager.ask(AcquireExperts(block, experts, self._name, phase))

    async def release_experts(self, lease: ExpertLease) -> None:
        """They are computed with."""
        await self._pager.tell(Release(lease))

    async def let_go(self) -> None:
        """See `Supply`."""
        kept, self._leases = self._leases, {}
        for lease in kept.values():
            await self._pager.tell(Release(lease))

    def has_all(self, num_blocks: int) -> bool:
        """See `Supply`."""
        lease = self._leases.get(0)
        return lease is not None and lease.stop == num_blocks

    def stream(self, blocks: frozenset[int]) -> bool:
        """See `Supply`: all of them may, as the pager's budget has it."""
        return False

    async def place(self, held: frozenset[int], wanted: frozenset[int]) -> int:
        """See `Supply`. Nothing is ever missing: blocks are paged."""
        blocks = tuple(sorted(wanted - {self._head}))
        await self._pager.ask(Place(blocks, dense=self._keeps_dense))
        return 0

    async def charge(self, kv_bytes: int, spilled_bytes: int) -> Reserved:
        """See `Supply`: what is beyond their budget is on disk."""
        await self.let_go()
        reserved: Reserved = await self._pager.ask(Reserve("kv", kv_bytes, self._name))
        return reserved

    def room_bytes(self) -> int | None:
        """See `Supply`."""
        return None

    async def bring(self, block: int, source: Frame | None, share: float) -> Brought:
        """See `Supply`."""
        if block == self._head:
            return Brought(0, "here")  # in the dense region, which the node has
        fetched: Fetched = await self._pager.ask(Fetch(block, source, share))
        return Brought(fetched.num_bytes, fetched.origin)

    async def complete(self, blocks: Iterable[int]) -> None:
        """See `Supply`: a lease brings it."""

    def memory(self) -> DeviceMemory | None:
        """See `Supply`."""
        return None

    async def close(self) -> None:
        """See `Supply`."""
