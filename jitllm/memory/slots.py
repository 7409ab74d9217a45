"""Frames of a device that blocks take turns in, where there is no room for a frame each.

Where a block goes is decided once for any number of slots, so that a program that knows addresses
stays good from one pass to the next: the first blocks have a slot each, the others alternate
between the last two, so that one comes in while another is computed. Knows spans and block numbers.
Knows no pager and no program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jitllm.devices.vulkan.arena import Arena, DeviceSpan

MIN_SLOTS = 2
"""What is kept when others want memory: with fewer nothing comes in while something is computed."""


class Slots:
    """The slots of one device, and who is in them.

    block_bytes: of each block of the model. give_back: where a span goes that is not used any more.
    """

    def __init__(
        self,
        arena: Arena,
        block_bytes: Sequence[int],
        give_back: Callable[[DeviceSpan], None],
    ) -> None:
        self._arena = arena
        self._block_bytes = tuple(block_bytes)
        self._give_back = give_back
        self._spans: list[DeviceSpan] = []
        self._inside: dict[int, int] = {}
        self.blocks: tuple[int, ...] = ()
        """Those that pass through, in the order of the model."""

    @property
    def num_slots(self) -> int:
        """Slots that there are."""
        return len(self._spans)

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return sum(span.num_bytes for span in self._spans)

    @property
    def num_inside(self) -> int:
        """Blocks that are in a slot."""
        return len(self._inside)

    @property
    def slot_bytes(self) -> int:
        """Of each: the largest block fits."""
        return max((self._block_bytes[block] for block in self.blocks), default=0)

    @property
    def spare_bytes(self) -> int:
        """What could be given up, and enough would be left."""
        return self.slot_bytes * max(len(self._spans) - MIN_SLOTS, 0)

    def serve(self, blocks: Sequence[int]) -> int:
        """Have slots for these blocks and for no others, `MIN_SLOTS` or as many as there is room
        for; how many bytes are missing for one, and then there is none."""
        blocks = tuple(sorted(blocks))
        if blocks == self.blocks and (self._spans or not blocks):
            return 0
        self._drop(0)
        self.blocks = blocks
        while len(self._spans) < min(MIN_SLOTS, len(blocks)) and self._add():
            pass
        if self._spans or not blocks:
            return 0
        size, self.blocks = self.slot_bytes, ()
        missing = size - self._arena.room_bytes
        return missing if missing > 0 else size  # there is room, but not in one piece

    def widen(self, spare_bytes: int) -> bool:
        """Take what room there is but for so much, up to a slot for each block; whether blocks
        moved by that."""
        before, least = len(self._spans), spare_bytes + self.slot_bytes
        while (
            len(self._spans) < len(self.blocks) and self._arena.room_bytes >= least and self._add()
        ):
            pass
        return self._rearranged(before)

    def narrow(self, num_bytes: int) -> bool:
        """Give so many bytes back, if that leaves enough; whether blocks moved by that."""
        before = len(self._spans)
        if num_bytes > 0 and before > MIN_SLOTS:
            self._drop(max(before - -(-num_bytes // self.slot_bytes), MIN_SLOTS))
        return self._rearranged(before)

    def _rearranged(self, before: int) -> bool:
        if len(self._spans) == before:
            return False
        self._inside.clear()
        return True

    def _add(self) -> bool:
        if (span := self._arena.take(self.slot_bytes)) is None:
            return False
        self._spans.append(span)
        return True

    def _drop(self, keep: int) -> None:
        while len(self._spans) > keep:
            self._give_back(self._spans.pop())
        self._inside.clear()

    # --- turns -------------------------------------------------------------------------------

    def slot(self, block: int) -> int:
        """Where a block goes."""
        index, own = self.blocks.index(block), self._num_own
        return index if index < own else own + (index - own) % (len(self._spans) - own)

    def takes_turns(self, block: int) -> bool:
        """Whether others want its slot."""
        return self.blocks.index(block) >= self._num_own

    @property
    def _num_own(self) -> int:
        """Blocks with a slot of their own, the first ones."""
        count = len(self._spans)
        return count if count >= len(self.blocks) else max(count - MIN_SLOTS, 0)

    def span(self, block: int) -> DeviceSpan:
        """The bytes of a block within its slot."""
        return self._spans[self.slot(block)].part(0, self._block_bytes[block])

    def address(self, block: int) -> int:
        """Where a block lies once it is in; 0 for one that does not pass through."""
        return self._spans[self.slot(block)].address if block in self.blocks else 0

    def has(self, block: int) -> bool:
        """Whether a block is in its slot."""
        return block in self.blocks and self._inside.get(self.slot(block)) == block

    def empty(self, block: int) -> None:
        """Something is about to come into a block's slot."""
        self._inside.pop(self.slot(block), None)

    def filled(self, block: int) -> None:
        """A block is in its slot."""
        self._inside[self.slot(block)] = block

    def next(self, block: int, *, is_busy: bool) -> int | None:
        """Who is to come in while `block` is computed, or after it if it is not busy any more.

        In the order of passes, which follow each other; none while whoever is waited for is in a
        slot that others want, or would take the place of one that is.
        """
        later = [b for b in self.blocks if b > block]
        sooner = [b for b in self.blocks if b < block]
        for candidate in (*later, *sooner):
            if not self.has(candidate):
                is_free = not is_busy or block not in self.blocks
                return candidate if is_free or self.slot(candidate) != self.slot(block) else None
            if self.takes_turns(candidate):
                return None
        return None

    def close(self) -> None:
        """Give everything back."""
        self._drop(0)
        self.blocks = ()
