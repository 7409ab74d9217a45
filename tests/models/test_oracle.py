"""The tiny models are the ones that the golden logits were computed from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.models import oracle

SUMS = Path(__file__).parents[1] / "oracle" / "models.sha256"
DIGESTS = {
    name.removesuffix(".gguf"): digest
    for digest, name in (line.split() for line in SUMS.read_text().splitlines())
}


@pytest.mark.parametrize("name", DIGESTS)
def test_the_same_bytes_are_written_everywhere(name: str, tmp_path: Path) -> None:
    data = oracle.model_path(name, tmp_path).read_bytes()
    assert hashlib.sha256(data).hexdigest() == DIGESTS[name]


def test_every_model_has_a_digest() -> None:
    written = {*oracle.FLOAT_MODELS, *(f"llama-q-{t}" for t in oracle.WRITTEN_TYPES)}
    written |= set(oracle.QUANTIZED_MIXTURES)
    assert DIGESTS.keys() == written
