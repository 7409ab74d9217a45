"""Placements as values: routes, moves, and the way they are printed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitllm.errors import PlacementError
from jitllm.schedule.placement import HEAD, Leg, Move, Placement, runs_text
from jitllm.schedule.placement_map import parse_map

DEVICES = ("cpu:0", "cpu:1", "cuda:0", "n2/cpu:0")
HALVES = Placement(("cpu:0",) * 9 + ("cpu:1",) * 9, "cpu:0")


@st.composite
def placements(draw: st.DrawFn, num_blocks: int | None = None) -> Placement:
    """Any placement that a map can say: a CPU device has nothing to stream into."""
    blocks = draw(
        st.lists(
            st.sampled_from(DEVICES),
            min_size=num_blocks or 0,
            max_size=12 if num_blocks is None else num_blocks,
        )
    )
    on_gpu = [i for i, device in enumerate(blocks) if device == "cuda:0"]
    return Placement(
        tuple(blocks),
        draw(st.sampled_from(DEVICES)),
        epoch=draw(st.integers(0, 5)),
        pinned=draw(st.frozensets(st.integers(0, len(blocks)))),
        streamed=draw(st.frozensets(st.sampled_from(on_gpu))) if on_gpu else frozenset(),
    )


def test_a_placement_prints_as_runs() -> None:
    assert str(HALVES) == "0-8=cpu:0,9-17=cpu:1,head=cpu:0"
    marked = HALVES.marked(pinned=[3, 18], streamed=[17])
    assert str(marked) == "0-2=cpu:0,3=cpu:0!,4-8=cpu:0,9-16=cpu:1,17=cpu:1~,head=cpu:0!"
    assert marked.epoch == HALVES.epoch + 1
    assert str(Placement.all_on("cpu:0", 1)) == "0=cpu:0,head=cpu:0"
    assert str(Placement((), "cpu:0")) == "head=cpu:0"


@given(placements(), st.booleans())
def test_what_is_printed_is_read_as_the_same(placement: Placement, strict: bool) -> None:
    base = Placement.all_on("cpu:0", placement.num_blocks).marked(pinned=[0])
    base = replace(base, epoch=placement.epoch)
    read = parse_map(str(placement)).resolve(placement.num_blocks, DEVICES, base, strict=strict)
    assert read == (placement, ())
    assert str(parse_map(str(placement))) == str(placement)


def test_the_route_of_a_step() -> None:
    assert HALVES.legs() == (
        Leg("cpu:0", 0, 9, False),
        Leg("cpu:1", 9, 18, False),
        Leg("cpu:0", 18, 18, True),
    )
    assert HALVES.devices == ("cpu:0", "cpu:1")
    assert Placement.all_on("cpu:1", 4).legs() == (Leg("cpu:1", 0, 4, True),)
    holes = Placement(("cpu:1", "cpu:0", "cpu:1"), "cpu:1")
    assert [(leg.device, leg.start, leg.stop, leg.has_head) for leg in holes.legs()] == [
        ("cpu:1", 0, 1, False),
        ("cpu:0", 1, 2, False),
        ("cpu:1", 2, 3, True),
    ]
    assert Placement((), "cpu:0").legs() == (Leg("cpu:0", 0, 0, True),)


@given(placements())
def test_legs_cover_every_block_once_and_end_with_the_head(placement: Placement) -> None:
    legs = placement.legs()
    covered = [(i, leg.device) for leg in legs for i in range(leg.start, leg.stop)]
    assert covered == list(enumerate(placement.blocks))
    assert [leg.has_head for leg in legs] == [False] * (len(legs) - 1) + [True]
    assert legs[-1].device == placement.head
    assert all(one.device != two.device for one, two in zip(legs, legs[1:], strict=False))
    assert tuple(dict.fromkeys(leg.device for leg in legs)) == placement.devices
    owned = [placement.blocks_on(device) for device in placement.devices]
    assert sorted(i for blocks in owned for i in blocks) == list(range(placement.num_blocks))


def test_a_move_changes_the_epoch_and_keeps_what_is_there() -> None:
    moved = HALVES.moved([8, 9, 8], "cpu:1", head=True)
    assert str(moved) == "0-7=cpu:0,8-17=cpu:1,head=cpu:1"
    assert moved.epoch == 1
    assert HALVES.epoch == 0
    assert moved.moved((), "cpu:0", head=True).head == "cpu:0"


REFUSED = [
    # pinned, blocks, head, the whole message
    ([], [18], False, "block 18: the model has blocks 0 to 17"),
    ([], [3, -1, 40], False, "blocks -1,40: the model has blocks 0 to 17"),
    ([3], [2, 3], False, "block 3 is pinned; -placement 3=cpu:0 takes the pin off"),
    ([0, 2, 3], [0, 2, 3, 4], False, "blocks 0,2-3 are pinned; -placement 0=cpu:0,2-3=cpu:0 takes"),
    ([18], [0], True, "the head is pinned; -placement head=cpu:0 takes the pin off"),
    ([], [9, 10], False, "blocks 9-10 are on cpu:1 already; name another device"),
    ([9], [9], False, "block 9 is on cpu:1 already; name another device"),
    ([], [], False, "no block is named; name some, like 0:9, or head"),
]


@pytest.mark.parametrize(("pinned", "blocks", "head", "message"), REFUSED)
def test_a_move_is_refused(pinned: list[int], blocks: list[int], head: bool, message: str) -> None:
    placement = HALVES.marked(pinned)
    with pytest.raises(PlacementError) as caught:
        placement.moved(blocks, "cpu:1", head=head)
    assert str(caught.value).startswith(message)


def test_the_head_that_is_there_already_is_no_move() -> None:
    with pytest.raises(PlacementError, match="the head is on cpu:0 already"):
        HALVES.moved([], "cpu:0", head=True)
    with pytest.raises(PlacementError, match="block 3 and the head are on cpu:0 already"):
        HALVES.moved([3], "cpu:0", head=True)


def test_a_pinned_block_may_stay_where_a_move_goes() -> None:
    assert HALVES.marked([9]).moved([8, 9], "cpu:1").blocks_on("cpu:1") == frozenset(range(8, 18))


def test_the_remedy_of_a_pin_works() -> None:
    pinned = HALVES.marked([0, 2, 3, 18])
    for blocks, head in (([0, 2, 3, 4], False), ([], True)):
        with pytest.raises(PlacementError) as caught:
            pinned.moved(blocks, "cpu:1", head=head)
        text = caught.value.remedy.removeprefix("-placement ").removesuffix(" takes the pin off")
        free, _ = parse_map(text).resolve(18, ["cpu:0", "cpu:1"], pinned, strict=True)
        assert free.moved(blocks, "cpu:1", head=head).epoch == pinned.epoch + 1


@pytest.mark.parametrize(
    ("owners", "gone", "heirs", "after"),
    [
        ("aabbc", "b", "ac", "aaaac"),
        ("aabbc", "b", "c", "aaccc"),
        ("bbacc", "b", "ac", "aaacc"),
        ("bbacc", "b", "c", "ccacc"),
        ("abgba", "b", "ag", "aagga"),
        ("agbga", "b", "a", "agaga"),
        ("bbbbb", "b", "ca", "ccccc"),
        ("aaaab", "b", "ac", "aaaaa"),
        ("ggggb", "b", "ag", "ggggg"),
        ("aaaaa", "b", "a", "aaaaa"),
    ],
)
def test_what_is_left_goes_to_the_nearest_heir(
    owners: str, gone: str, heirs: str, after: str
) -> None:
    before = Placement(tuple(owners[:-1]), owners[-1], epoch=3, pinned=frozenset([1]))
    left = before.without(gone, tuple(heirs))
    assert "".join((*left.blocks, left.head)) == after
    assert (left.epoch, left.pinned) == (3, {1})


@given(placements(), st.sampled_from(DEVICES), st.data())
def test_nothing_stays_with_who_is_gone(
    placement: Placement, gone: str, data: st.DataObject
) -> None:
    others = [device for device in DEVICES if device != gone]
    heirs = data.draw(st.lists(st.sampled_from(others), min_size=1, unique=True))
    left = placement.without(gone, heirs)
    before, after = (*placement.blocks, placement.head), (*left.blocks, left.head)
    for owner, heir in zip(before, after, strict=True):
        assert heir in heirs if owner == gone else heir == owner


def test_moves_between_placements() -> None:
    there = Placement.all_on("cpu:1", 18)
    assert HALVES.moves_to(there) == (Move(tuple(range(9)), True, "cpu:1"),)
    assert [str(move) for move in HALVES.moves_to(there)] == ["blocks 0-8 and the head to cpu:1"]
    assert HALVES.moves_to(replace(HALVES, epoch=7)) == ()
    assert [str(move) for move in there.moves_to(HALVES)] == ["blocks 0-8 and the head to cpu:0"]
    with pytest.raises(PlacementError, match="a placement of 3 blocks is none for a model of 18"):
        HALVES.moves_to(Placement.all_on("cpu:0", 3))


@given(st.data(), st.integers(0, 8))
def test_moves_lead_to_the_other_placement(data: st.DataObject, num_blocks: int) -> None:
    here = data.draw(placements(num_blocks))
    there = data.draw(placements(num_blocks))
    at, moves = here.marked(), here.moves_to(there)
    for move in moves:
        at = at.moved(move.blocks, move.to, head=move.head)
    assert (at.blocks, at.head) == (there.blocks, there.head)
    assert at.epoch == here.epoch + 1 + len(moves)
    moved = [i for move in moves for i in move.blocks]
    assert len(moved) == len(set(moved)), "no block moves twice"
    assert set(moved) == {i for i in range(num_blocks) if here.blocks[i] != there.blocks[i]}
    assert sum(move.head for move in moves) == (here.head != there.head)
    assert at.marked(there.pinned, there.streamed) == replace(there, epoch=at.epoch + 1)


@given(st.sets(st.integers(0, 40)))
def test_runs_name_each_index_once(blocks: set[int]) -> None:
    text = runs_text(sorted(blocks))
    found = [
        i
        for part in text.split(",")
        if part
        for first, _, last in [part.partition("-")]
        for i in range(int(first), int(last or first) + 1)
    ]
    assert found == sorted(blocks)


def test_a_map_leaves_alone_what_it_does_not_name() -> None:
    base = HALVES.marked(pinned=[0, 18], streamed=[17])
    read, declines = parse_map("1=cpu:1").resolve(18, DEVICES, base, strict=True)
    assert declines == ()
    assert (read.pinned, read.streamed, read.epoch) == (base.pinned, base.streamed, base.epoch)
    assert read.blocks_on("cpu:1") == frozenset({1, *range(9, 18)})
    named, _ = parse_map(f"*=cpu:0,{HEAD}=cpu:1").resolve(18, DEVICES, base, strict=True)
    assert (named.pinned, named.streamed) == (frozenset(), frozenset()), "marks come with the entry"
