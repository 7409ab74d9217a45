"""What is read is counted under the phase in which it began."""

from __future__ import annotations

from jitllm.memory.use import ExpertUse, PhaseUse, ReadUse


def test_reads_belong_to_the_phase_in_which_they_begin() -> None:
    now_s = [0.0]
    use = ReadUse(lambda: now_s[0])
    load = use.begin()
    now_s[0] = 2.0
    use.phase = "decode"
    use.fault(2)
    first, second = use.begin(), use.begin()
    now_s[0] = 3.0
    use.end(load, 100)
    use.end(first, 10)
    now_s[0] = 5.0
    use.end(second, 0)  # it failed
    assert use.phases == {
        "load": PhaseUse(100, 1, 0, 3.0),
        "prompt": PhaseUse(),
        "decode": PhaseUse(10, 2, 2, 3.0),
    }


def test_rates_of_nothing_are_nothing() -> None:
    assert (PhaseUse().bytes_per_token, PhaseUse().bytes_per_second) == (0, 0)
    assert ExpertUse().hit_rate == 0
    assert PhaseUse(12, 3, 2, 0.5, 4).bytes_per_token == 3
    assert PhaseUse(12, 3, 2, 0.5, 4).plus(PhaseUse(1, 1, 1, 0.5, 1)) == PhaseUse(13, 4, 3, 1.0, 5)
    assert ExpertUse(hits=3, reads=1).hit_rate == 0.75
