"""Small vocabularies for tests, and merging by score as SentencePiece defines it."""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jitllm.text.tokenizer import Tokenizer, TokenType, VocabularyData

DATA = Path(__file__).parents[1] / "data"
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def load(name: str) -> dict[str, Any]:
    """A file of goldens."""
    with gzip.open(DATA / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        goldens: dict[str, Any] = json.load(file)
        return goldens


def metadata(**values: object) -> dict[str, object]:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def spm_metadata(
    pieces: dict[str, float], *, with_bytes: bool = True, **values: object
) -> dict[str, object]:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, maybe all bytes, then the scored `pieces`."""
    special = ["<unk>", "<s>", "</s>", *(BYTE_TOKENS if with_bytes else [])]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * (len(special) - 3)
    return metadata(
        model="llama",
        tokens=[*special, *pieces],
        scores=[0.0] * len(special) + list(pieces.values()),
        token_type=[int(kind) for kind in kinds] + [int(TokenType.NORMAL)] * len(pieces),
        **{"add_bos_token": False, "add_space_prefix": False, **values},
    )


def bpe_metadata(
    tokens: Sequence[str], merges: Sequence[str], split: str = "gpt-2", **values: object
) -> dict[str, object]:
    return metadata(model="gpt2", pre=split, tokens=list(tokens), merges=list(merges), **values)


def tokenizer(of: dict[str, object]) -> Tokenizer:
    """Through the plain form, as it comes out of a container."""
    return Tokenizer(VocabularyData.from_plain(VocabularyData.from_gguf(of).to_plain(), "m.jlm"))


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """Join the neighbours whose joint text scores best, the leftmost of equals, until none do."""
    pieces = list(text)
    before = list(range(-1, len(pieces) - 1))
    after = [*range(1, len(pieces)), -1]
    queue: list[tuple[float, int, int, int]] = []

    def consider(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and (joint := pieces[left] + pieces[right]) in scores:
            heapq.heappush(queue, (-scores[joint], left, right, len(joint)))

    for right in range(1, len(pieces)):
        consider(right - 1, right)
    while queue:
        _, left, right, size = heapq.heappop(queue)
        if not pieces[left] or not pieces[right] or len(pieces[left] + pieces[right]) != size:
            continue  # one of them has become part of something else
        pieces[left] += pieces[right]
        pieces[right] = ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        consider(before[left], left)
        consider(left, after[left])
    return [piece for piece in pieces if piece]
