"""When lending a frame pays."""

import pytest

from jitllm.memory.read_ahead import Pace, is_worth, scan_s


@pytest.mark.parametrize(
    ("num_frames", "compute_s", "read_s", "worth"),
    [
        (1, 1.0, 1.0, False),  # no frame to lend
        (18, 1.0, 1.0, False),  # nothing to read
        (9, 1.0, 1.0, True),  # every read is hidden
        (9, 1.0, 20.0, False),  # reads rule, and reading ahead reads more
        (9, 1.0, 0.01, False),  # no gain that could be told from noise
        (17, 1.0, 5.0, True),
        (2, 1.0, 1.0, True),
    ],
)
def test_it_weighs_reads_against_compute(
    num_frames: int, compute_s: float, read_s: float, worth: bool
) -> None:
    assert is_worth(18, num_frames, compute_s, read_s) is worth


def test_a_scan_takes_what_it_computes_and_what_it_waits_for() -> None:
    assert scan_s(4, 4, 1.0, 5.0, ahead=False) == 4.0
    assert scan_s(4, 1, 1.0, 5.0, ahead=False) == 24.0
    assert scan_s(4, 1, 1.0, 5.0, ahead=True) == 24.0
    assert scan_s(4, 3, 1.0, 3.0, ahead=False) == pytest.approx(4 + 4 / 3 * 3)
    assert scan_s(4, 3, 1.0, 2.0, ahead=True) == pytest.approx(4 + 8 / 3 * 0.5)


def test_it_decides_once_a_scan_was_seen_and_follows_the_times() -> None:
    pace = Pace()
    assert pace.decide(4, 2) is None
    pace.computed(4, 4.0)
    assert pace.decide(4, 2) is None
    pace.read(1.0)
    assert pace.decide(4, 2) is True
    for _ in range(12):
        pace.computed(4, 0.001)
        pace.read(1.0)
        decision = pace.decide(4, 2)
    assert decision is False
