"""Whether it pays to lend one frame to the block that comes next.

Knows times and counts. Knows no clock and no block by name. Reading ahead hides a read behind
compute, and costs a frame: one block less is kept from scan to scan.
"""

from __future__ import annotations

from dataclasses import dataclass

_CLEAR_GAIN = 0.95
"""A change must promise a scan this much shorter: times of a shared machine waver."""
_FADE = 0.5
"""What the times of a scan weigh beside those of the next one."""


def scan_s(
    num_blocks: int, num_frames: int, compute_s: float, read_s: float, *, ahead: bool
) -> float:
    """Seconds that a scan of `num_blocks` takes under `num_frames`, by the optimum's page-ins.

    `compute_s` and `read_s` are the times of one block.
    """
    kept = num_frames - 1 if ahead else num_frames
    computing = num_blocks * compute_s
    if num_frames >= num_blocks:
        return computing
    if kept < 1:
        return computing + num_blocks * read_s
    page_ins = num_blocks * (num_blocks - kept) / (num_blocks - 1)
    hidden_s = computing / page_ins if ahead else 0.0
    return computing + page_ins * max(read_s - hidden_s, 0.0)


def is_worth(num_blocks: int, num_frames: int, compute_s: float, read_s: float) -> bool:
    """Whether a scan is clearly shorter when it reads ahead."""
    if not 1 < num_frames < num_blocks:
        return False  # no frame to lend, or nothing to read
    without = scan_s(num_blocks, num_frames, compute_s, read_s, ahead=False)
    return scan_s(num_blocks, num_frames, compute_s, read_s, ahead=True) < _CLEAR_GAIN * without


@dataclass(slots=True)
class Pace:
    """How long a block computes and how long one is read, recent scans weighing more."""

    num_computed: float = 0.0
    computing_s: float = 0.0
    num_read: float = 0.0
    reading_s: float = 0.0

    def computed(self, num_blocks: int, seconds: float) -> None:
        """`num_blocks` were computed in `seconds`."""
        self.num_computed += num_blocks
        self.computing_s += seconds

    def read(self, seconds: float) -> None:
        """A block was read in `seconds`."""
        self.num_read += 1
        self.reading_s += seconds

    def decide(self, num_blocks: int, num_frames: int) -> bool | None:
        """Whether the next scan should read ahead; None while there is too little to tell."""
        if self.num_computed < num_blocks or not self.num_read:
            return None
        compute_s = self.computing_s / self.num_computed
        read_s = self.reading_s / self.num_read
        self.num_computed, self.computing_s = _FADE * self.num_computed, _FADE * self.computing_s
        self.num_read, self.reading_s = _FADE * self.num_read, _FADE * self.reading_s
        return is_worth(num_blocks, num_frames, compute_s, read_s)
