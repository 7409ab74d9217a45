"""Sampling in NumPy, for tests: the same stages, sorted instead of selected, from f64 exponentials.

A draw may differ from the kernel's where the random number falls within a rounding error of the
border between two ids: once in some million draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jitllm.kernels.sample import MIN_TEMPERATURE, WEIGHT_BITS, Sampled, Settings

Floats = NDArray[np.float32]
_MASK = 2**32 - 1


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 as in the paper."""
    a, b, c, d = counter
    x, y = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            (second >> 32) ^ b ^ x,
            second & _MASK,
            (first >> 32) ^ d ^ y,
            first & _MASK,
        )
        x, y = (x + 0x9E3779B9) & _MASK, (y + 0xBB67AE85) & _MASK
    return [a, b, c, d]


def random_bits(seed: int, position: int) -> int:
    """The 64 random bits of a record."""
    low, high, *_ = philox([position & _MASK, position >> 32, 0, 0], [seed & _MASK, seed >> 32])
    return low | high << 32


def log_probability(logits: Floats, token: int) -> float:
    """Of one id, exactly."""
    x = logits.astype(np.float64)
    top = np.nanmax(x)
    return float(x[token] - top - np.log(np.nansum(np.exp(x - top))))


def top_list(logits: Floats, num_top: int) -> list[tuple[int, float]]:
    """The likeliest ids and their log-probabilities, without the unused end."""
    if not np.isfinite(np.nanmax(logits, initial=-np.inf)):
        return []
    order = np.lexsort((np.arange(len(logits)), -logits))
    ids = [int(i) for i in order if logits[i] > -np.inf]
    return [(i, log_probability(logits, i)) for i in ids[:num_top]]


def add_biases(logits: Floats, biases: Sequence[tuple[int, float]]) -> Floats:
    """Stage 0, in f32."""
    x = logits.copy()
    for token, bias in biases:
        if 0 <= token < len(x):
            x[token] += np.float32(bias)
    return x


def penalise(logits: Floats, settings: Settings, history: Sequence[int]) -> Floats:
    """Stage 1; every operation in f32, so the bits are the kernel's."""
    x = logits.copy()
    repeat, frequency, presence = (
        np.float32(p)
        for p in (
            settings.repeat_penalty,
            settings.frequency_penalty,
            settings.presence_penalty,
        )
    )
    for token in {t for t in history if 0 <= t < len(x)}:
        count = np.float32(list(history).count(token))
        scaled = x[token] * repeat if x[token] <= 0 else x[token] / repeat
        x[token] = scaled - (count * frequency + presence)
    return x


def candidates(x: Floats, settings: Settings) -> NDArray[np.int64]:
    """Stage 3: the ids that are left, best first."""
    order = np.lexsort((np.arange(len(x)), -x))[: len(x) - int(np.isnan(x).sum())]
    if settings.top_k > 0:
        order = order[: settings.top_k]
    if settings.top_p < 1:
        weights = _weights(x[order], float(np.nanmax(x)), 1.0)
        share = int(np.float32(settings.top_p) * np.float32(2**32))
        target = max(1, sum(weights) * share >> 32)
        order = order[: 1 + int(np.searchsorted(np.cumsum(weights), target))]
    if settings.min_p > 0:
        floor = np.nanmax(x) + np.float32(math.log(settings.min_p))
        order = order[x[order] >= floor]
    return order


def sample(
    logits: Floats,
    settings: Settings,
    history: Sequence[int] = (),
    biases: Sequence[tuple[int, float]] = (),
) -> Sampled:
    """One token of logits f32 [vocab], none of them infinite unless greedy."""
    x = penalise(add_biases(logits, biases), settings, history)
    if np.isnan(x).all():
        token = 0
    elif settings.temperature < MIN_TEMPERATURE:
        token = int(np.flatnonzero(x == np.nanmax(x))[0])
    else:
        ids = np.sort(candidates(x, settings))
        weights = _weights(x[ids], float(np.nanmax(x)), settings.temperature)
        r = random_bits(settings.seed, settings.position) * sum(weights) >> 64
        token = int(ids[np.searchsorted(np.cumsum(weights), r, side="right")])
    target = settings.target
    return Sampled(
        token,
        log_probability(logits, token) if settings.want_logprob else math.nan,
        log_probability(logits, target) if target >= 0 else math.nan,
    )


def _weights(x: Floats, top: float, temperature: float) -> list[int]:
    scaled = np.exp((x.astype(np.float64) - top) / temperature) * 2**WEIGHT_BITS
    return [int(w) for w in scaled]
