"""Keys and values of sequences that wait: out of pages into a store, and back, byte for byte.

They leave between two steps, from every device of the route, in parcels; when a sequence has a seat
again, wherever its blocks are by then, the same parcels take the place of computing it. Knows
devices, parcels and stores. Decides nothing about who waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

from actors.actor import Ref
from actors.beside import beside
from actors.charge import HostCharge
from actors.mailbox import Lost
from actors.messages.device import Pack, Parcel, Piece, Restore
from actors.relocate import PARCEL_BYTES
from actors.route import Route
from jitllm.engine import ParkedIn, ParkTotals
from jitllm.errors import JitllmError
from jitllm.memory.ownership import Stale
from jitllm.memory.parked import FileStore, Layout, MemoryStore, Parked, Store
from jitllm.schedule.sequence import Sequence as TokenStream

BEGAN_AGAIN = "it began again, and knows nothing of before"

_WEIGHT = 0.25  # of the latest one in what a park or a resume takes

CHARGED_AS = "parked"
"""Under this name the memory of parked histories is taken from a host's budget."""


class Parker:
    """The parked histories of one model.

    kv_bytes: what a position takes in each block. folder: where files go.
    """

    def __init__(self, route: Route, kv_bytes: Sequence[int], folder: Path) -> None:
        self._route = route
        self._layout = Layout(kv_bytes, PARCEL_BYTES)
        self._folder = folder
        self._parked: dict[int, Parked] = {}
        self._charge = HostCharge(route, CHARGED_AS)
        self._park_s = self._resume_s = 0.0
        self.totals = ParkTotals()

    @property
    def position_bytes(self) -> int:
        """Keys and values of one position, in all blocks."""
        return self._layout.position_bytes

    @property
    def swap_s(self) -> float:
        """What parking a sequence and bringing it back take; 0 before anything is known of it."""
        return self._park_s + self._resume_s

    def get(self, sequence: int) -> Parked | None:
        """The history of a sequence, if it is parked."""
        return self._parked.get(sequence)

    def held_bytes(self, where: ParkedIn) -> int:
        """What is parked there."""
        return sum(parked.num_bytes for parked in self._parked.values() if parked.where == where)

    # --- out ---------------------------------------------------------------------------------

    async def store(self, sequence: TokenStream, to: ParkedIn, *, is_slice: bool = False) -> None:
        """Copy all that is computed of a sequence, which runs, between two steps.

        Its seats are to be closed then. Raises `Stopped` when a device dies, `DiskFull` and other
        `JitllmError` for a store that fails; nothing has changed then.
        """
        began_s = perf_counter()
        with self._counting_failures():
            parked = await beside(lambda _: self._make(sequence.num_computed, to))
            try:
                await self._fill(parked, sequence)
            except BaseException:
                parked.close()
                raise
        self._parked[sequence.id] = parked
        took_s = perf_counter() - began_s
        self._park_s = _mean(self._park_s, took_s)
        self.totals = replace(
            self.totals,
            parks=self.totals.parks + 1,
            slices=self.totals.slices + is_slice,
            bytes_out=self.totals.bytes_out + parked.num_bytes,
            park_s=self.totals.park_s + took_s,
        )

    def _make(self, num_tokens: int, to: ParkedIn) -> Parked:
        num_bytes = num_tokens * self._layout.position_bytes
        store: Store
        store = FileStore(self._folder, num_bytes) if to == "disk" else MemoryStore(num_bytes)
        return Parked(self._layout, num_tokens, store, where=to)

    async def _fill(self, parked: Parked, sequence: TokenStream) -> None:
        epoch = self._route.placement.epoch
        for start, stop in parked.stretches():
            pieces = (_piece(sequence, start, stop),)
            for name, blocks in self._route.owners().items():
                if not blocks:
                    continue
                device = self._route.sites[name].device
                parcel = await packed(device, Pack(blocks, pieces, True, epoch, 0))
                await beside(partial(_put, parked, blocks, start, stop, parcel))

    # --- in ----------------------------------------------------------------------------------

    async def restore(self, sequence: TokenStream, num_cached: int) -> None:
        """Bring back what is parked of a sequence, which has seats at every device of the route.

        num_cached: positions that are there already. Raises `Stopped` when a device dies; what is
        parked stays so. Raises `JitllmError` for what cannot be read.
        """
        began_s = perf_counter()
        parked = self._parked[sequence.id]
        num_bytes = 0
        for start, stop in parked.stretches():
            if stop <= num_cached:
                continue
            pieces = (_piece(sequence, start, stop),)
            for name, blocks in self._route.owners().items():  # who has the head needs the tokens
                with self._counting_failures():
                    data = await beside(partial(_got, parked, blocks, start, stop))
                parcel = Parcel(blocks, pieces, data, 0.0, self._route.placement.epoch, 0)
                await self._route.sites[name].device.ask(Restore(parcel, num_cached))
                num_bytes += len(data) * (stop - max(start, num_cached)) // (stop - start)
        took_s = perf_counter() - began_s
        self._resume_s = _mean(self._resume_s, took_s)
        self.totals = replace(
            self.totals,
            resumes=self.totals.resumes + 1,
            bytes_in=self.totals.bytes_in + num_bytes,
            resume_s=self.totals.resume_s + took_s,
        )
        self.forget(sequence.id)

    def forget(self, sequence: int) -> None:
        """Give back what is parked of a sequence, if anything is."""
        if (parked := self._parked.pop(sequence, None)) is not None:
            parked.close()

    def close(self) -> None:
        """Give everything back."""
        for sequence in list(self._parked):
            self.forget(sequence)

    # --- the budget --------------------------------------------------------------------------

    async def charge(self, without: int | None = None) -> None:
        """Take what is parked in memory from the budget of this host.

        without: a sequence that is about to have its pages again, and would count twice.
        """
        leaving = self._parked.get(without) if without is not None else None
        num_bytes = self.held_bytes("memory")
        if leaving is not None and leaving.where == "memory":
            num_bytes -= leaving.num_bytes
        await self._charge.set(num_bytes)

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except JitllmError:
            self.totals = replace(self.totals, failures=self.totals.failures + 1)
            raise


def _piece(sequence: TokenStream, start: int, stop: int) -> Piece:
    return Piece(sequence.id, start, tuple(sequence.tokens[start:stop]))


async def packed(device: Ref, pack: Pack) -> bytes:
    """What a device has of the pieces, between two steps. Raises `Lost` for one that has not all of
    them."""
    try:
        parcel: Parcel = await device.ask(pack)
    except Stale as error:  # nothing moves between two steps: it owns no block yet
        raise Lost(device.name, BEGAN_AGAIN) from error
    if parcel.pieces != pack.pieces or not isinstance(parcel.data, bytes):
        raise Lost(device.name, BEGAN_AGAIN)
    return parcel.data


def _put(
    parked: Parked, blocks: Sequence[int], start: int, stop: int, data: bytes, _: object
) -> None:
    parked.put(blocks, start, stop, data)


def _got(parked: Parked, blocks: Sequence[int], start: int, stop: int, _: object) -> bytes:
    return parked.get(blocks, start, stop)


def _mean(before_s: float, latest_s: float) -> float:
    """Of what was measured, the latest counting most."""
    return before_s + _WEIGHT * (latest_s - before_s) if before_s else latest_s
