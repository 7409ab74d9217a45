"""Which blocks a device may compute: changes name the epoch they lead to, late ones do nothing."""

from __future__ import annotations

import pytest

from jitllm.memory.ownership import Ownership, Stale


def owning(*blocks: int, epoch: int = 0) -> Ownership:
    ownership = Ownership()
    ownership.settle(blocks, epoch)
    return ownership


def test_a_block_is_handed_over_and_dropped() -> None:
    source, destination = owning(0, 1, 2), owning(3)
    assert destination.expect((0, 2), 1) == frozenset()
    assert (destination.owned, destination.expected) == ({3}, {0, 2})
    assert destination.wanted == destination.held == {0, 2, 3}
    source.hand((0, 2), 1)
    assert (source.owned, source.held, source.wanted) == ({1}, {0, 1, 2}, {1})
    assert destination.adopt((0, 2), 1)
    assert (destination.owned, destination.expected) == ({0, 2, 3}, frozenset())
    assert source.drop(1) == {0, 2}
    assert source.held == {1}


def test_everything_twice_is_as_good_as_once() -> None:
    source, destination = owning(0, 1), owning()
    for _ in range(2):
        destination.expect((0,), 1)
    assert destination.take((0,), 1, 1)
    assert not destination.take((0,), 1, 1)
    for _ in range(2):
        source.hand((0,), 1)
    assert destination.adopt((0,), 1)
    assert not destination.adopt((0,), 1)
    assert [source.drop(1) for _ in range(2)] == [{0}, frozenset()]
    assert [source.settle((1,), 2) for _ in range(2)] == [True, False]
    assert (source.owned, destination.owned) == ({1}, {0})


def test_a_move_that_does_not_take_place_leaves_everything_as_it_was() -> None:
    source, destination = owning(0, 1), owning(2)
    destination.expect((0,), 1)
    source.hand((0,), 1)
    assert destination.abandon(1) == {0}
    assert source.abandon(1) == frozenset()
    assert (source.owned, source.held) == ({0, 1}, {0, 1})
    assert (destination.owned, destination.held) == ({2}, {2})


def test_who_adopted_in_vain_owns_nothing() -> None:
    """Its answer was lost, and the source takes the block back."""
    destination = owning(2)
    destination.expect((0,), 1)
    destination.adopt((0,), 1)
    assert destination.abandon(1) == {0}
    assert destination.owned == destination.held == {2}


def test_what_was_adopted_stays_when_another_move_is_given_up() -> None:
    destination = owning(2)
    destination.expect((0,), 1)
    destination.adopt((0,), 1)
    destination.expect((1,), 2)
    assert destination.abandon(2) == {1}
    assert destination.owned == {0, 2}


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda late: late.settle((5,), 1), "own"),
        (lambda late: late.expect((5,), 3), "prepare"),
        (lambda late: late.expect((5,), 2), "prepare"),
        (lambda late: late.take((5,), 3, 9), "take in"),
        (lambda late: late.take((0,), 3, 9), "take in"),
        (lambda late: late.hand((0,), 3), "hand over"),
        (lambda late: late.hand((5,), 4), "hand over"),
        (lambda late: late.adopt((5,), 3), "adopt"),
        (lambda late: late.adopt((0,), 2), "adopt"),
    ],
)
def test_what_comes_late_is_refused_and_changes_nothing(what: object, why: str) -> None:
    late = owning(0, 1, epoch=2)
    late.abandon(3)
    with pytest.raises(Stale, match=f"cannot {why} blocks"):
        what(late)  # type: ignore[operator]
    assert late.owned == late.held == {0, 1}
    late.expect((7,), 4)
    assert late.expected == {7}


def test_late_ends_of_a_move_are_none() -> None:
    late = owning(0, 1, epoch=2)
    assert late.drop(1) == late.abandon(1) == frozenset()
    assert late.owned == {0, 1}
    late.hand((0,), 3)
    assert late.drop(2) == late.abandon(2) == frozenset()
    assert late.held == {0, 1}


def test_after_a_loss_nothing_is_under_way() -> None:
    """Even where the epoch of the beginning is that of the move that it ends."""
    ownership = owning(0, 1, 2)
    ownership.expect((3,), 1)
    ownership.adopt((3,), 1)
    ownership.hand((0,), 2)
    ownership.expect((4,), 3)
    assert ownership.settle((0, 3), 3)
    assert ownership.owned == ownership.held == {0, 3}
    for epoch in range(4):
        assert ownership.abandon(epoch) == ownership.drop(epoch) == frozenset()
    assert ownership.owned == {0, 3}
    with pytest.raises(Stale):
        ownership.take((4,), 3, 1)
    with pytest.raises(Stale):
        ownership.adopt((4,), 3)


def test_a_move_that_is_prepared_ends_those_whose_end_was_not_heard() -> None:
    """What is here of them goes, or it would be taken for the history of this move."""
    ownership = owning(0, 1, 2)
    ownership.expect((5,), 1)
    assert ownership.expect((5, 6), 2) == {5}
    assert ownership.expected == {5, 6}
    ownership.adopt((5, 6), 2)
    assert ownership.expect((5,), 3) == {5}, "nobody prepares for what is owned"
    assert ownership.owned == {0, 1, 2, 6}
    ownership = owning(0, 1, 2)
    ownership.hand((0,), 1)
    assert ownership.expect((0,), 2) == {0}
    assert (ownership.owned, ownership.expected) == ({1, 2}, {0})


def test_parcels_of_a_move_come_in_order() -> None:
    ownership = owning()
    ownership.expect((0, 1), 1)
    assert [ownership.take((0,), 1, number) for number in (1, 3, 2, 3, 4)] == [
        *(True, True, False, False, True)
    ]
    ownership.abandon(1)
    ownership.expect((0, 1), 2)
    assert ownership.take((0, 1), 2, 1), "every move counts anew"
