"""Pieces and pauses: the share of the time, and who may change it meanwhile."""

import threading

import pytest

from jitllm.memory import throttle
from jitllm.memory.throttle import HURRIED_PIECE_BYTES, PIECE_BYTES, Abandoned, Throttle


class Clock:
    """Time that passes where it is said to, and in pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(throttle, "perf_counter", lambda: self.now_s)

        def wait(event: threading.Event, seconds: float) -> None:
            self.now_s += 0 if event.is_set() else seconds

        monkeypatch.setattr(threading.Event, "wait", wait)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("num_bytes", [0, 1, PIECE_BYTES, 3 * PIECE_BYTES + 1])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_pieces_are_everything_once(num_bytes: int, share: float) -> None:
    end = 0
    for piece in Throttle(share).pieces(num_bytes):
        assert piece.start == end
        assert piece.start % 4096 == 0
        end = piece.stop
    assert end == num_bytes


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_no_more_than_its_share_is_worked(clock: Clock, share: float) -> None:
    work = Throttle(share)
    num_pieces = 0
    for _ in work.pieces(20 * HURRIED_PIECE_BYTES):
        clock.now_s += 0.001
        num_pieces += 1
    assert work.busy_s == pytest.approx(0.001 * num_pieces)
    assert work.busy_s / clock.now_s == pytest.approx(share)


def test_who_is_hurried_pauses_no_more(clock: Clock) -> None:
    work = Throttle(0.5)
    pieces = work.pieces(4 * HURRIED_PIECE_BYTES)
    assert len(next(pieces)) == PIECE_BYTES
    clock.now_s += 1
    work.hurry()
    for piece in pieces:
        assert clock.now_s - 1 == pytest.approx(piece.start // HURRIED_PIECE_BYTES)
        clock.now_s += 1


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_is_abandoned_ends_before_the_next_piece(share: float) -> None:
    work = Throttle(share)
    pieces = work.pieces(4 * HURRIED_PIECE_BYTES)
    next(pieces)
    work.abandon()
    with pytest.raises(Abandoned):
        next(pieces)


def test_a_pause_ends_when_the_work_is_abandoned() -> None:
    """It would last forever otherwise."""
    work = Throttle(1e-300)
    pieces = work.pieces(2 * PIECE_BYTES)
    next(pieces)
    timer = threading.Timer(0.05, work.abandon)
    timer.start()
    with pytest.raises(Abandoned):
        next(pieces)
    timer.join()


@pytest.mark.parametrize("share", [-1.0, 0.0, 1.5, float("nan")])
def test_a_share_is_a_part_of_the_time(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        Throttle(share)
