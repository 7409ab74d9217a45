"""Merges: which two pieces of text become one, and which pair goes first.

Knows texts and ids. A piece that is no token has an id behind those of all tokens; such pieces are
called fragments. The merges of a vocabulary with scores are derived here, once, at conversion.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from sys import byteorder

_MAX_MERGED_CHARS = 256
"""Only special tokens are longer; the work of deriving merges is quadratic in this."""


def number_merges(merges: Sequence[str], texts: Sequence[str]) -> tuple[array[int], list[str]]:
    """Merges like "th e" as pairs of ids, and the fragments among their pieces.

    Raises ValueError for a merge that is not of two pieces.
    """
    ids = {text: token_id for token_id, text in enumerate(texts)}
    seen: set[tuple[int, int]] = set()
    pairs = array("I")
    fragments: list[str] = []
    for merge in merges:
        cut = merge.find(" ", 1)
        if cut < 0:
            raise ValueError(f"the merge {merge[:80]!r} is not of two pieces")
        left, right = merge[:cut], merge[cut + 1 :]
        for text in (left, right, left + right):
            if text not in ids:
                ids[text] = len(texts) + len(fragments)
                fragments.append(text)
        pair = ids[left], ids[right]
        if pair not in seen:  # the first of two equal merges counts
            seen.add(pair)
            pairs.extend(pair)
    return pairs, fragments


def derive_merges(texts: Sequence[str], scores: Sequence[float]) -> tuple[array[int], list[str]]:
    """Merges that build the same tokens as merging by score does.

    Merging by score joins, as long as it can, the neighbours whose joint text is the token with the
    best score, the leftmost of equals. Until a token is built nothing can have been joined across
    its borders, so whatever stands around it, it is built as it is when it stands alone: each token
    needs one merge, the last one of its own text, and its score is the rank of that. A single
    character can be joined even if it is no token.

    Where scores are equal no order of merges means "leftmost". But the tokens of equal score that
    occur are runs of one character (spaces, line feeds). A run grows from the left, and so it does
    when its longer tokens rank first.
    """
    ids = {text: token_id for token_id, text in enumerate(texts)}
    fragments = sorted({c for text in texts for c in text if c not in ids and len(text) > 1})
    ids |= {c: len(texts) + index for index, c in enumerate(fragments)}
    score_of = dict(zip(texts, scores, strict=True))
    ranked: list[tuple[float, int, int, int, int]] = []
    for text, score in score_of.items():
        if 1 < len(text) <= _MAX_MERGED_CHARS and (cut := _last_cut(text, ids, score_of)):
            ranked.append((-score, -len(text), ids[text], ids[text[:cut]], ids[text[cut:]]))
    ranked.sort()
    pairs = array("I", bytes(8 * len(ranked)))
    pairs[0::2] = array("I", [merge[3] for merge in ranked])
    pairs[1::2] = array("I", [merge[4] for merge in ranked])
    return pairs, fragments


def _last_cut(text: str, ids: dict[str, int], score_of: dict[str, float]) -> int:
    """Where merging by score joins last in `text`, or 0 if it does not join all of it."""
    cuts = [cut for cut in range(1, len(text)) if text[:cut] in ids and text[cut:] in ids]
    if len(cuts) < 2:
        return cuts[0] if cuts else 0  # a merge that may never be needed does no harm
    parts = list(text)
    find = score_of.get
    while len(parts) > 2:
        best, at = -math.inf, -1
        for index in range(len(parts) - 1):
            score = find(parts[index] + parts[index + 1])
            if score is not None and (score > best or at < 0):
                best, at = score, index
        if at < 0:
            return 0
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return len(parts[0])


def pack_ids(ids: array[int]) -> bytes:
    """Numbers as u32, little endian."""
    if byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()


def unpack_ids(packed: bytes) -> array[int]:
    """What `pack_ids` packed."""
    ids = array("I")
    ids.frombytes(packed)
    if byteorder == "big":
        ids.byteswap()
    return ids
