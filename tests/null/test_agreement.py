"""When two rows of logits agree, and what is said when they do not."""

from __future__ import annotations

import math

from jitllm.cli.agreement import Agreement


def compared(band: float, *pairs: tuple[list[float], list[float]]) -> Agreement:
    agreement = Agreement(band)
    for position, (reference, device) in enumerate(pairs):
        agreement.add(position, reference, device)
    return agreement


def test_rows_that_are_the_same_agree() -> None:
    found = compared(0, ([1, 3, 2], [1, 3, 2]), ([3, 3, 2], [3, 3, 2]))
    assert found.problem == ""
    assert found.worst == [0, 0]


def test_every_flip_counts_without_a_band() -> None:
    found = compared(0, ([1, 3, 2], [1, 3, 2]), ([1.0, 2.0, 1.9], [1.0, 2.0, 2.05]))
    (flip,) = found.disagreements
    assert (flip.position, flip.reference, flip.device) == (1, 1, 2)
    assert math.isclose(flip.reference_margin, 0.1)
    assert math.isclose(flip.device_margin, 0.05)
    assert "1 position" in found.problem
    assert any(line.startswith("disagreement at position 1: cpu says 1") for line in found.lines())


def test_a_flip_that_the_band_explains_is_a_tie() -> None:
    near = ([1.0, 2.0, 1.9], [1.0, 2.0, 2.05])
    found = compared(0.2, near)
    assert found.problem == ""
    assert found.as_json()["ties"] == 1
    assert compared(0.04, near).problem


def test_a_flip_by_a_wide_margin_is_none() -> None:
    """Also where two errors within the band explain it."""
    found = compared(0.2, ([1.0, 2.0, 1.7], [1.0, 1.83, 1.87]))
    assert found.largest < 0.2
    assert found.as_json()["disagreements"] == 1
    found = compared(0.2, ([1.0, 2.0, 1.0], [1.0, 2.0, 2.5]))
    assert found.as_json()["disagreements"] == 1


def test_a_difference_beyond_the_band_is_a_problem_without_a_flip() -> None:
    row = ([1.0, 5.0, 2.0], [1.5, 5.0, 2.0])
    assert compared(0, row).problem == ""
    assert compared(0.4, row).problem == "a logit is off by 0.5, and 0.4 is allowed"
    assert compared(0.6, row).problem == ""


def test_what_is_no_number_is_never_agreed_with() -> None:
    for bad in (math.nan, math.inf):
        found = compared(9.0, ([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [1, bad, 3]), ([1, 2], [1, 2]))
        assert found.problem == "a logit of position 1 is not a number"
        assert found.worst == [0]


def test_a_reference_that_is_no_number_agrees_with_nothing() -> None:
    found = compared(9.0, ([math.nan, 1, 2], [1, 1, 2]), ([1, 2], [1, 2]))
    assert found.problem == "a logit of position 0 is not a number"


def test_an_exact_tie_counts_without_a_band() -> None:
    pair = ([2.0, 2.0], [1.0, 2.0])
    assert compared(0, pair).problem
    assert compared(1.0, pair).problem == ""


def test_many_disagreements_are_not_all_shown() -> None:
    found = compared(0, *[([1.0, 2.0], [2.0, 1.0])] * 9)
    shown = [line for line in found.lines() if line.startswith("disagreement")]
    assert len(shown) == 5
    assert "and 4 more" in list(found.lines())


def test_a_position_that_comes_again_counts_once_and_by_its_worst() -> None:
    found = compared(0, ([1.0, 2.0], [1.0, 2.5]))
    found.add(0, [1.0, 2.0], [1.0, 2.1])
    assert found.worst == [0.5]
    for _ in range(2):
        found.add(0, [1.0, 2.0], [2.0, 1.0])
    assert found.problem == "another token is likeliest at 1 position"
