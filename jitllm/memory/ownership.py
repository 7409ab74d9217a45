"""Which blocks a device may compute, and which are on their way to it or from it.

Knows block numbers and epochs. Knows no memory and no message; nothing here waits. An epoch is that
of the placement to which a change leads: it only grows, every move has one of its own, and so a
message that comes twice changes nothing the second time, and one that comes late changes nothing.
The number after the last block stands for the output head.
"""

from __future__ import annotations

from collections.abc import Iterable

from jitllm.errors import JitllmError

# a block is, on one device, one of
#   absent     nothing of it is here
#   expected   it is being prepared: bytes come in, nothing is computed with it
#   owned      this device computes it
#   handed     another device may own it; what is here waits to be dropped, or taken back


class Stale(JitllmError):
    """A message speaks of a placement that is over."""

    def __init__(self, what: str, blocks: Iterable[int], epoch: int) -> None:
        named = ", ".join(map(str, blocks))
        super().__init__(f"cannot {what} blocks {named} in epoch {epoch}: it is over")
        self.epoch = epoch


class Ownership:
    """The blocks of one device. Every change names the epoch it leads to."""

    def __init__(self) -> None:
        self.owned: frozenset[int] = frozenset()
        self._expected: dict[int, int] = {}
        self._handed: dict[int, int] = {}
        self._adopted: dict[int, int] = {}
        self._epoch = self._settled = -1
        self._taken = (-1, -1)

    @property
    def held(self) -> frozenset[int]:
        """All blocks of which there is something here."""
        return self.owned | self._expected.keys() | self._handed.keys()

    @property
    def wanted(self) -> frozenset[int]:
        """Blocks whose weights have to be here: owned ones, and those to come."""
        return self.owned | self._expected.keys()

    @property
    def expected(self) -> frozenset[int]:
        """Blocks that are being prepared."""
        return frozenset(self._expected)

    def settle(self, blocks: Iterable[int], epoch: int) -> bool:
        """Own exactly these: at the start, and after a loss. What was on its way is not any more.

        False, and nothing is changed, when this is known. Raises `Stale` when a later epoch was
        heard of.
        """
        chosen = frozenset(blocks)
        if epoch < self._epoch:
            raise Stale("own", sorted(chosen), epoch)
        if epoch == self._settled:
            return False
        self._epoch = self._settled = epoch
        self.owned = chosen
        self._adopted.clear()
        self._expected.clear()
        self._handed.clear()
        return True

    def expect(self, blocks: Iterable[int], epoch: int) -> frozenset[int]:
        """Prepare for these; the blocks of which something is here from a move that is over.

        Those are the ones whose end was not heard of: nobody prepares for what is owned here, or
        for two moves at once. Raises `Stale` when this one is over.
        """
        blocks = tuple(blocks)
        if all(self._expected.get(b) == epoch for b in blocks):
            return frozenset()
        if epoch <= self._epoch:
            raise Stale("prepare", blocks, epoch)
        over = self.owned.intersection(blocks) | self._expected.keys() | self._handed.keys()
        self._epoch = epoch
        self.owned = self.owned.difference(blocks)
        self._handed.clear()
        self._expected = dict.fromkeys(blocks, epoch)
        return over

    def take(self, blocks: Iterable[int], epoch: int, number: int) -> bool:
        """Whether a parcel of history of these blocks says anything: one that comes twice, or that
        a later one of the move overtook, does not. Raises `Stale` when they are not expected."""
        blocks = tuple(blocks)
        if any(self._expected.get(b) != epoch for b in blocks):
            raise Stale("take in", blocks, epoch)
        if (epoch, number) <= self._taken:
            return False
        self._taken = (epoch, number)
        return True

    def hand(self, blocks: Iterable[int], epoch: int) -> None:
        """Own these no more, and keep what is here of them. Raises `Stale` when they are not
        owned, unless this very epoch took them."""
        blocks = tuple(blocks)
        if all(self._handed.get(b) == epoch for b in blocks):
            return
        if epoch <= self._epoch or not self.owned.issuperset(blocks):
            raise Stale("hand over", blocks, epoch)
        self._epoch = epoch
        self.owned = self.owned.difference(blocks)
        self._handed |= dict.fromkeys(blocks, epoch)
        for block in blocks:
            self._adopted.pop(block, None)

    def adopt(self, blocks: Iterable[int], epoch: int) -> bool:
        """Own what was expected. False, and nothing is changed, when that is so already.

        Raises `Stale` when it was not expected, or is not any more.
        """
        blocks = tuple(blocks)
        if self.owned.issuperset(blocks) and all(self._adopted.get(b) == epoch for b in blocks):
            return False
        if any(self._expected.get(b) != epoch for b in blocks):
            raise Stale("adopt", blocks, epoch)
        for block in blocks:
            del self._expected[block]
        self.owned = self.owned.union(blocks)
        self._adopted |= dict.fromkeys(blocks, epoch)
        return True

    def drop(self, epoch: int) -> frozenset[int]:
        """Forget what was handed over in this epoch; the blocks that were."""
        gone = _of(epoch, self._handed)
        for block in gone:
            del self._handed[block]
        return gone

    def abandon(self, epoch: int) -> frozenset[int]:
        """The move of this epoch does not take place; the blocks that came for it and go again.

        What was handed over for it is owned again. What was adopted for it is not owned any more:
        whoever says this has not heard that it was, and the source takes it back.
        """
        self._epoch = max(self._epoch, epoch)
        back = _of(epoch, self._handed)
        for block in back:
            del self._handed[block]
        adopted = _of(epoch, self._adopted)
        for block in adopted:
            del self._adopted[block]
        self.owned = self.owned - adopted | back
        gone = _of(epoch, self._expected)
        for block in gone:
            del self._expected[block]
        return gone | adopted


def _of(epoch: int, blocks: dict[int, int]) -> frozenset[int]:
    """Those with this epoch."""
    return frozenset(block for block, e in blocks.items() if e == epoch)
