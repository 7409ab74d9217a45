"""Every row, in exact arithmetic, gives the logits of an independent engine; every feature counts.

No kernel is involved: a failure here is a wrong row, a wrong number or a wrong wire.
"""

from __future__ import annotations

import numpy as np
import pytest

from jitllm.models.registry import spec_of
from tests.models import oracle
from tests.models.reference import logits
from tests.models.variants import CHANGES, Variant

MAX_DIFFERENCE = 2e-4
MAX_RMS = 5e-5


@pytest.mark.parametrize("name", oracle.FLOAT_MODELS)
def test_float_weights_give_the_golden_logits(name: str) -> None:
    source = oracle.model(name)
    tokens, truth = oracle.golden(name)
    difference = logits(source.graph(), source.values, tokens) - truth
    assert np.abs(difference).max() <= MAX_DIFFERENCE
    assert np.sqrt((difference**2).mean()) <= MAX_RMS


@pytest.mark.parametrize("weight_type", oracle.WEIGHT_TYPES)
def test_quantised_activations_stay_close_to_exact_ones(weight_type: str) -> None:
    source = oracle.quantized(weight_type)
    tokens, truth = oracle.golden(weight_type)
    difference = logits(source.graph(), source.values, tokens) - truth
    assert np.abs(difference).max() <= 0.3
    assert np.sqrt((difference**2).mean()) <= 0.06


@pytest.mark.parametrize("name", oracle.QUANTIZED_MIXTURES)
def test_quantised_activations_turn_few_choices(name: str) -> None:
    source = oracle.model(name)
    tokens, truth = oracle.golden(name)
    oracle.check_quantized_mixture(logits(source.graph(), source.values, tokens) - truth)


@pytest.mark.parametrize("change", CHANGES)
def test_without_a_feature_the_logits_are_wrong(change: str) -> None:
    name, take_away = CHANGES[change]
    source = oracle.model(name)
    spec = spec_of(source.arch)
    variant = Variant(spec, source.hparams, source.weights, source.rope_factors)
    take_away(variant)
    tokens, truth = oracle.golden(name)
    difference = np.abs(logits(variant.graph(), source.values, tokens) - truth).max()
    assert difference > 10 * MAX_DIFFERENCE
