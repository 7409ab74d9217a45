"""Sampling: every tier against the reference, and the same results on every tier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.cache import ObjectCache
from jitllm.jit.cpu import Compiler
from jitllm.jit.emit import Kernel, f32v, i32
from jitllm.jit.tiers import PLAIN, TIERS, Tier, missing
from jitllm.kernels.op import Buffer, Rows
from jitllm.kernels.sample import RECORD_BYTES, Sample, Sampled, Settings
from jitllm.kernels.sample import cpu as sample_cpu
from jitllm.kernels.sample.reference import (
    candidates,
    log_probability,
    penalise,
    philox,
    random_bits,
    sample,
)
from tests.ops.harness import Guarded, Rig, piece

HERE = [pytest.param(t, id=t.name, marks=[pytest.mark.skipif(bool(missing(t)), reason="CPU")])
        for t in TIERS]  # fmt: skip
Floats = NDArray[np.float32]


def run(
    logits: Floats,
    settings: Sequence[Settings],
    tier: Tier,
    histories: Sequence[Sequence[int]] | None = None,
    pieces: int = 1,
) -> list[Sampled]:
    """The results of every row; the logits are untouched."""
    rows, vocab = logits.shape
    kept = [np.array(h, np.int32) for h in histories or [()] * rows]
    records = Guarded(rows * RECORD_BYTES)
    records.view[:] = np.frombuffer(
        b"".join(s.pack(h.ctypes.data, len(h)) for s, h in zip(settings, kept, strict=True)),
        np.uint8,
    )
    rig = Rig(0, rows, arrays={"logits": logits}, sampling=records)
    op = Sample(Buffer("logits", vocab, Rows.OUTPUTS), Sample.scratch_buffer("scratch", vocab))
    rig.run(op, tier, pieces)
    records.check()
    assert rig.value("logits").tobytes() == logits.tobytes()
    table = records.view.reshape(rows, RECORD_BYTES)
    return [Sampled.unpack(table[r].tobytes()) for r in range(rows)]


def bits(results: Sequence[Sampled]) -> bytes:
    """For comparisons that hold for NaN too."""
    parts = [(s.token, s.token_logprob, s.target_logprob) for s in results]
    return np.array(parts, np.float64).tobytes()


def normal(rows: int, vocab: int, spread: float = 4) -> Floats:
    """Logits of every row."""
    rng = np.random.default_rng(vocab * 100 + rows)
    return (rng.standard_normal((rows, vocab)) * spread).astype(np.float32)


# --- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("vocab", [*range(1, 71), 1000])
@pytest.mark.parametrize("pieces", [1, 3])
def test_greedy(tier: Tier, vocab: int, pieces: int) -> None:
    """The largest logit; nothing of the row's padding counts, scratch is untouched."""
    logits = normal(4, vocab) - 50
    results = run(logits, [Settings()] * 4, tier, pieces=pieces)
    assert [r.token for r in results] == list(logits.argmax(axis=1))
    assert all(math.isnan(r.token_logprob) and math.isnan(r.target_logprob) for r in results)


@pytest.mark.parametrize("tier", HERE)
def test_greedy_edges(tier: Tier) -> None:
    """Ties go to the lowest id, NaN is never chosen unless all are, infinities count."""
    nan, inf = math.nan, math.inf
    rows = [
        [1, 5, 5, 5],
        [nan, nan, nan, nan],
        [nan, -3, nan, -2],
        [nan, -inf, -inf, nan],
        [-inf, -inf, -inf, -inf],
        [0, inf, inf, nan],
        [-0.0, 0.0, -1, -1],
    ]
    logits = np.array(rows, np.float32)
    for temperature in (0.0, -1.0, 1e-9, math.nan):
        results = run(logits, [Settings(temperature=temperature)] * len(rows), tier)
        assert [r.token for r in results] == [1, 0, 3, 1, 0, 1, 0]
    hot = run(logits[[1, 3, 4, 5]], [Settings(temperature=1.0, top_k=2, top_p=0.5)] * 4, tier)
    assert [r.token for r in hot] == [0, 1, 0, 1]


# --- penalties ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("vocab", [5, 37, 300])
def test_penalties(tier: Tier, vocab: int) -> None:
    """The greedy choice after penalties; ids outside the vocabulary are skipped."""
    rng = np.random.default_rng(vocab)
    logits = normal(40, vocab)
    settings, histories = [], []
    for row in range(40):
        settings.append(
            Settings(
                repeat_penalty=1.0 if row % 3 == 0 else 1.7,
                frequency_penalty=0.0 if row % 4 == 0 else 0.9,
                presence_penalty=0.0 if row % 5 == 0 else -0.4,
            )
        )
        best = logits[row].argsort()[-3:]
        histories.append([-1, vocab, *rng.integers(0, vocab, row).tolist(), *best.tolist()])
    results = run(logits, settings, tier, histories)
    expected = [
        int(penalise(x, s, h).argmax()) for x, s, h in zip(logits, settings, histories, strict=True)
    ]
    assert [r.token for r in results] == expected
    assert expected != list(logits.argmax(axis=1))


# --- drawing --------------------------------------------------------------------------------------

CHAINS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5, "top_p": 0.8},
    {"top_p": 0.95},
    {"top_p": 0.3},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 10**6, "top_p": 0.999999},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 33, 70, 1000])
def test_draws(tier: Tier, chain: dict[str, Any], vocab: int) -> None:
    """The reference's token for every row, alone or cut over calls; bit-equal on the tiers."""
    rows = 24
    logits = normal(rows, vocab)
    logits[3] = np.round(logits[3])  # ties at every border
    logits[4] = 1.0
    logits[5, ::2] = np.nan
    logits[6] *= 30
    settings = [
        Settings(
            seed=2**63 + row,
            position=2**33 + row,
            temperature=(0.3, 1.0, 1.7)[row % 3],
            want_logprob=row % 2 == 0,
            target=row % vocab - (row % 5 == 0) * vocab,
            repeat_penalty=1.0 if row % 4 else 1.3,
            **chain,
        )
        for row in range(rows)
    ]
    histories = [[row % vocab] * 2 for row in range(rows)]
    if vocab == 1:
        logits[5] = 0.5
    results = run(logits, settings, tier, histories)
    expected = [sample(x, s, h) for x, s, h in zip(logits, settings, histories, strict=True)]
    assert [r.token for r in results] == [e.token for e in expected]
    for column in ("token_logprob", "target_logprob"):
        np.testing.assert_allclose(
            [getattr(r, column) for r in results],
            [getattr(e, column) for e in expected],
            rtol=1e-6,
            atol=1e-6,
        )
    assert bits(run(logits, settings, tier, histories, pieces=3)) == bits(results)
    assert bits(run(logits, settings, PLAIN, histories)) == bits(results)


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.parametrize("spread", [0.01, 1, 3])
def test_a_large_vocabulary(tier: Tier, chain: dict[str, Any], spread: float) -> None:
    """50,000 ids, flat and peaked: the short list is long enough."""
    logits = normal(2, 50_000, spread)
    settings = [Settings(seed=7, position=p, temperature=0.8, **chain) for p in range(2)]
    results = run(logits, settings, tier)
    expected = [sample(x, s).token for x, s in zip(logits, settings, strict=True)]
    assert [r.token for r in results] == expected


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """Not on the row, its neighbours or the scratch."""
    tier = [t for t in TIERS if not missing(t)][-1]
    logits = np.repeat(normal(1, 300), 6, axis=0)
    hot = [Settings(seed=5, position=p, temperature=1.5) for p in (1, 2, 1, 3, 1, 2)]
    tokens = [r.token for r in run(logits, hot, tier)]
    assert tokens[0] == tokens[2] == tokens[4]
    assert tokens[1] == tokens[5]
    assert len({tokens[0], tokens[1], tokens[3]}) > 1
    assert tokens[:1] == [r.token for r in run(logits[:1], hot[:1], tier)]


def test_frequencies_follow_the_probabilities() -> None:
    """Chi-square over 20,000 positions of 12 ids, 0.999 quantile."""
    tier = [t for t in TIERS if not missing(t)][-1]
    logits = np.repeat(normal(1, 12, 1), 20_000, axis=0)
    settings = [Settings(seed=1, position=p, temperature=1.3) for p in range(20_000)]
    tokens = [r.token for r in run(logits, settings, tier)]
    p = np.exp(logits[0].astype(np.float64) / 1.3)
    expected = p / p.sum() * 20_000
    chi = ((np.bincount(tokens, minlength=12) - expected) ** 2 / expected).sum()
    assert chi < 31.3


def test_the_chain_cuts_what_it_should() -> None:
    """A hand-made case: what each stage leaves."""
    x = np.log(np.array([0.1, 0.4, 0.3, 0.15, 0.05], np.float32))
    assert list(candidates(x, Settings(top_k=3))) == [1, 2, 3]
    assert list(candidates(x, Settings(top_p=0.65))) == [1, 2]
    assert list(candidates(x, Settings(top_k=2, top_p=0.5))) == [1]
    assert list(candidates(x, Settings(min_p=0.3))) == [1, 2, 3]


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("tier", HERE)
def test_log_probabilities(tier: Tier) -> None:
    """Of targets, near f64; NaN where there is nothing to say."""
    logits = normal(5, 5_000, 6)
    settings = [Settings(target=t) for t in (0, 4_999, 17, -1, 5_000)]
    results = run(logits, settings, tier)
    for row in range(3):
        exact = log_probability(logits[row], settings[row].target)
        assert abs(results[row].target_logprob - exact) <= 2e-7 * abs(exact) + 2e-7
    assert math.isnan(results[3].target_logprob)
    assert math.isnan(results[4].target_logprob)
    logits[0, 0], logits[1, 4_999], logits[2, 5] = -math.inf, math.nan, math.inf
    ends = [r.target_logprob for r in run(logits, settings, tier)[:3]]
    assert ends[0] == -math.inf
    assert math.isnan(ends[1])
    assert math.isnan(ends[2])


# --- the pieces that it is made of ----------------------------------------------------------------

KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
"""Published with Random123: counter, key, result."""


@pytest.mark.parametrize("tier", HERE)
def test_philox_gives_the_published_answers(tier: Tier) -> None:
    """Natively and in the reference."""

    def body(k: Kernel) -> None:
        words = [k.load(k.params[0] + 4 * i, i32) for i in range(6)]
        for i, word in enumerate(sample_cpu.philox(k, words[:4], words[4:])):
            k.store(word, k.params[1] + 4 * i)

    compiler = Compiler(tier, ObjectCache(None))
    _, call = piece(compiler, "philox", body)
    for counter, key, answer in KNOWN_ANSWERS:
        assert philox(counter, key) == answer
        given, got = np.array([*counter, *key], np.uint32), np.zeros(4, np.uint32)
        call(given.ctypes.data, got.ctypes.data, 0, 0)
        assert got.tolist() == answer
    assert random_bits(0, 0) == 0xE169C58D6627E8D5


@pytest.mark.parametrize("tier", HERE)
def test_the_logarithm_is_within_two_ulp(tier: Tier) -> None:
    """Over all normal numbers, more densely around 1."""

    def body(k: Kernel) -> None:
        with k.items() as i:
            x = k.load(k.params[0] + i * 64, f32v)
            k.store(k.log(x), k.params[1] + i * 64)

    compiler = Compiler(tier, ObjectCache(None))
    _, call = piece(compiler, "log", body)
    rng = np.random.default_rng(1)
    wide = rng.integers(0x00800000, 0x7F800000, 40_000).astype(np.uint32).view(np.float32)
    near = (1 + rng.standard_normal(39_984) * 0.1).astype(np.float32).clip(1e-3)
    ends = np.array([0, -0.0, -1, 1e-40, 1, math.inf, math.nan, 2**-126, 3.4e38] + [1] * 7)
    x = np.concatenate([wide, near, ends.astype(np.float32)])
    y = np.zeros_like(x)
    call(x.ctypes.data, y.ctypes.data, 0, len(x) // 16)
    exact = np.log(x[:-16].astype(np.float64))
    error = np.abs(y[:-16] - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert error.max() < 1.5
    assert list(y[-16:-12]) == [-math.inf] * 4
    assert y[-12] == 0
    assert y[-11] == math.inf
    assert math.isnan(y[-10])


def test_records_have_the_documented_size() -> None:
    """And a round trip of the results."""
    assert len(Settings().pack()) == RECORD_BYTES
    assert Sampled.unpack(Settings().pack()) == Sampled(0, 0.0, 0.0)
