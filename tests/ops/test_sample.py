"""Sampling: every tier against the reference, and the same results on every tier."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jitllm.jit.emit import Kernel, f32v, i32
from jitllm.jit.tiers import PLAIN, Tier, available
from jitllm.kernels.matmul.reference import peaks
from jitllm.kernels.op import Buffer, Rows
from jitllm.kernels.sample import (
    PAIR_BYTES,
    PEAK_ONLY,
    RECORD_BYTES,
    WANT_LOGPROB,
    Field,
    Sample,
    Sampled,
    Settings,
    pack_pairs,
    unpack_top,
)
from jitllm.kernels.sample import cpu as sample_cpu
from jitllm.kernels.sample.reference import (
    add_biases,
    candidates,
    log_probability,
    penalise,
    philox,
    random_bits,
    sample,
    top_list,
)
from tests.ops.arena import shared
from tests.ops.harness import HERE, Guarded, Rig, piece, uncached

Floats = NDArray[np.float32]


def run(
    logits: Floats,
    settings: Sequence[Settings],
    tier: Tier,
    histories: Sequence[Sequence[int]] | None = None,
    pieces: int = 1,
    biases: Sequence[Sequence[tuple[int, float]]] | None = None,
) -> list[Sampled]:
    """The results of every row; the logits are untouched."""
    return run_top(logits, settings, tier, 0, histories, pieces, biases)[0]


def run_top(
    logits: Floats,
    settings: Sequence[Settings],
    tier: Tier,
    num_top: int,
    histories: Sequence[Sequence[int]] | None = None,
    pieces: int = 1,
    biases: Sequence[Sequence[tuple[int, float]]] | None = None,
) -> tuple[list[Sampled], list[bytes]]:
    """The results of every row and its top list; the logits are untouched."""
    rows, vocab = logits.shape
    kept = [shared(np.array(h, np.int32)) for h in histories or [()] * rows]
    added = [shared(np.frombuffer(pack_pairs(b), np.uint8)) for b in biases or [()] * rows]
    records = Guarded(rows * RECORD_BYTES)
    tops = [Guarded(num_top * PAIR_BYTES, fill=0x55) for _ in range(rows)]
    records.view[:] = np.frombuffer(
        b"".join(
            s.pack(
                h.ctypes.data,
                len(h),
                bias=b.ctypes.data,
                num_bias=len(b) // PAIR_BYTES,
                top=t.address,
                num_top=num_top,
            )
            for s, h, b, t in zip(settings, kept, added, tops, strict=True)
        ),
        np.uint8,
    )
    arrays = {"logits": logits, "peaks": peaks(logits)}
    rig = Rig(0, rows, arrays=arrays, sampling=records)
    op = Sample(
        Buffer("logits", vocab, Rows.OUTPUTS),
        Sample.scratch_buffer("scratch", vocab),
        Sample.peaks_buffer("peaks") if isinstance(tier, Tier) else None,
    )
    rig.run(op, tier, pieces)
    records.check()
    for top in tops:
        top.check()
    assert rig.value("logits").tobytes() == logits.tobytes()
    table = records.view.reshape(rows, RECORD_BYTES)
    results = [Sampled.unpack(table[r].tobytes()) for r in range(rows)]
    return results, [top.view.tobytes() for top in tops]


def bits(results: Sequence[Sampled]) -> bytes:
    """For comparisons that hold for NaN too."""
    parts = [(s.token, s.token_logprob, s.target_logprob) for s in results]
    return np.array(parts, np.float64).tobytes()


def agree(one: Sequence[Sampled], other: Sequence[Sampled], tier: Tier) -> bool:
    """Results of a tier and of another: the same bits. A GPU's log-probabilities may differ by
    rounding."""
    if isinstance(tier, Tier):
        return bits(one) == bits(other)
    pairs = list(zip(one, other, strict=True))
    logprobs = [(a.token_logprob, b.token_logprob) for a, b in pairs]
    logprobs += [(a.target_logprob, b.target_logprob) for a, b in pairs]
    is_close = np.allclose(*np.transpose(logprobs), rtol=1e-6, atol=1e-6, equal_nan=True)
    return is_close and all(a.token == b.token for a, b in pairs)


def normal(rows: int, vocab: int, spread: float = 4) -> Floats:
    """Logits of every row."""
    rng = np.random.default_rng(vocab * 100 + rows)
    return (rng.standard_normal((rows, vocab)) * spread).astype(np.float32)


# --- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("vocab", [*range(1, 71), 1000])
@pytest.mark.parametrize("pieces", [1, 3])
def test_greedy(tier: Tier, vocab: int, pieces: int) -> None:
    """The largest logit; nothing of the row's padding counts."""
    logits = normal(4, vocab) - 50
    results = run(logits, [Settings()] * 4, tier, pieces=pieces)
    assert [r.token for r in results] == list(logits.argmax(axis=1))
    assert all(math.isnan(r.token_logprob) and math.isnan(r.target_logprob) for r in results)


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("vocab", [70, 2048, 2049, 5000])
def test_equal_peaks(tier: Tier, vocab: int) -> None:
    """Threads look at slices of the vocabulary: the first id counts wherever its equals are, also
    where whole slices are NaN, and id 0 where nothing is a number."""
    rng = np.random.default_rng(vocab)
    logits = normal(12, vocab)
    for row in range(9):
        logits[row, rng.integers(0, vocab, 5)] = 99.0
    logits[3:6, : vocab // 2] = np.nan
    logits[6:9, rng.integers(0, vocab, vocab)] = np.nan
    logits[9] = np.nan
    logits[10] = -np.inf
    logits[11] = np.nan
    logits[11, vocab - 2 :] = -np.inf
    expected = [sample(x, Settings()).token for x in logits]
    assert expected[9:] == [0, 0, vocab - 2]
    assert [r.token for r in run(logits, [Settings()] * 12, tier, pieces=5)] == expected


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


# --- biases and penalties -------------------------------------------------------------------------


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("vocab", [1, 5, 16, 37, 300])
def test_biases(tier: Tier, vocab: int) -> None:
    """Added once for each time that an id is listed, before penalties; log-probabilities are of
    the logits as they came; ids outside the vocabulary are skipped."""
    rng = np.random.default_rng(vocab)
    rows = 30
    logits = normal(rows, vocab)
    settings, biases, histories = [], [], []
    for row in range(rows):
        settings.append(
            Settings(
                seed=row,
                temperature=0.0 if row % 3 else 0.9,
                repeat_penalty=1.5 if row % 2 else 1.0,
                target=row % vocab,
                want_logprob=True,
            )
        )
        ids = [*rng.integers(0, vocab, row).tolist(), -1, vocab, 2**31 - 1]
        biases.append([(i, float(b)) for i, b in zip(ids, rng.normal(0, 9, len(ids)), strict=True)])
        histories.append(rng.integers(0, vocab, row).tolist())
    results = run(logits, settings, tier, histories, biases=biases)
    expected = [
        sample(x, s, h, b) for x, s, h, b in zip(logits, settings, histories, biases, strict=True)
    ]
    assert [r.token for r in results] == [e.token for e in expected]
    plain = run(logits, settings, tier, histories)
    assert [r.target_logprob for r in results] == [r.target_logprob for r in plain]
    assert agree(run(logits, settings, PLAIN, histories, 3, biases), results, tier)
    if vocab > 1:
        assert [r.token for r in results] != [r.token for r in plain]


@pytest.mark.parametrize("tier", HERE)
def test_biases_ban_and_force(tier: Tier) -> None:
    """-inf takes an id out of a draw, a large bias leaves nothing else."""
    logits = normal(8, 20)
    hot = [Settings(seed=s, temperature=2.0, top_p=0.9) for s in range(8)]
    banned = [[(i, -math.inf) for i in range(20) if i != row] for row in range(8)]
    assert [r.token for r in run(logits, hot, tier, biases=banned)] == list(range(8))
    forced = [[(7, 100.0)]] * 8
    assert [r.token for r in run(logits, hot, tier, biases=forced)] == [7] * 8
    assert add_biases(logits[0], [(7, 1.0), (7, 1.0)])[7] == logits[0, 7] + np.float32(2)


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
    assert agree(run(logits, settings, PLAIN, histories), results, tier)


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
    tier = available()[-1]
    logits = np.repeat(normal(1, 300), 6, axis=0)
    hot = [Settings(seed=5, position=p, temperature=1.5) for p in (1, 2, 1, 3, 1, 2)]
    tokens = [r.token for r in run(logits, hot, tier)]
    assert tokens[0] == tokens[2] == tokens[4]
    assert tokens[1] == tokens[5]
    assert len({tokens[0], tokens[1], tokens[3]}) > 1
    assert tokens[:1] == [r.token for r in run(logits[:1], hot[:1], tier)]


def test_frequencies_follow_the_probabilities() -> None:
    """Chi-square over 20,000 positions of 12 ids, 0.999 quantile."""
    tier = available()[-1]
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


# --- the likeliest ids ----------------------------------------------------------------------------


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 33, 70, 1000, 5003])
@pytest.mark.parametrize("num_top", [1, 2, 5, 20])
def test_top_lists(tier: Tier, vocab: int, num_top: int) -> None:
    """The reference's ids, ties to the lowest; bit-equal on the tiers; whatever the settings."""
    rows = 8
    logits = normal(rows, vocab)
    logits[1] = np.round(logits[1] / 3)  # ties everywhere, both zeros among them
    logits[2] = 1.0
    logits[3, 1::2] = np.nan
    logits[4, 1::2] = -np.inf
    logits[5] = np.sort(logits[5])  # every element enters the list
    logits[6] *= 30
    settings = [
        Settings(temperature=row % 2, repeat_penalty=1.3, top_p=0.9, want_logprob=row % 3 == 0)
        for row in range(rows)
    ]
    biases = [[(0, 5.0)] * (row % 2) for row in range(rows)]
    histories = [[0]] * rows
    results, tops = run_top(logits, settings, tier, num_top, histories, biases=biases)
    for x, top in zip(logits, tops, strict=True):
        found, expected = unpack_top(top), top_list(x, num_top)
        assert [i for i, _ in found] == [i for i, _ in expected]
        np.testing.assert_allclose(
            [p for _, p in found], [p for _, p in expected], rtol=1e-6, atol=1e-6
        )
    assert run_top(logits, settings, tier, num_top, histories, 3, biases)[1] == tops
    if isinstance(tier, Tier):
        assert run_top(logits, settings, PLAIN, num_top, histories, 1, biases)[1] == tops
    without = run(logits, settings, tier, histories, biases=biases)
    assert bits(results) == bits(without)


@pytest.mark.parametrize("tier", HERE)
def test_top_lists_hold_what_has_a_probability(tier: Tier) -> None:
    """Short where few ids have one, empty where none has; the unused end is (-1, NaN)."""
    nan, inf = math.nan, math.inf
    rows = [[nan] * 4, [-inf] * 4, [0, inf, nan, 1], [nan, 2, -inf, nan], [-inf, 1, 1, 0]]
    logits = np.array(rows, np.float32)
    _, tops = run_top(logits, [Settings()] * 5, tier, 3)
    assert [[i for i, _ in unpack_top(t)] for t in tops] == [[], [], [], [1], [1, 2, 3]]
    assert unpack_top(tops[3]) == ((1, 0.0),)
    ends = np.frombuffer(tops[3], np.dtype([("id", "i4"), ("logprob", "f4")]))[1:]
    assert (ends["id"] == -1).all()
    assert np.isnan(ends["logprob"]).all()


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

    compiler = uncached(tier)  # the code lives as long as it does
    _, call = piece(compiler, "philox", body)
    for counter, key, answer in KNOWN_ANSWERS:
        assert philox(counter, key) == answer
        given, got = shared(np.array([*counter, *key], np.uint32)), shared(np.zeros(4, np.uint32))
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

    compiler = uncached(tier)  # the code lives as long as it does
    _, call = piece(compiler, "log", body)
    rng = np.random.default_rng(1)
    wide = rng.integers(0x00800000, 0x7F800000, 40_000).astype(np.uint32).view(np.float32)
    near = (1 + rng.standard_normal(39_984) * 0.1).astype(np.float32).clip(1e-3)
    ends = np.array([0, -0.0, -1, 1e-40, 1, math.inf, math.nan, 2**-126, 3.4e38] + [1] * 7)
    x = shared(np.concatenate([wide, near, ends.astype(np.float32)]))
    y = shared(np.zeros_like(x))
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


# --- which outputs need their logits --------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "lists", "is_peak"),
    [
        ({}, {}, True),
        ({"temperature": math.nan, "top_k": 5, "seed": 9}, {}, True),
        ({"keep_logits": True}, {}, False),
        ({"temperature": 0.7}, {}, False),
        ({"want_logprob": True}, {}, False),
        ({"target": 0}, {}, False),
        ({"repeat_penalty": 1.1}, {}, False),
        ({"frequency_penalty": 0.1}, {}, False),
        ({"presence_penalty": -0.1}, {}, False),
        ({}, {"num_bias": 1}, False),
        ({}, {"num_top": 1}, False),
    ],
    ids=str,
)
def test_only_a_plain_peak_can_do_without_logits(
    settings: dict[str, Any], lists: dict[str, int], is_peak: bool
) -> None:
    record = Settings(**{"keep_logits": False, **settings}).pack(**lists)
    (flags,) = struct.unpack_from("<i", record, Field.FLAGS)
    assert bool(flags & PEAK_ONLY) == is_peak
    assert bool(flags & WANT_LOGPROB) == settings.get("want_logprob", False)
