"""Which page sets hold the keys and values of which tokens, so that nobody computes them again.

A full set is named by a digest of all tokens from the start of the sequence to its end: keys and
values depend on everything before them, so only prefixes are of use to others. Sets that no
sequence holds stay here until room is needed, the least recently used one goes first. Knows digests
and numbers of sets. Knows no memory and no sequence.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from hashlib import blake2b

DIGEST_BYTES = 16


def extend(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of what `parent` names and `tokens` after it; `parent` is empty at the start."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


def root(namespace: str) -> bytes:
    """What the digests of a namespace begin with: those of two have no prefix in common."""
    return blake2b(namespace.encode(), digest_size=DIGEST_BYTES).digest() if namespace else b""


def digests(tokens: Sequence[int], page_tokens: int, root: bytes = b"") -> tuple[bytes, ...]:
    """One for each full page of `tokens`."""
    return tuple(_digests(tokens, page_tokens, root))


def _digests(tokens: Sequence[int], page_tokens: int, digest: bytes) -> Iterator[bytes]:
    for stop in range(page_tokens, len(tokens) + 1, page_tokens):
        digest = extend(digest, tokens[stop - page_tokens : stop])
        yield digest


def reusable(prompt: Sequence[int], page_tokens: int, root: bytes = b"") -> tuple[bytes, ...]:
    """Digests of the pages of a prompt that need not be computed if they exist.

    Its last token is not among them: it has to be computed to know what follows.
    """
    return digests(prompt[: len(prompt) - 1], page_tokens, root)


class PrefixIndex:
    """Full page sets by their digest; those that no sequence holds are *idle*."""

    def __init__(self) -> None:
        self._sets: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the most recently used one last

    @property
    def num_idle(self) -> int:
        """Sets that only the index keeps."""
        return len(self._idle)

    def __contains__(self, page_set: int) -> bool:
        return page_set in self._digests

    def publish(self, digest: bytes, page_set: int) -> None:
        """A set that a sequence holds is full. The first one of a digest is kept, no other."""
        if digest not in self._sets and page_set not in self._digests:
            self._sets[digest] = page_set
            self._digests[page_set] = digest

    def find(self, wanted: Sequence[bytes]) -> list[int]:
        """Sets of the longest prefix that exists."""
        found: list[int] = []
        for digest in wanted:
            page_set = self._sets.get(digest)
            if page_set is None:
                break
            found.append(page_set)
        return found

    def hold(self, page_set: int) -> None:
        """A sequence holds an idle set again."""
        del self._idle[page_set]

    def leave(self, page_set: int) -> None:
        """No sequence holds a set of the index any more."""
        self._idle[page_set] = None

    def forget(self, page_set: int) -> None:
        """A set that is not idle is not found any more, if it ever was."""
        if (digest := self._digests.pop(page_set, None)) is not None:
            del self._sets[digest]

    def reclaim(self) -> int | None:
        """Forget the least recently used idle set and return it; None when nothing is idle."""
        if not self._idle:
            return None
        page_set, _ = self._idle.popitem(last=False)
        del self._sets[self._digests.pop(page_set)]
        return page_set

    def clear(self) -> frozenset[int]:
        """Forget all sets; those that were idle, which nobody keeps any more."""
        idle = frozenset(self._idle)
        for known in (self._sets, self._digests, self._idle):
            known.clear()
        return idle

    def idle(self) -> Set[int]:
        """All idle sets, also those to come."""
        return self._idle.keys()

    def check(self) -> None:
        """What must hold at every moment."""
        assert {s: d for d, s in self._sets.items()} == self._digests
        assert self._idle.keys() <= self._digests.keys()
