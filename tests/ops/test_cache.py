"""The cache of compiled kernels: it saves time and is never believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jitllm.jit.cache import ObjectCache
from jitllm.jit.tiers import AVX2, PLAIN, TIERS, Tier
from jitllm.kernels.op import KernelSpec

SPEC = KernelSpec.of("glu", activation="silu")
CODE = bytes(range(256)) * 4


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    return ObjectCache(tmp_path / "cache")


def test_an_entry_is_found_under_its_tier_and_constants_only(cache: ObjectCache) -> None:
    cache.store(PLAIN, SPEC, CODE)
    assert cache.load(PLAIN, SPEC) == CODE
    assert cache.load(AVX2, SPEC) is None
    assert cache.load(PLAIN, KernelSpec.of("glu", activation="gelu")) is None


@pytest.mark.parametrize("keep", [0, 1, 16, 17, len(CODE), len(CODE) + 15])
def test_a_truncated_entry_is_absent(cache: ObjectCache, keep: int) -> None:
    cache.store(PLAIN, SPEC, CODE)
    (entry,) = cache.entries()
    entry.write_bytes(entry.read_bytes()[:keep])
    assert cache.load(PLAIN, SPEC) is None


@pytest.mark.parametrize("at", [0, 15, 16, 500])
def test_a_damaged_entry_is_absent_until_it_is_stored_again(cache: ObjectCache, at: int) -> None:
    cache.store(PLAIN, SPEC, CODE)
    (entry,) = cache.entries()
    data = bytearray(entry.read_bytes())
    data[at] ^= 1
    entry.write_bytes(data)
    assert cache.load(PLAIN, SPEC) is None
    cache.store(PLAIN, SPEC, CODE)
    assert cache.load(PLAIN, SPEC) == CODE


def test_what_was_not_loaded_for_long_goes_when_something_is_stored(tmp_path: Path) -> None:
    old = ObjectCache(tmp_path)
    other = KernelSpec.of("glu", activation="gelu")
    for spec in (SPEC, other):
        old.store(PLAIN, spec, CODE)
    for path in old.entries():
        os.utime(path, (0, 0))
    assert old.load(PLAIN, SPEC) == CODE  # a load makes it young again
    ObjectCache(tmp_path).store(AVX2, SPEC, CODE)
    assert old.load(PLAIN, SPEC) == CODE
    assert old.load(PLAIN, other) is None


def test_what_cannot_be_stored_leaves_nothing(
    cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.store(PLAIN, SPEC, CODE)
    assert cache.entries() == []
    assert cache.load(PLAIN, SPEC) is None


def test_an_entry_that_goes_while_it_is_counted_has_no_size(
    cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(PLAIN, SPEC, CODE)
    entries = [*cache.entries(), Path("/no/such/entry")]
    monkeypatch.setattr(cache, "entries", lambda: entries)
    assert cache.size_bytes() == len(CODE) + 16


FLAGS = {
    "avxvnni": "avx_vnni",
    "avx512vnni": "avx512_vnni",
    "amx-tile": "amx_tile",
    "amx-int8": "amx_int8",
    "bmi": "bmi1",
    "lzcnt": "abm",
    "neon": "asimd",
    "dotprod": "asimddp",
}
"""Names of /proc/cpuinfo where they are not LLVM's."""


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.name)
def test_a_tier_needs_every_feature_that_is_emitted_for_it(tier: Tier) -> None:
    assert {FLAGS.get(f, f) for f in tier.features} == set(tier.needs)
