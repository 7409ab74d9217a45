"""Keys and values that leave a device and come to it, as parcels.

Knows how pieces of history lie in a parcel and in pages. Decides nothing about what travels.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from time import perf_counter

from actors.messages.device import Pack, Parcel, Piece, Unpacked
from actors.outbox import Outbox
from actors.overflow import Overflow
from actors.seats import Seats
from jitllm.devices.runner import Runner
from jitllm.memory.history import History
from jitllm.memory.pages import KvPages


class Parcels:
    """See above."""

    def __init__(
        self,
        runner: Runner,
        pages: KvPages,
        seats: Seats,
        history: History,
        overflow: Overflow,
        outbox: Outbox,
    ) -> None:
        self._runner = runner
        self._pages = pages
        self._seats = seats
        self._history = history
        self._overflow = overflow
        self._outbox = outbox

    async def pack(self, message: Pack) -> Parcel:
        """Keys and values of pieces, but for sequences that have ended. Nothing changes here."""
        began_s = perf_counter()
        pieces = tuple(piece for piece in message.pieces if piece.sequence in self._seats)
        num_bytes = self._num_bytes(message.blocks, pieces)
        if num_bytes:
            tables = partial(self._copies, message.blocks, pieces, out=True)
            async with self._overflow.at_hand(message.blocks, pieces, is_written=False):
                await self._runner.pack(tables, num_bytes, self._outbox.parcel_address)
        data = self._outbox.parcel(num_bytes, inline=message.inline)
        seconds = perf_counter() - began_s
        return Parcel(message.blocks, pieces, data, seconds, message.epoch, message.number)

    async def take_in(self, parcel: Parcel, first: int = 0, last: int = 1 << 62) -> Unpacked:
        """Copy what is in a parcel of positions [first, last) into the pages of its sequences."""
        began_s = perf_counter()
        num_pages = 0
        # Some may have ended while this was on its way.
        pieces = [piece for piece in parcel.pieces if piece.sequence in self._seats]
        taken = [replace(piece, tokens=piece.tokens[: last - piece.start]) for piece in pieces]
        for piece in taken:
            seat = self._seats[piece.sequence]
            await self._seats.grow(piece.sequence, piece.stop)
            start = max(piece.start, first)
            seat.memory.write(start, array("i", piece.tokens[start - piece.start :]))
            size = self._pages.page_tokens
            num_pages += len(parcel.blocks) * (-(-piece.stop // size) - start // size)
        blocks, whole = parcel.blocks, parcel.pieces
        tables = partial(self._copies, blocks, whole, out=False, first=first, last=last)
        await self._overflow.fit_around(taken)
        if num_pages:
            at_hand = self._overflow.at_hand(blocks, taken, is_written=True, first=first)
            with self._outbox.readable(parcel.data) as address:
                async with at_hand:
                    await self._runner.unpack(tables, parcel.num_bytes, address)
        return Unpacked(num_pages, perf_counter() - began_s)

    def _num_bytes(self, blocks: tuple[int, ...], pieces: Iterable[Piece]) -> int:
        return sum(self._history.num_bytes(blocks, len(piece.tokens)) for piece in pieces)

    def _copies(
        self,
        blocks: tuple[int, ...],
        pieces: Iterable[Piece],
        address: int,
        *,
        out: bool,
        first: int = 0,
        last: int = 1 << 62,
    ) -> array[int]:
        """The copies between pieces at an address, one after the other, and pages; of sequences
        that have ended there are none. See `History.copies`."""
        table = array("Q")
        for piece in pieces:
            if piece.sequence in self._seats:
                table += self._history.copies(
                    self._pages,
                    piece.sequence,
                    blocks,
                    piece.start,
                    piece.stop,
                    address,
                    out=out,
                    first=first,
                    last=last,
                )
            address += self._num_bytes(blocks, (piece,))
        return table
