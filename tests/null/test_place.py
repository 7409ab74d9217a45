"""Automatic placement, and how pagers share a budget, as tables of before and after."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitllm.devices.grammar import is_cpu
from jitllm.errors import PlacementError
from jitllm.schedule.place import BlockCost, Need, Room, divide_budget, place

MIB = 1 << 20
TEN = [BlockCost(weight_bytes=80 * MIB, kv_bytes=20 * MIB)] * 10  # 1000 MiB together
HEAD = 210 * MIB


def room(name: str, blocks: float, *, head: bool = False, speed: float = 1e10) -> Room:
    """A device with room for so many of TEN and perhaps the head, once a tenth is left for KV."""
    num_bytes = int(blocks * 100 * MIB) + HEAD * head
    return Room(name, 50 * MIB + num_bytes * 10 // 9 + 1, fixed_bytes=50 * MIB, speed=speed)


def host(blocks: float, name: str = "cpu:0") -> Room:
    """A CPU device with room for so many blocks; it has the weights of the head in any case."""
    return Room(name, int(blocks * 100 * MIB) * 10 // 9 + 1, speed=1e9, has_head=True)


PLACED = [
    # devices, -gpu-layers, the placement
    # The fewest devices, the fastest first.
    ([host(10)], -1, "0-9=cpu:0,head=cpu:0"),
    ([host(10), host(10, "cpu:1")], -1, "0-9=cpu:0,head=cpu:0"),
    ([host(20), room("cuda:0", 10, head=True)], -1, "0-9=cuda:0,head=cuda:0"),
    (
        [host(20), room("cuda:0", 20, head=True), room("cuda:1", 20, head=True, speed=2e10)],
        -1,
        "0-9=cuda:1,head=cuda:1",
    ),
    # Of equal devices a roomy one spares a second.
    ([host(6), host(10, "cpu:1")], -1, "0-9=cpu:1,head=cpu:1"),
    # One run each, in order of speed; the head where it saves most.
    ([host(6), host(6, "cpu:1")], -1, "0-5=cpu:0,6-9=cpu:1,head=cpu:1"),
    ([host(20), room("cuda:0", 6)], -1, "0-5=cuda:0,6-9=cpu:0,head=cpu:0"),
    # The head takes as much room as two blocks and a bit, and reads more than two, not than three.
    ([host(20), room("cuda:0", 6.9)], -1, "0-3=cuda:0,4-9=cpu:0,head=cuda:0"),
    ([host(20), room("cuda:0", 6.9, head=True)], -1, "0-8=cuda:0,9=cpu:0,head=cpu:0"),
    ([host(20), room("cuda:0", 10)], -1, "0-9=cuda:0,head=cpu:0"),
    # What fits nowhere goes to the host, which pages it.
    ([host(4)], -1, "0-9=cpu:0,head=cpu:0"),
    ([host(0)], -1, "0-9=cpu:0,head=cpu:0"),
    ([host(3), host(4, "cpu:1")], -1, "0-3=cpu:1,4-9=cpu:0,head=cpu:0"),
    ([host(3), room("cuda:0", 4)], -1, "0-3=cuda:0,4-9=cpu:0,head=cpu:0"),
    # A cap on what leaves the CPU.
    ([host(20), room("cuda:0", 20, head=True)], 0, "0-9=cpu:0,head=cpu:0"),
    ([host(20), room("cuda:0", 20, head=True)], 3, "0-2=cuda:0,3-9=cpu:0,head=cuda:0"),
    ([host(20), room("cuda:0", 20, head=True)], 10, "0-9=cuda:0,head=cuda:0"),
    ([host(20), room("cuda:0", 20, head=True)], 99, "0-9=cuda:0,head=cuda:0"),
    # A GPU with room for nothing is as good as none.
    ([host(20), Room("cuda:0", 0, fixed_bytes=1, speed=1e11)], -1, "0-9=cpu:0,head=cpu:0"),
]


@pytest.mark.parametrize(("rooms", "gpu_layers", "placement"), PLACED)
def test_automatic_placement(rooms: list[Room], gpu_layers: int, placement: str) -> None:
    assert str(place(TEN, HEAD, rooms, gpu_layers=gpu_layers)[0]) == placement


def test_what_is_not_where_it_would_be_fastest_is_reported() -> None:
    _, declines = place(TEN, HEAD, [host(3), room("cuda:0", 4)])
    assert [str(one) for one in declines] == [
        "blocks 4-9: cuda:0 has room for 4, 400.00 MiB",
        "blocks 7-9: cpu:0 pages them",
        "the head: cuda:0 has no room for it beside blocks that read more",
    ]
    _, declines = place(TEN, HEAD, [host(20), room("cuda:0", 20, head=True)], gpu_layers=3)
    assert [str(one) for one in declines] == ["blocks 3-9: -gpu-layers 3"]
    _, declines = place(TEN, HEAD, [host(0)])
    assert [str(one) for one in declines] == ["blocks 0-9: cpu:0 pages them"]
    assert place(TEN, HEAD, [host(20), room("cuda:0", 20, head=True)])[1] == ()
    assert place(TEN, HEAD, [host(10), host(10, "cpu:1")])[1] == ()


def test_the_head_does_not_go_to_a_gpu_alone() -> None:
    """Two crossings would cost more than it saves."""
    rooms = [host(20), room("cuda:0", 0.9)]
    assert str(place(TEN, 80 * MIB, rooms)[0]) == "0-9=cpu:0,head=cpu:0"


def test_without_a_host_everything_must_fit() -> None:
    with pytest.raises(PlacementError) as caught:
        place(TEN, HEAD, [room("cuda:0", 4)])
    assert str(caught.value) == (
        "no device has room for blocks 4-9 and the head; attach the host, which pages: -devices "
        "with cpu"
    )
    with pytest.raises(PlacementError, match="no device is attached"):
        place(TEN, HEAD, [])
    assert str(place(TEN, HEAD, [room("cuda:0", 10, head=True)])[0]) == "0-9=cuda:0,head=cuda:0"


def test_a_tenth_of_the_room_is_left() -> None:
    blocks = [BlockCost(8 * MIB, MIB)]
    assert place(blocks, 0, [Room("cuda:0", 10 * MIB)])[0].devices == ("cuda:0",)
    with pytest.raises(PlacementError):
        place(blocks, 0, [Room("cuda:0", 10 * MIB - 2)])


ROOMS = st.lists(
    st.builds(
        Room,
        st.just(""),
        st.integers(0, 200),
        st.integers(0, 50),
        st.sampled_from([0.0, 1e9, 2e9]),
        st.booleans(),
    ),
    max_size=5,
)
BLOCKS = st.lists(st.builds(BlockCost, st.integers(1, 20), st.integers(0, 20)), max_size=12)


@given(BLOCKS, st.integers(0, 60), ROOMS, st.sets(st.integers(0, 4)), st.integers(-1, 13))
def test_a_placement_keeps_within_the_rooms(
    blocks: list[BlockCost], head: int, given: list[Room], gpus: set[int], gpu_layers: int
) -> None:
    names = [f"cuda:{i}" if i in gpus else f"cpu:{i}" for i in range(len(given))]
    rooms = [Room("cpu:9", 10), *(replace(r, name=n) for r, n in zip(given, names, strict=True))]
    placement, declines = place(blocks, head, rooms, gpu_layers=gpu_layers)
    assert placement.num_blocks == len(blocks)
    legs = [leg.device for leg in placement.legs() if leg.start < leg.stop]
    assert len(legs) == len(set(legs)), "one run on each device"
    for one in rooms:
        held = sum(blocks[i].num_bytes for i in placement.blocks_on(one.name))
        held += head if placement.head == one.name and not one.has_head else 0
        assert held <= one.block_bytes or one.name == "cpu:9", "only the host pages"
    on_gpus = {i for i, name in enumerate(placement.blocks) if not is_cpu(name)}
    assert gpu_layers < 0 or len(on_gpus) <= gpu_layers
    assert on_gpus or is_cpu(placement.head)
    assert all(one.what and one.reason for one in declines)
    assert place(blocks, head, rooms, gpu_layers=gpu_layers) == (placement, declines)


# --- budgets --------------------------------------------------------------------------------------

DIVIDED = [
    # total, (fixed, blocks) of each, shares
    (100, [(10, 20)], (100,)),
    (100, [(10, 30), (10, 10)], (70, 30)),
    (60, [(10, 30), (10, 10)], (40, 20)),
    (40, [(10, 30), (10, 10)], (25, 15)),
    (20, [(10, 30), (10, 10)], (10, 10)),
    (10, [(15, 30), (5, 10)], (7, 3)),
    (0, [(15, 30), (5, 10)], (0, 0)),
    (100, [(10, 90), (10, 0)], (90, 10)),
    (101, [(0, 0), (0, 0)], (50, 51)),
    (7, [(0, 1), (0, 1), (0, 1)], (2, 2, 3)),
    (100, [], ()),
    (100, [(10, 30, 0), (10, 10, 30)], (57, 43)),
    (100, [(0, 1, 0), (0, 0, 1000)], (1, 99)),
    (59, [(10, 30, 0), (10, 10, 30)], (39, 20)),
    (30, [(10, 30, 0), (10, 10, 30)], (17, 13)),
]


@pytest.mark.parametrize(("total", "needs", "shares"), DIVIDED)
def test_a_budget_is_divided(
    total: int, needs: list[tuple[int, ...]], shares: tuple[int, ...]
) -> None:
    assert divide_budget(total, [Need("cpu", *need) for need in needs]) == shares


@given(
    st.integers(0, 1 << 50),
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), min_size=1, max_size=6),
)
def test_shares_use_the_whole_budget_and_meet_every_need_that_they_can(
    total: int, sizes: list[tuple[int, int]]
) -> None:
    needs = [Need("cpu", *size) for size in sizes]
    shares = divide_budget(total, needs)
    assert sum(shares) == total
    assert min(shares) >= 0
    fixed, blocks = (sum(column) for column in zip(*sizes, strict=True))
    for share, need in zip(shares, needs, strict=True):
        if total >= fixed + blocks:
            assert share >= need.fixed_bytes + need.block_bytes
        elif total >= fixed:
            assert share >= need.fixed_bytes
        else:
            assert share <= need.fixed_bytes
