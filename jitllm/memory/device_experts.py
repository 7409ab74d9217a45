"""Frames of a device that experts come to one by one, as steps need them.

All frames are alike, as large as the largest expert. Which experts are there, and which go when
others come, is `jitllm.memory.experts`'s to say, as on the host. Knows spans and numbers. Knows no
pager and no program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jitllm.devices.vulkan.arena import Arena, DeviceSpan
from jitllm.memory.experts import Admitted, Expert, ExpertResidency


class DeviceExperts:
    """The frames of one device, and who is in them.

    expert_bytes: what an expert takes, of each block whose experts come one by one; counts: how
    many it has. used: experts that a token needs in a block. give_back: where a span goes that is
    not used any more.
    """

    def __init__(
        self,
        arena: Arena,
        expert_bytes: Mapping[int, int],
        counts: Mapping[int, int],
        used: int,
        give_back: Callable[[DeviceSpan], None],
    ) -> None:
        self._arena = arena
        self._give_back = give_back
        self.expert_bytes = dict(expert_bytes)
        self._counts = dict(counts)
        self.frame_bytes = max(expert_bytes.values(), default=0)
        """Of each frame."""
        self._used = used
        sizes = dict.fromkeys(expert_bytes, self.frame_bytes)
        self.residency = ExpertResidency(sizes, 0, used)
        self._free: list[DeviceSpan] = []
        self._frames: dict[Expert, DeviceSpan] = {}
        self.blocks: tuple[int, ...] = ()
        """Those whose experts may be needed here."""

    @property
    def num_frames(self) -> int:
        """Frames that there are."""
        return len(self._free) + len(self._frames)

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return self.num_frames * self.frame_bytes

    @property
    def spare_bytes(self) -> int:
        """What could be given up, and enough would be left for a token."""
        return max(self.num_frames - self._used, 0) * self.frame_bytes

    def serve(self, blocks: Iterable[int]) -> int:
        """Have frames for experts of these blocks and of no others, as many as a token needs or as
        there is room for; how many bytes are missing for one, and then there is none."""
        self.blocks = tuple(sorted(blocks))
        self._free_frames(self.residency.place(self.blocks))
        if not self.blocks:
            self._resize(0)
            return 0
        while self.num_frames < self._used and self._add():
            pass
        self._resize(self.num_frames)
        if self.num_frames:
            return 0
        size, self.blocks = self.frame_bytes, ()
        missing = size - self._arena.room_bytes
        return missing if missing > 0 else size  # there is room, but not in one piece

    def widen(self, spare_bytes: int) -> None:
        """Take what room there is but for so much."""
        num_all = sum(self._counts[block] for block in self.blocks)
        least = spare_bytes + self.frame_bytes
        while self.num_frames < num_all and self._arena.room_bytes >= least and self._add():
            pass
        self._resize(self.num_frames)

    def narrow(self, num_bytes: int) -> bool:
        """Give so many bytes back, if that leaves enough for a token; whether any were."""
        before = self.num_frames
        if num_bytes > 0 and before > self._used:
            self._resize(max(before - -(-num_bytes // self.frame_bytes), self._used))
        return self.num_frames < before

    def _add(self) -> bool:
        if (span := self._arena.take(self.frame_bytes)) is None:
            return False
        self._free.append(span)
        return True

    def _resize(self, keep: int) -> None:
        """Keep so many frames."""
        self._free_frames(self.residency.resize(keep * self.frame_bytes))
        while self.num_frames > keep and self._free:
            self._give_back(self._free.pop())

    def _free_frames(self, gone: Iterable[Expert]) -> None:
        for expert in gone:
            self._free.append(self._frames.pop(expert))

    # --- what a step needs -------------------------------------------------------------------

    def admit(self, block: int, experts: Iterable[int]) -> Admitted:
        """See `ExpertResidency.admit`; those to be read have a frame."""
        found = self.residency.admit(block, experts)
        self._free_frames(found.evicted)
        for expert in found.reads:
            self._frames[Expert(block, expert)] = self._free.pop()
        return found

    def span(self, block: int, expert: int) -> DeviceSpan:
        """Where an expert lies that has a frame."""
        return self._frames[Expert(block, expert)].part(0, self.expert_bytes[block])

    def fail(self, block: int, expert: int) -> None:
        """It could not be brought."""
        self.residency.fail(block, expert)
        self._free.append(self._frames.pop(Expert(block, expert)))

    def address(self, block: int, expert: int) -> int:
        """Where an expert begins; 0 while it is not there."""
        span = self._frames.get(Expert(block, expert))
        return 0 if span is None else span.address

    def close(self) -> None:
        """Give everything back."""
        self.serve(())
