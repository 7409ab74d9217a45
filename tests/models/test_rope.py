"""Rotary frequencies: properties that hold whatever the numbers are."""

from __future__ import annotations

import math
import struct

import pytest

from jitllm.models.rope import Scaling, ScalingKind, frequencies


def test_unscaled_frequencies_are_a_geometric_series() -> None:
    found = frequencies(10_000.0, 8, Scaling())
    assert found.radians == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert found.scale == 1.0
    assert struct.unpack("<4d", found.pack()) == found.radians


def test_factors_divide() -> None:
    found = frequencies(10_000.0, 4, Scaling(), [1.0, 8.0])
    assert found.radians == pytest.approx([1.0, 0.01 / 8])


def test_linear_scaling_divides_all() -> None:
    found = frequencies(10_000.0, 4, Scaling(ScalingKind.LINEAR, factor=4.0))
    assert found.radians == pytest.approx([0.25, 0.0025])


def test_yarn_leaves_fast_pairs_and_divides_slow_ones() -> None:
    scaling = Scaling(ScalingKind.YARN, factor=8.0, original_context=4096)
    plain = frequencies(10_000.0, 128, Scaling()).radians
    found = frequencies(10_000.0, 128, scaling)
    shares = [f / p for f, p in zip(found.radians, plain, strict=True)]
    assert shares[0] == 1.0
    assert shares[-1] == pytest.approx(1 / 8)
    assert shares == sorted(shares, reverse=True)
    for share, frequency in zip(shares, plain, strict=True):
        turns = 4096 * frequency / (2 * math.pi)
        assert share == 1.0 or turns < 36
        assert share == pytest.approx(1 / 8) or turns > 0.8


def test_yarn_stretches_unless_the_model_was_trained_without() -> None:
    yarn = Scaling(ScalingKind.YARN, factor=8.0, original_context=32)
    assert frequencies(1e4, 64, yarn).scale == pytest.approx(1 + 0.1 * math.log(8))
    with_share = Scaling(ScalingKind.YARN, factor=8.0, original_context=32, log_multiplier=1.0)
    assert frequencies(1e4, 64, with_share).scale == 1.0


def test_attention_factor_counts_under_every_kind() -> None:
    for kind in ScalingKind:
        assert frequencies(1e4, 64, Scaling(kind, attention_factor=1.5)).scale == 1.5
