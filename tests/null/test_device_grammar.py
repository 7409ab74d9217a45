"""Devices and placements as people write them: what each string means, and each refusal whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitllm.devices.choose import AvailableDevice, choose_devices, is_same, reports, together
from jitllm.devices.cpus import NumaNode, cpu_devices, cpu_shares, divide_cores, numa_nodes
from jitllm.devices.grammar import (
    ALIASES,
    GPUS,
    DeviceEntry,
    device_name,
    is_cpu,
    parse_devices,
)
from jitllm.errors import PlacementError, UsageError
from jitllm.schedule.placement import Placement
from jitllm.schedule.placement_map import attached, parse_blocks, parse_map

GIB = 1 << 30


def gpu(backend: str, ordinal: int, label: str = "", **more: object) -> AvailableDevice:
    """A GPU that was found."""
    return AvailableDevice(backend, ordinal, label, **more)  # type: ignore[arg-type]


THERE = (
    *cpu_devices(4, (), 8 * GIB, 16 * GIB),
    gpu("cuda", 0, "NVIDIA H200", uuid="GPU-12AB-34", speed=5),
    gpu("cuda", 1, "NVIDIA L4", uuid="GPU-aa", speed=9),
    gpu("vulkan", 0, "NVIDIA H200", uuid="12ab34", speed=7),
    gpu("vulkan", 1, "AMD/ATI Radeon 780M", uuid="0000-00", speed=1),
    gpu("vulkan", 2, "llvmpipe", is_software=True),
    AvailableDevice("cpu", 0, "the host", node="n2"),
    gpu("cuda", 0, "Tesla T4", uuid="bb", node="n2"),
)
LISTED = "there is cpu:0 to cpu:3, cuda:0 to cuda:1, vulkan:0 to vulkan:2, n2/cpu:0, n2/cuda:0"
KINDS = "there are auto, all, cpu, gpu, cuda, metal, hip, vulkan"
SIZES = "write bytes or a number with K, M, G or T, like 512M"

ATTACHED = ("cpu:0", "cpu:1", "cuda:0", "n2/cpu:0")
NUM_BLOCKS = 18
ALL_ON = "0-17=cpu:0,head=cpu:0"


def devices_of(text: str) -> str:
    """What `-devices text` takes of what is THERE."""
    chosen, _ = choose_devices(parse_devices(text), THERE, here="n1")
    return " ".join(f"{c.name}={c.budget_bytes}" if c.budget_bytes else c.name for c in chosen)


def placement_of(text: str, *, strict: bool = False) -> str:
    """What `-placement text` makes of a model that is wholly on cpu:0, and its declines."""
    base = Placement.all_on("cpu:0", NUM_BLOCKS)
    placement, declines = parse_map(text).resolve(NUM_BLOCKS, ATTACHED, base, strict=strict)
    return " | ".join(map(str, (placement, *declines)))


def mixture_of(text: str, *, strict: bool = False) -> str:
    """The same where the host computes the experts of blocks 1 to 4, if they are elsewhere, and
    those of block 7 come to a GPU one by one."""
    base = Placement.all_on("cpu:0", NUM_BLOCKS)
    base = replace(base, hosted=frozenset({1, 2, 3, 4}), host="cpu:0", carded=frozenset({7}))
    placement, declines = parse_map(text).resolve(NUM_BLOCKS, ATTACHED, base, strict=strict)
    assert (placement.hosted, placement.carded) == (base.hosted, base.carded)
    return " | ".join(map(str, (placement, *declines)))


def strict_mixture_of(text: str) -> str:
    """That with -placement-strict."""
    return mixture_of(text, strict=True)


def strict_of(text: str) -> str:
    """The same with -placement-strict."""
    return placement_of(text, strict=True)


def blocks_of(text: str) -> str:
    """What `-move text` names."""
    selection = parse_blocks(text)
    return " ".join([*map(str, selection.blocks), *(["head"] if selection.head else [])])


STRINGS = [
    # read by, string, what it means
    (devices_of, "auto", "cuda:1 cpu:0"),
    (devices_of, "AUTO", "cuda:1 cpu:0"),
    (devices_of, "all", "cuda:1 cuda:0 vulkan:1 n2/cuda:0 cpu:0 n2/cpu:0"),
    (devices_of, "cpu", "cpu:0"),
    (devices_of, "Cpu:3", "cpu:3"),
    (devices_of, "cpu:1, cpu", "cpu:1 cpu:0"),
    (devices_of, "gpu", "cuda:1 cuda:0 vulkan:1"),
    (devices_of, "gpu,cpu:1", "cuda:1 cuda:0 vulkan:1 cpu:1"),
    (devices_of, "gpu:0", "cuda:0"),
    (devices_of, "gpu:2", "vulkan:1"),
    (devices_of, "cuda", "cuda:1 cuda:0"),
    (devices_of, "cuda:1", "cuda:1"),
    (devices_of, "PTX:1", "cuda:1"),
    (devices_of, "cuda:0=1.5GiB", "cuda:0=1610612736"),
    (devices_of, "cuda:0 = 4096 , cpu", "cuda:0=4096 cpu:0"),
    (devices_of, "cuda=2K", "cuda:1=2048 cuda:0=2048"),
    (devices_of, "auto=1K", "cuda:1=1024 cpu:0"),
    (devices_of, "vulkan", "vulkan:0 vulkan:1"),
    (devices_of, "spirv:0", "vulkan:0"),
    (devices_of, "vulkan:radeon", "vulkan:1"),
    (devices_of, "vulkan:AMD/ATI", "vulkan:1"),
    (devices_of, "vulkan:780", "vulkan:1"),
    (devices_of, "vulkan:llvmpipe", "vulkan:2"),
    (devices_of, "vulkan:2", "vulkan:2"),
    (devices_of, "cuda:0,vulkan", "cuda:0 vulkan:1"),
    (devices_of, "n2/cpu", "n2/cpu:0"),
    (devices_of, "n2/ptx:0=1K,n1/cpu:1", "n2/cuda:0=1024 cpu:1"),
    (placement_of, "0=cpu:1", "0=cpu:1,1-17=cpu:0,head=cpu:0"),
    (placement_of, "0-8=cpu:0,9-17=cpu:1", "0-8=cpu:0,9-17=cpu:1,head=cpu:0"),
    (placement_of, "9-17=host , head = CPU:1", "0-17=cpu:0,head=cpu:1"),
    (placement_of, "*=cpu:1", "0-17=cpu:1,head=cpu:1"),
    (placement_of, "*=cpu:1,head=host", "0-17=cpu:1,head=cpu:0"),
    (placement_of, "2=host!,*=cpu:1", "0-1=cpu:1,2=cpu:0!,3-17=cpu:1,head=cpu:1"),
    (placement_of, ",3=cpu,,", ALL_ON),
    (placement_of, "*=ptx:0~!", "0-17=cuda:0!~,head=cuda:0!"),
    (placement_of, "0-1=cuda:0~,2=cuda:0!~", "0-1=cuda:0~,2=cuda:0!~,3-17=cpu:0,head=cpu:0"),
    (placement_of, "head=cuda:0!", "0-17=cpu:0,head=cuda:0!"),
    (placement_of, "17=n2/cpu", "0-16=cpu:0,17=n2/cpu:0,head=cpu:0"),
    (
        placement_of,
        "16-20=cpu:1!,30=host",
        "0-15=cpu:0,16-17=cpu:1!,head=cpu:0 | 16-20=cpu:1!: the model has blocks 0 to 17"
        " | 30=host: the model has blocks 0 to 17",
    ),
    (strict_of, "0-17=cpu:1", "0-17=cpu:1,head=cpu:0"),
    (mixture_of, "3=cpu:1", "0-2=cpu:0,3=cpu:1%host,4-17=cpu:0,head=cpu:0"),
    (
        strict_mixture_of,
        "1=cuda:0 %host,2=cuda:0!~%host,4=cpu:1%host",
        "0=cpu:0,1=cuda:0%host,2=cuda:0!~%host,3=cpu:0,4=cpu:1%host,5-17=cpu:0,head=cpu:0",
    ),
    (
        mixture_of,
        "*=cuda:0%host",
        "0=cuda:0,1-4=cuda:0%host,5-6=cuda:0,7=cuda:0%card,8-17=cuda:0,head=cuda:0"
        " | *=cuda:0%host: blocks 0,5-17 have no experts that the host computes",
    ),
    (mixture_of, "*=host", ALL_ON),
    (mixture_of, "7=cpu:1", "0-6=cpu:0,7=cpu:1,8-17=cpu:0,head=cpu:0"),
    (strict_mixture_of, "7=cuda:0~%card", "0-6=cpu:0,7=cuda:0~%card,8-17=cpu:0,head=cpu:0"),
    (blocks_of, "3:6", "3 4 5"),
    (blocks_of, "3-6", "3 4 5 6"),
    (blocks_of, "7", "7"),
    (blocks_of, "head", "head"),
    (blocks_of, "9, 0:2 ,head,4-5", "0 1 4 5 9 head"),
]

REFUSED = [
    # read by, string, the whole message
    (devices_of, "", "-devices '' has an empty entry; write devices like cpu:0"),
    (devices_of, "cpu,", "-devices 'cpu,' has an empty entry; write devices like cpu:0"),
    (devices_of, "cpu:", "-devices 'cpu:': a colon without a number; write cpu or cpu:0"),
    (devices_of, "cuda:=1G", "-devices 'cuda:=1G': a colon without a number; write cuda or cuda:0"),
    (devices_of, "npu:1", f"-devices 'npu:1': 'npu' is no kind of device; {KINDS}"),
    (devices_of, "cpu cpu:1", f"-devices 'cpu cpu:1': 'cpu cpu' is no kind of device; {KINDS}"),
    (devices_of, "n2/b/cpu", f"-devices 'n2/b/cpu': 'b/cpu' is no kind of device; {KINDS}"),
    (devices_of, "cpu:x", "-devices 'cpu:x': 'x' is no device number; write cpu:0 or the like"),
    (devices_of, "cpu:-1", "-devices 'cpu:-1': '-1' is no device number; write cpu:0 or the like"),
    (
        devices_of,
        "cuda:1.5",
        "-devices 'cuda:1.5': '1.5' is no device number; write cuda:0 or the like",
    ),
    (
        devices_of,
        "gpu:rtx",
        "-devices 'gpu:rtx': 'rtx' is no device number; write gpu:0 or the like",
    ),
    (devices_of, "hip:²", "-devices 'hip:²': '²' is no device number; write hip:0 or the like"),
    (devices_of, "auto:0", "-devices 'auto:0': auto takes no number; write auto"),
    (devices_of, "all:1", "-devices 'all:1': all takes no number; write all"),
    (devices_of, "metal:0", "-devices 'metal:0': metal takes no number; write metal"),
    (
        devices_of,
        "cpu=4G",
        "-devices 'cpu=4G': a CPU device has no budget of its own; use -maxmem",
    ),
    (
        devices_of,
        "n2/cpu:1=4G",
        "-devices 'n2/cpu:1=4G': a CPU device has no budget of its own; use -maxmem",
    ),
    (devices_of, "cuda=", f"-devices 'cuda=': size '' is not a size; {SIZES}"),
    (devices_of, "cuda=-1", f"-devices 'cuda=-1': size '-1' is not a size; {SIZES}"),
    (devices_of, "cuda=1G=2G", f"-devices 'cuda=1G=2G': size '1G=2G' is not a size; {SIZES}"),
    (
        devices_of,
        "cuda=0",
        "-devices 'cuda=0': no memory is left to the device; write a size like 6G, or none",
    ),
    (
        devices_of,
        "gpu=0.5",
        "-devices 'gpu=0.5': size '0.5' is less than a byte; did you mean K, M, G or T?",
    ),
    (devices_of, "auto,cpu", "-devices has auto beside cpu:0; auto stands alone"),
    (devices_of, "cuda:0,all", "-devices has all beside cuda:0; all stands alone"),
    (
        devices_of,
        "gpu,cuda:0",
        "-devices has gpu beside cuda:0; gpu means every GPU: only CPU devices go with it",
    ),
    (devices_of, "cpu,CPU:0", "-devices names cpu:0 twice; name each device once"),
    (devices_of, "cuda:0=1G,ptx:0=2G", "-devices names cuda:0 twice; name each device once"),
    (devices_of, "cuda,cuda:0", "-devices names cuda:0 twice; name each device once"),
    (devices_of, "cuda:0,gpu:0", "-devices names cuda:0 twice; name each device once"),
    (devices_of, "cpu,n1/cpu", "-devices names cpu:0 twice; name each device once"),
    (devices_of, "vulkan:2,vulkan:llvm", "-devices names vulkan:2 twice; name each device once"),
    (
        devices_of,
        "cuda:0,vulkan:0",
        "-devices names one card twice, as cuda:0 and as vulkan:0; name it once",
    ),
    (
        devices_of,
        "vulkan:a",
        "-devices vulkan:a may be vulkan:0 to vulkan:1; name the device by its number",
    ),
    (devices_of, "cpu:4", f"-devices cpu:4: no such device here; {LISTED}"),
    (devices_of, "cuda:2", f"-devices cuda:2: no such device here; {LISTED}"),
    (devices_of, "rocm", f"-devices hip: no such device here; {LISTED}"),
    (devices_of, "metal", f"-devices metal: no such device here; {LISTED}"),
    (devices_of, "n3/cpu", f"-devices n3/cpu:0: no such device here; {LISTED}"),
    (
        devices_of,
        "gpu:3",
        "-devices gpu:3: no such device here (vulkan:0: the same card as cuda:0, "
        f"vulkan:2: computed in software: only when named); {LISTED}",
    ),
    (
        devices_of,
        "n2/auto",
        "-devices 'n2/auto': this is no device of a node; write it like NODE/cpu:0",
    ),
    (devices_of, "/cpu", "-devices '/cpu': this is no device of a node; write it like NODE/cpu:0"),
    (placement_of, "", "-placement '' places nothing; write a map like 0-8=cpu:0"),
    (placement_of, " , ", "-placement ' , ' places nothing; write a map like 0-8=cpu:0"),
    (
        placement_of,
        "0-8",
        "-placement '0-8' is no BLOCKS=DEVICE; write entries like 0-8=cpu:0 or head=host",
    ),
    (
        placement_of,
        "=cpu",
        "-placement '=cpu' is no BLOCKS=DEVICE; write entries like 0-8=cpu:0 or head=host",
    ),
    (
        placement_of,
        "3=",
        "-placement '3=' is no BLOCKS=DEVICE; write entries like 0-8=cpu:0 or head=host",
    ),
    (
        placement_of,
        "a-3=cpu",
        "-placement 'a-3=cpu': 'a-3' names no blocks; write N, A-B, head or *",
    ),
    (placement_of, "-1=cpu", "-placement '-1=cpu': '-1' names no blocks; write N, A-B, head or *"),
    (
        placement_of,
        "1:3=cpu",
        "-placement '1:3=cpu': '1:3' names no blocks; write N, A-B, head or *",
    ),
    (
        placement_of,
        "3-2=cpu",
        "-placement '3-2=cpu' ends before it begins; write the smaller block first",
    ),
    (
        placement_of,
        "1000000=cpu",
        "-placement '1000000=cpu' goes beyond any model; blocks are below 100000",
    ),
    (
        placement_of,
        "3=cpu,1-5=host",
        "-placement names block 3 twice; it is in 1-5=host and in 3=cpu:0",
    ),
    (placement_of, "head=cpu,head=host", "-placement names the head twice; name it once"),
    (placement_of, "*=cpu,*=host", "-placement names the rest (*) twice; name it once"),
    (placement_of, "3=npu", f"-placement '3=npu': 'npu' is no kind of device; {KINDS}"),
    (
        placement_of,
        "3=gpu:0",
        "-placement '3=gpu:0': gpu:0 is not the name of a device; names are like cpu:0",
    ),
    (
        placement_of,
        "3=cuda",
        "-placement '3=cuda': cuda may be several devices; name one, like cuda:0",
    ),
    (
        placement_of,
        "3=vulkan:rtx",
        "-placement '3=vulkan:rtx': 'rtx' is no device number; names are like vulkan:0",
    ),
    (placement_of, "3=cpu!!", "-placement '3=cpu!!' repeats a mark; write ! and ~ once each"),
    (
        placement_of,
        "3=host~",
        "-placement '3=host~': a CPU device has nothing to stream into; "
        "leave ~ out: its blocks are paged as -maxmem allows",
    ),
    (
        placement_of,
        "3=n2/cpu!~",
        "-placement '3=n2/cpu!~': a CPU device has nothing to stream into; "
        "leave ~ out: its blocks are paged as -maxmem allows",
    ),
    (
        placement_of,
        "head=cuda:0~",
        "-placement 'head=cuda:0~': the head cannot be streamed; leave ~ out",
    ),
    (
        placement_of,
        "head=cuda:0%host",
        "-placement 'head=cuda:0%host': the head has no experts; leave %host out",
    ),
    (
        placement_of,
        "3=cuda:0%disk",
        "-placement '3=cuda:0%disk': 'disk' after % is no place of experts; "
        "write %host or %card at the end, after ! and ~",
    ),
    (
        placement_of,
        "3=cuda:0%host!",
        "-placement '3=cuda:0%host!': 'host!' after % is no place of experts; "
        "write %host or %card at the end, after ! and ~",
    ),
    (
        placement_of,
        "3=host!%host",
        "-placement '3=host!%host': on the host experts are there anyway; "
        "leave %host out, or name another device before it",
    ),
    (
        placement_of,
        "3=cpu:1%card",
        "-placement '3=cpu:1%card': a CPU device has no memory to bring experts to; leave %card "
        "out: they are paged as -maxmem allows, or name a GPU before it",
    ),
    (
        strict_mixture_of,
        "4=cuda:0%card",
        "-placement 4=cuda:0%card: block 4 has no experts that come one by one; "
        "%card is for blocks with experts, and said when a model is opened",
    ),
    (
        placement_of,
        "3-4=cpu%host",
        "-placement 3-4=cpu:0%host: on the host experts are there anyway; "
        "leave %host out, or name another device before it",
    ),
    (
        strict_mixture_of,
        "2=cuda:0%host,3-5=cuda:0~%host",
        "-placement 3-5=cuda:0~%host: block 5 has no experts that the host computes; "
        "%host is for blocks with experts, and said when a model is opened",
    ),
    (
        placement_of,
        "3=cpu:2",
        "device cpu:2 is not attached; -devices attaches; attached: cpu:0, cpu:1, cuda:0, n2/cpu:0",
    ),
    (
        strict_of,
        "17-18=cpu:1",
        "-placement 17-18=cpu:1: the model has blocks 0 to 17; leave it out or -placement-strict",
    ),
    (
        blocks_of,
        "",
        "-move '' names no blocks; write A:B (without B), A-B (with B), N or head, with commas",
    ),
    (
        blocks_of,
        "1..3",
        "-move '1..3' names no blocks; write A:B (without B), A-B (with B), N or head, with commas",
    ),
    (blocks_of, "3:3", "-move '3:3' is empty: A:B leaves out B; block A alone is 3"),
    (blocks_of, "5-3", "-move '5-3' ends before it begins; write the smaller block first"),
    (blocks_of, "3,2:4", "-move '3,2:4' names 2:4 twice; name each block once"),
    (blocks_of, "head,head", "-move 'head,head' names head twice; name each block once"),
    (
        blocks_of,
        "0:" + "9" * 5000,
        "-move " + repr("0:" + "9" * 5000)[:57] + "... goes beyond any model; "
        "blocks are below 100000",
    ),
]


def test_the_table_is_large() -> None:
    assert len(STRINGS) + len(REFUSED) >= 60
    assert len({(read, text) for read, text, _ in (*STRINGS, *REFUSED)}) == len(STRINGS + REFUSED)


@pytest.mark.parametrize(
    ("read", "text", "meaning"), STRINGS, ids=[repr(text) for _, text, _ in STRINGS]
)
def test_a_string_means(read: Callable[[str], str], text: str, meaning: str) -> None:
    assert read(text) == meaning


@pytest.mark.parametrize(
    ("read", "text", "message"), REFUSED, ids=[repr(text[:20]) for _, text, _ in REFUSED]
)
def test_a_string_is_refused(read: Callable[[str], str], text: str, message: str) -> None:
    with pytest.raises((UsageError, PlacementError)) as caught:
        read(text)
    assert str(caught.value) == message
    assert caught.value.remedy


PARSERS: dict[object, Callable[[str], object]] = {
    devices_of: parse_devices,
    placement_of: parse_map,
    strict_of: parse_map,
    mixture_of: parse_map,
    strict_mixture_of: parse_map,
    blocks_of: parse_blocks,
}
NEEDS_MORE = ("no such device here", "not attached", "one card twice", "may be v", "the model has")
NEEDS_MORE += ("no experts that",)


def test_what_can_be_told_from_the_string_alone_is_a_usage_error() -> None:
    """So that it costs no load, and the exit code is 2."""
    for read, text, message in REFUSED:
        if text in LATE or any(part in message for part in NEEDS_MORE):
            assert PARSERS[read](text)
            continue
        with pytest.raises(UsageError) as caught:
            PARSERS[read](text)
        assert str(caught.value) == message


LATE = ("cuda,cuda:0", "cuda:0,gpu:0", "cpu,n1/cpu", "vulkan:2,vulkan:llvm", "3-4=cpu%host")
"""Names of one device that differ until one knows what there is."""


def test_what_is_left_out_has_a_reason() -> None:
    _, declined = choose_devices(parse_devices("auto"), THERE)
    assert [str(one) for one in declined] == [
        "cpu:1: only when named",
        "cpu:2: only when named",
        "cpu:3: only when named",
        "cuda:0: auto takes the fastest GPU only",
        "vulkan:0: the same card as cuda:0",
        "vulkan:1: auto takes the fastest GPU only",
        "vulkan:2: computed in software: only when named",
        "n2/cpu:0: not in -devices",
        "n2/cuda:0: not in -devices",
    ]
    _, declined = choose_devices(parse_devices("vulkan:0"), THERE)
    assert "cuda:0: the same card as vulkan:0" in map(str, declined)


def test_no_gpu_is_no_error_unless_one_is_named() -> None:
    host = cpu_devices(2, (), GIB, GIB)
    for text in ("auto", "all"):
        chosen, _ = choose_devices(parse_devices(text), host)
        assert [one.name for one in chosen] == ["cpu:0"]
    for kind in ("gpu", *GPUS):
        with pytest.raises(PlacementError, match=f"-devices {kind}: no such device here; there is"):
            choose_devices(parse_devices(kind), host)
    with pytest.raises(PlacementError, match="-devices cpu:0: no such device here; there is none"):
        choose_devices(parse_devices("cpu"), ())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("GPU-12AB-34", "12ab34", True),
        ("12ab34", "12ab35", False),
        (None, None, False),
        ("", "", False),
        ("0000-0000", "00000000", False),
        ("GPU-0000", "GPU-0000", False),
    ],
)
def test_cards_are_one_by_uuid_and_unknown_ones_match_nothing(
    one: str | None, other: str | None, same: bool
) -> None:
    assert is_same(gpu("cuda", 0, uuid=one), gpu("vulkan", 0, uuid=other)) is same
    assert is_same(gpu("cuda", 0, uuid=one), gpu("cuda", 0, uuid=other)), "by name"


def test_two_cards_of_one_label_are_two() -> None:
    cards = (gpu("cuda", 0, "L4", uuid="aa"), gpu("vulkan", 0, "L4", uuid="bb"))
    chosen, _ = choose_devices(parse_devices("gpu"), cards)
    assert [one.name for one in chosen] == ["cuda:0", "vulkan:0"]


def test_people_see_devices_that_are_alike_together() -> None:
    available = cpu_devices(4, (), GIB, 2 * GIB)
    _, declined = choose_devices(parse_devices("cpu:0,cpu:3"), available)
    found = reports(available, declined)
    assert [one["name"] for one in found] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert [(one["name"], one["declined"]) for one in together(found)] == [
        ("cpu:0", None),
        ("cpu:1 to cpu:2", "only when named"),
        ("cpu:3", None),
    ]
    assert list(together([])) == []


# --- names ----------------------------------------------------------------------------------------

NODES = st.sampled_from(["", "n2", "10.0.0.7", "fe80::1", "cpu", "gpu-box.local"])
BUDGETS = st.none() | st.integers(1, 1 << 50)
ONES = st.builds(DeviceEntry, st.just("cpu"), st.integers(0, 9999), node=NODES) | st.builds(
    DeviceEntry,
    st.sampled_from(["cuda", "hip", "vulkan", "gpu"]),
    st.none() | st.integers(0, 9999),
    BUDGETS,
    node=NODES,
)
LABELS = st.text("abc /RTX3090ö()", min_size=1).map(str.strip).filter(bool)
ENTRIES = (
    ONES
    | st.builds(DeviceEntry, st.sampled_from(["auto", "all"]), budget_bytes=BUDGETS)
    | st.builds(DeviceEntry, st.just("metal"), budget_bytes=BUDGETS, node=NODES)
    | st.builds(
        DeviceEntry, st.just("vulkan"), LABELS.filter(lambda t: not t.isdecimal()), BUDGETS, NODES
    )
)


@given(ENTRIES)
def test_an_entry_prints_as_it_is_read(entry: DeviceEntry) -> None:
    assert parse_devices(str(entry)) == (entry,)


@given(st.lists(ONES.filter(lambda e: not e.is_set), min_size=1, unique_by=lambda e: e.name))
def test_a_list_prints_as_it_is_read(entries: list[DeviceEntry]) -> None:
    assert parse_devices(",".join(map(str, entries))) == tuple(entries)


@given(st.text("acdgpu:=/,0189KG nlv*!~%-", max_size=24))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_devices, parse_map, parse_blocks, device_name):
        with suppress(UsageError):
            assert parse(text)


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_printed_as_what_it_stands_for(alias: str) -> None:
    (entry,) = parse_devices(alias.upper())
    assert entry.backend == ALIASES[alias]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("cpu", "cpu:0"),
        (" CPU:01 ", "cpu:1"),
        ("rocm:2", "hip:2"),
        ("MSL", "metal"),
        ("Node7/cpu", "Node7/cpu:0"),
        ("fe80::1/cuda:3", "fe80::1/cuda:3"),
    ],
)
def test_a_device_has_one_name(text: str, name: str) -> None:
    assert device_name(text) == name
    assert is_cpu(name) is ("cpu" in name)


def test_the_host_is_the_first_cpu_device_attached() -> None:
    assert attached("host", ["cuda:0", "cpu:1", "cpu:0"]) == "cpu:1"
    assert attached("CPU", ["cuda:0", "cpu:1", "cpu:0"]) == "cpu:0"
    with pytest.raises(PlacementError, match="device host is not attached"):
        attached("host", ["cuda:0"])


# --- CPU devices ----------------------------------------------------------------------------------

SOCKETS = (
    NumaNode(0, frozenset({0, 1, 4, 5}), 2, 3 * GIB, 4 * GIB),
    NumaNode(2, frozenset({2, 3, 6, 7}), 2, 2 * GIB, 4 * GIB),
)


def test_each_numa_node_is_a_device() -> None:
    devices = cpu_devices(4, SOCKETS, 16 * GIB, 16 * GIB, node="n1")
    assert [(d.name, d.label, d.free_bytes) for d in devices] == [
        ("n1/cpu:0", "NUMA node 0", 3 * GIB),
        ("n1/cpu:1", "NUMA node 2", 2 * GIB),
    ]
    shares = cpu_shares([1, 0], 4, SOCKETS)
    assert [(s.num_threads, s.cpus) for s in shares] == [(2, SOCKETS[1].cpus), (2, SOCKETS[0].cpus)]
    (alone,) = cpu_shares([1], 4, SOCKETS)
    assert (alone.num_threads, alone.cpus) == (2, SOCKETS[1].cpus), "no more than its node has"
    quota = cpu_shares([0, 1], 2, SOCKETS)
    assert [share.num_threads for share in quota] == [1, 1]


@pytest.mark.parametrize("nodes", [(), SOCKETS[:1]])
def test_one_node_divides_its_cores_among_the_devices_that_are_named(
    nodes: tuple[NumaNode, ...],
) -> None:
    devices = cpu_devices(3, nodes, GIB, 2 * GIB)
    assert [d.name for d in devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert [d.on_request for d in devices] == [False, True, True]
    assert [s.num_threads for s in cpu_shares([2, 0], 3, nodes)] == [2, 1]
    assert all(share.cpus is None for share in cpu_shares([2, 0], 3, nodes))


@given(st.integers(1, 256), st.integers(1, 64))
def test_cores_are_divided_evenly_and_none_is_left(num_threads: int, num_devices: int) -> None:
    if num_devices > num_threads:
        with pytest.raises(UsageError) as caught:
            divide_cores(num_threads, num_devices)
        assert str(caught.value) == (
            f"-devices names {num_devices} CPU devices and there are {num_threads} threads for "
            "them; name fewer, or raise -threads"
        )
        return
    shares = divide_cores(num_threads, num_devices)
    assert sum(shares) == num_threads
    assert len(shares) == num_devices
    assert 1 <= min(shares) <= max(shares) <= min(shares) + 1


def meminfo(node: int, total_kib: int, free_kib: int) -> str:
    """As the kernel writes it."""
    rows = {"MemTotal": total_kib, "MemFree": free_kib, "FilePages": 50, "Shmem": 20}
    return "".join(f"Node {node} {name}:  {kib} kB\n" for name, kib in rows.items())


def test_numa_nodes_are_read_from_the_kernel(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/devices/system/node"
    for number, cpus in ((10, "6-7"), (2, "0-1,4"), (3, ""), (4, "5")):
        (nodes / f"node{number}").mkdir(parents=True)
        (nodes / f"node{number}" / "cpulist").write_text(cpus + "\n")
        if number != 4:  # a node of devices or without memory
            (nodes / f"node{number}" / "meminfo").write_text(meminfo(number, 1000, 100))
    assert numa_nodes({0, 1, 5, 7}, tmp_path) == (
        NumaNode(2, frozenset({0, 1}), 2, 130 << 10, 1000 << 10),
        NumaNode(10, frozenset({7}), 1, 130 << 10, 1000 << 10),
    )
    assert numa_nodes({0}, tmp_path / "elsewhere") == ()
