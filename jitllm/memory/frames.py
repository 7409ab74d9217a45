"""What a budget is charged with: named reservations, and a frame for each block that is held.

Knows bytes and names. Knows no order of use, no memory and no file. Nothing is refused here: who
asks first whether something `fits` decides, and what is over the budget is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class Frames:
    """A budget in bytes and all that is charged to it.

    budget = reservations (dense region, KV, scratch) + room for frames
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._reservations: dict[str, int] = {}
        self._frames: dict[int, int] = {}
        self._fixed_bytes = 0
        self._frame_bytes = 0

    @property
    def reservations(self) -> Mapping[str, int]:
        """Bytes under each name."""
        return MappingProxyType(self._reservations)

    @property
    def fixed_bytes(self) -> int:
        """What all reservations take."""
        return self._fixed_bytes

    @property
    def frame_bytes(self) -> int:
        """What all frames take."""
        return self._frame_bytes

    @property
    def room_bytes(self) -> int:
        """What the reservations leave for frames, taken or not."""
        return max(self.budget_bytes - self._fixed_bytes, 0)

    @property
    def over_budget_bytes(self) -> int:
        """What is charged beyond the budget."""
        return max(self._fixed_bytes + self._frame_bytes - self.budget_bytes, 0)

    def fits(self, num_bytes: int) -> bool:
        """Whether a frame of `num_bytes` more stays within the budget."""
        return self._frame_bytes + num_bytes <= self.room_bytes

    def reserve(self, name: str, num_bytes: int) -> None:
        """Set what `name` takes; zero gives it back."""
        if num_bytes < 0:
            raise ValueError(f"{name}: {num_bytes} bytes")
        self._fixed_bytes += num_bytes - self._reservations.pop(name, 0)
        if num_bytes:
            self._reservations[name] = num_bytes

    def charge(self, block: int, num_bytes: int) -> None:
        """Take a frame for `block`."""
        if block in self._frames:
            raise ValueError(f"block {block} has a frame")
        self._frames[block] = num_bytes
        self._frame_bytes += num_bytes

    def free(self, block: int) -> None:
        """Give the frame of `block` back."""
        self._frame_bytes -= self._frames.pop(block)

    def check(self) -> None:
        """What must hold at every moment."""
        assert self._fixed_bytes == sum(self._reservations.values()), self._reservations
        assert self._frame_bytes == sum(self._frames.values()), self._frames
        assert all(num_bytes > 0 for num_bytes in self._reservations.values()), self._reservations
