"""The sequences that have a seat at a device: their pages, what they were promised, what of them
others may share.

Knows page sets and the supply that they are charged to. Knows no step and no block.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from actors.messages.device import Open, Opened, Refused
from actors.messages.pager import Reserved
from actors.supply import Supply
from jitllm.devices.runner import Runner, SeatMemory
from jitllm.engine import Sampling
from jitllm.errors import OutOfPages, OverBudget
from jitllm.kernels.sample import pack_pairs
from jitllm.memory import prefix
from jitllm.memory.pages import KvPages
from jitllm.schedule.sequence import MIN_PROMISED_TOKENS
from jitllm.schedule.step import Span, SpanOutputs


@dataclass(slots=True)
class Seat:
    """What the device keeps of a sequence: its history for penalties, and the room promised.

    memory: its ids and biases as the kernel reads them. num_published: page sets
    that others may share, and digest: the name of the last of them. shares: whether it takes part.
    namespace: what those names begin with.
    """

    sampling: Sampling
    logprobs: bool
    top_logprobs: int
    memory: SeatMemory
    max_tokens: int
    promised_tokens: int
    shares: bool
    num_published: int
    digest: bytes
    stop_ids: frozenset[int]
    namespace: bytes

    def num_top(self, span: Span) -> int:
        """Likeliest tokens to name at each output of a span."""
        has_logprobs = self.logprobs or span.outputs is SpanOutputs.ALL
        return self.top_logprobs if has_logprobs else 0

    def history(self, position: int) -> tuple[int, int]:
        """Address and number of the ids up to a position that penalties are for."""
        window = position + 1
        if self.sampling.repeat_last_n >= 0:
            window = min(self.sampling.repeat_last_n, window)
        return self.memory.history_at(position + 1 - window), window


class Seats:
    """See above. name: what the device is called. Whoever changes anything has the compute thread
    rest first."""

    def __init__(
        self, runner: Runner, pages: KvPages, supply: Supply, name: Callable[[], str]
    ) -> None:
        self._runner = runner
        self._pages = pages
        self._supply = supply
        self._name = name
        self._seats: dict[int, Seat] = {}

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._seats

    def __getitem__(self, sequence: int) -> Seat:
        return self._seats[sequence]

    def __len__(self) -> int:
        return len(self._seats)

    async def open(self, message: Open) -> Opened | Refused:
        """Promise a sequence its KV room; one that is there already begins again."""
        await self.close((message.sequence,))
        wanted = prefix.reusable(message.tokens, self._pages.page_tokens, message.namespace)
        wanted = wanted[: message.max_cached // self._pages.page_tokens]
        try:
            seat_memory, num_cached = self._take_seat(message, wanted)
        except OverBudget as error:
            if message.must_fit:
                what, num_tokens = "a seat", message.max_tokens
                need = error.needed_bytes
                raise self._refusal(message.sequence, num_tokens, what, need) from error
            return Refused(error.needed_bytes, error.budget_bytes)
        num_published = num_cached // self._pages.page_tokens
        seat = self._seats[message.sequence] = Seat(
            message.sampling,
            message.logprobs,
            message.top_logprobs,
            seat_memory,
            message.max_tokens,
            message.promised_tokens,
            bool(message.tokens),
            num_published,
            wanted[num_published - 1] if num_published else message.namespace,
            message.stop_ids,
            message.namespace,
        )
        seat.memory.write(0, array("i", message.tokens[:num_cached]))
        reserved = await self.charge()
        if reserved.over_budget_bytes and not message.must_fit:
            need = self._pages.set_bytes * self._pages.num_sets(message.promised_tokens)
            await self.close((message.sequence,))
            return Refused(need, need - reserved.over_budget_bytes)
        return Opened(message.sequence, num_cached)

    def _take_seat(self, message: Open, wanted: tuple[bytes, ...]) -> tuple[SeatMemory, int]:
        """Memory for what kernels read of a sequence; what is only kept goes for it. And how many
        positions exist already."""
        while True:
            try:
                seat_memory = self._seat_memory(message)
                with ExitStack() as undone:
                    undone.callback(seat_memory.close)
                    num_cached = self._pages.open(message.sequence, message.max_tokens, wanted)
                    undone.pop_all()
                return seat_memory, num_cached
            except OverBudget:
                if not self._pages.idle_bytes:
                    raise
                self._pages.shrink(0)

    async def close(self, sequences: Iterable[int]) -> None:
        """Free what sequences hold; closing one twice does nothing."""
        here = [sequence for sequence in sequences if sequence in self._seats]
        for sequence in here:
            self._unseat(sequence)
        if here:
            await self.charge()

    def clear(self) -> None:
        """Free what all of them hold; nothing is charged anew."""
        for sequence in tuple(self._seats):
            self._unseat(sequence)

    def _unseat(self, sequence: int) -> None:
        self._seats.pop(sequence).memory.close()
        self._pages.close(sequence)

    def _seat_memory(self, message: Open) -> SeatMemory:
        sampling = message.sampling
        biases = pack_pairs(sampling.logit_bias)
        return self._runner.seat(message.max_tokens, biases, reads_history=sampling.penalises)

    async def charge(self) -> Reserved:
        """Tell the supply what KV takes, and give up what was only kept where there is no room.

        What sequences hold counts once, however many share it, and so does what they were promised
        and have not taken yet.
        """
        pages = self._pages
        promised = sum(
            max(pages.num_sets(seat.promised_tokens) - pages.num_taken(sequence), 0)
            for sequence, seat in self._seats.items()
        )
        reserved = await self._supply.charge(
            pages.promised_bytes(promised), pages.beyond_bytes(promised)
        )
        pages.shrink(reserved.spare_bytes)
        return reserved

    async def grow(self, sequence: int, num_tokens: int) -> None:
        """Pages for a sequence's positions; the promise grows with a reply that outruns it."""
        seat, pages = self._seats[sequence], self._pages
        if num_tokens > seat.promised_tokens:
            seat.promised_tokens = min(num_tokens + MIN_PROMISED_TOKENS, seat.max_tokens)
            await self.charge()
        if not pages.grow(sequence, num_tokens):
            num_bytes = (pages.num_sets(num_tokens) - pages.num_taken(sequence)) * pages.set_bytes
            raise self._refusal(sequence, num_tokens, "KV", num_bytes)

    def _refusal(self, sequence: int, num_tokens: int, what: str, needed_bytes: int) -> OutOfPages:
        """That a sequence cannot have something here that so many positions need."""
        memory, supply = self._supply.memory(), self._supply
        free_bytes = self._pages.num_free * self._pages.set_bytes
        return OutOfPages(
            self._name(),
            sequence,
            num_tokens,
            f"{what} of {num_tokens} positions on {supply.place_name}",
            needed_bytes,
            free_bytes if memory is None else memory.budget_bytes - memory.used_bytes,
            supply.remedy,
        )

    def lacks_pages(self) -> bool:
        """Whether there is no memory for one more page of every sequence that may need it."""
        pages, room_bytes = self._pages, self._supply.room_bytes()
        if room_bytes is None:
            return False
        num_sets = sum(
            pages.num_taken(sequence) < pages.num_sets(seat.max_tokens)
            for sequence, seat in self._seats.items()
        )
        need = pages.promised_bytes(num_sets) - pages.promised_bytes(0)  # none beyond a budget
        return need > room_bytes + pages.idle_bytes

    def publish(self, sequence: int, num_tokens: int) -> None:
        """Pages that so many positions fill may be shared: nobody writes to a full page again."""
        seat, size = self._seats[sequence], self._pages.page_tokens
        while seat.shares and (stop := (seat.num_published + 1) * size) <= num_tokens:
            seat.digest = prefix.extend(seat.digest, seat.memory.history[stop - size : stop])
            self._pages.publish(sequence, seat.num_published, seat.digest)
            seat.num_published += 1

    def share_anew(self) -> None:
        """Blocks have come whose pages are full: what others may share is whole again."""
        for seat in self._seats.values():
            seat.num_published, seat.digest = 0, seat.namespace

    def num_left(self, span: Span) -> int:
        """Steps that may follow one by themselves: until its sequence is full, or needs a page."""
        if not span.sample:
            return 0
        seat = self._seats[span.sequence]
        room = self._pages.num_taken(span.sequence) * self._pages.page_tokens
        return max(min(seat.max_tokens - 1, room) - span.stop, 0)
