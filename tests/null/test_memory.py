"""Spans of host memory: free until touched, given back for good, at one address."""

import ctypes
import math
import os
import resource
import struct
import subprocess
import sys
from dataclasses import replace

import pytest

from jitllm.devices.memory import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    Handle,
    HostMemory,
    Memory,
    SharedMemory,
    attach,
    holds,
    round_up,
)
from jitllm.errors import JitllmError

MIB = 1 << 20


@pytest.fixture(params=[HostMemory, SharedMemory], ids=["private", "shared"])
def memory(request: pytest.FixtureRequest) -> Memory:
    kind: type[HostMemory] | type[SharedMemory] = request.param
    return kind()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def touch(view: memoryview) -> None:
    for offset in range(0, len(view), PAGE_BYTES):
        view[offset] = 1


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES, 3 * MIB + 1, 64 * MIB])
def test_a_span_is_zeroed_writable_and_aligned(memory: Memory, num_bytes: int) -> None:
    with memory.reserve(num_bytes) as span:
        unit = HUGE_PAGE_BYTES if isinstance(memory, HostMemory) else PAGE_BYTES
        assert span.address % unit == 0
        view = span.view()
        assert len(view) == num_bytes
        assert view[0] == view[-1] == 0
        view[-1] = 7
        assert span.view(num_bytes - 1, 1).tolist() == [7]
        view.release()


def test_a_reservation_costs_nothing_until_it_is_touched(memory: Memory) -> None:
    before = resident_bytes()
    with memory.reserve(1 << 40):  # more than the machine has
        assert resident_bytes() - before < 4 * MIB


@pytest.mark.parametrize("huge_pages", [True, False])
def test_released_pages_go_back_and_read_as_zeros(memory: Memory, huge_pages: bool) -> None:
    with memory.reserve(64 * MIB, huge_pages=huge_pages) as span:
        before = resident_bytes()
        touch(span.view())
        assert resident_bytes() - before > 63 * MIB
        span.release(0, 32 * MIB)
        assert 31 * MIB < resident_bytes() - before < 34 * MIB
        span.release(32 * MIB, 32 * MIB - 1)  # the last page counts as a whole one
        assert resident_bytes() - before < 2 * MIB
        assert span.view()[12345 * PAGE_BYTES] == 0


def test_poisoned_memory_shows_whoever_reads_it_later(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITLLM_POISON", "1")
    before = resident_bytes()
    with memory.reserve(3 * PAGE_BYTES) as span, attach(span.handle()) as address:
        view = span.view()
        view[:] = bytes([7]) * len(view)
        span.release(0, 0)
        assert view[0] == 7
        span.release(PAGE_BYTES, PAGE_BYTES + 1)  # the last page counts as a whole one
        assert set(view[:PAGE_BYTES]) == {7}
        poison = ctypes.string_at(address + PAGE_BYTES, 2 * PAGE_BYTES)
        assert set(poison) == {0xFF}
        for kind in "ef":  # f16, f32
            assert all(math.isnan(number) for (number,) in struct.iter_unpack(kind, poison))
        with pytest.raises(ValueError, match="of 12288 bytes"):
            span.release(0, 4 * PAGE_BYTES)
    with memory.reserve(1 << 40) as span:  # closing writes nothing
        touch(span.view(0, MIB))
    assert resident_bytes() - before < 2 * MIB


def kib(text: str) -> int:
    return int(text.split()[1]) * 1024


def huge_bytes() -> int:
    """Of this process, in huge pages."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(kib(line) for line in file if line.startswith("AnonHugePages"))


@pytest.mark.parametrize("first", [0, PAGE_BYTES])
@pytest.mark.parametrize("sizes", [(8, 8), (8, 5.5), (5.5, 8), (0.75, 0.75), (0.5, 4), (2, 0)])
def test_pages_that_are_handed_over_are_written_elsewhere(
    memory: Memory, sizes: tuple[float, float], first: int
) -> None:
    """Whatever the sizes and bounds: what is written next is there, nothing else is touched, and
    what was there before reads as zeros."""
    one, other = (int(size * MIB) for size in sizes)
    to = first + 10 * MIB
    with memory.reserve(32 * MIB, huge_pages=False) as span:
        span.use_huge_pages(first, one)
        span.use_huge_pages(to, other)
        span.view()[20 * MIB] = 5
        ones, twos = b"1" * one, b"2" * other
        before = resident_bytes()
        for _ in range(3):
            span.view(first, one)[:] = ones
            span.hand_over(first, one, to, other)
            assert resident_bytes() - before <= min(one, other) + 4 * MIB
            assert not any(span.view(first, one))
            span.view(to, other)[:] = twos
            assert span.view(to, other) == twos
            span.hand_over(to, other, first, one)
            assert not any(span.view(to, other))
            span.release(first, one)
            assert not any(span.view(first, one))
            assert span.view()[20 * MIB] == 5


def test_huge_pages_that_are_handed_over_stay_huge() -> None:
    """Also where moves have cut the mapping into several."""
    with HostMemory().reserve(64 * MIB, huge_pages=False) as span:
        for offset in (0, 16 * MIB, 32 * MIB):
            span.use_huge_pages(offset, 9 * MIB)
        before = huge_bytes()
        touch(span.view(0, 9 * MIB))
        if huge_bytes() - before < 8 * MIB:
            pytest.skip("the system has no huge pages left")
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for offset, num_bytes, to in [(0, 9, 16), (16, 4, 32), (32, 4, 0)] * 2:
            span.hand_over(offset * MIB, num_bytes * MIB, to * MIB, 9 * MIB)
        touch(span.view(0, 4 * MIB))
        assert huge_bytes() - before >= 4 * MIB
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 64


def test_what_is_poisoned_is_not_handed_over(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITLLM_POISON", "1")
    with memory.reserve(2 * PAGE_BYTES) as span:
        span.view()[:] = bytes([7]) * 2 * PAGE_BYTES
        span.hand_over(0, PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
        assert set(span.view(0, PAGE_BYTES)) == {0xFF}


def test_a_small_page_never_takes_a_huge_one(memory: Memory) -> None:
    with memory.reserve(64 * MIB, huge_pages=False) as span:
        span.use_huge_pages(0, 3 * MIB)  # one huge page, and a rest of small ones
        before = resident_bytes()
        span.view()[3 * MIB - 1] = 1
        assert resident_bytes() - before < MIB
        touch(span.view(0, 3 * MIB))
        assert resident_bytes() - before < 3 * MIB + MIB // 2


def test_what_is_outside_is_refused(memory: Memory) -> None:
    with memory.reserve(3 * PAGE_BYTES) as span:
        for offset, num_bytes in [(0, 4 * PAGE_BYTES), (-PAGE_BYTES, 1), (1, 1)]:
            with pytest.raises(ValueError, match="of 12288 bytes"):
                span.release(offset, num_bytes)
        with pytest.raises(ValueError, match="outside"):
            span.view(PAGE_BYTES, 3 * PAGE_BYTES)


def test_closing_gives_everything_back_even_under_a_view(memory: Memory) -> None:
    before = resident_bytes()
    span = memory.reserve(32 * MIB)
    view = span.view()
    touch(view)
    span.close()
    assert resident_bytes() - before < 2 * MIB
    span.close()
    with pytest.raises(ValueError, match="closed"):
        span.release(0, PAGE_BYTES)
    assert view[0] == 0  # and not a crash


def test_no_address_space_is_a_clear_error() -> None:
    program = """
import resource
from jitllm.devices.memory import HostMemory
from jitllm.errors import JitllmError
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    HostMemory().reserve(1 << 40)
except JitllmError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "no address space for 1.00 TiB" in done.stdout, done


def test_rounding() -> None:
    assert [round_up(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


_READER = """
import ctypes, sys
from jitllm.devices.memory import Handle, attach
handle = Handle(*map(int, sys.argv[1:]))
with attach(handle) as address:
    for line in sys.stdin:
        print(*ctypes.string_at(address + int(line), 4), flush=True)
"""


def test_another_process_sees_what_is_written_and_what_is_given_back() -> None:
    with SharedMemory().reserve(3 * PAGE_BYTES) as span:
        handle = span.handle()
        numbers = (handle.pid, handle.address, handle.num_bytes, handle.fd)
        child = subprocess.Popen(
            [sys.executable, "-c", _READER, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None

        def seen(offset: int) -> list[int]:
            print(offset, file=child.stdin, flush=True)
            return [int(word) for word in child.stdout.readline().split()]

        with child:
            span.view(PAGE_BYTES, 4)[:] = bytes([1, 2, 3, 4])
            assert seen(PAGE_BYTES) == [1, 2, 3, 4]
            span.view(PAGE_BYTES, 4)[:] = bytes([5, 6, 7, 8])
            assert seen(PAGE_BYTES) == [5, 6, 7, 8]
            span.release(PAGE_BYTES, PAGE_BYTES)
            assert seen(PAGE_BYTES) == [0, 0, 0, 0]
            span.view(0, 4)[:] = bytes([9, 9, 9, 9])
            assert seen(0) == [9, 9, 9, 9]
            child.stdin.close()
        assert child.returncode == 0


_FAR_READER = """
import ctypes, sys
from jitllm.devices.memory import Handle, attach
pid, address, num_bytes, fd = map(int, sys.argv[1:])
with attach(Handle(pid, address, num_bytes, fd)) as start:
    print(*(ctypes.string_at(start + at, 1)[0] for at in range(0, num_bytes, 4096)))
    lines = [line.split() for line in open("/proc/self/smaps") if line.startswith("ShmemPmdMapped")]
    print(sum(int(line[1]) for line in lines) << 10)
"""


def test_what_settles_keeps_its_bytes_in_huge_pages_here_and_elsewhere() -> None:
    num_bytes = 5 * MIB
    written = bytes(at // PAGE_BYTES % 251 for at in range(0, num_bytes, PAGE_BYTES))
    with SharedMemory().reserve(num_bytes) as span:
        for page, byte in enumerate(written):
            span.view(page * PAGE_BYTES, PAGE_BYTES)[:] = bytes([byte]) * PAGE_BYTES
        span.settle()
        handle = span.handle()
        assert ctypes.string_at(span.address, num_bytes)[::PAGE_BYTES] == written
        numbers = (handle.pid, handle.address, handle.num_bytes, handle.fd)
        command = [sys.executable, "-c", _FAR_READER, *map(str, numbers)]
        seen, huge = subprocess.check_output(command, text=True).splitlines()
        assert bytes(map(int, seen.split())) == written
        before = os.fstat(handle.fd).st_blocks * 512
        span.release(0, num_bytes)
        assert os.fstat(handle.fd).st_blocks * 512 <= before - num_bytes
    if not int(huge):
        pytest.skip("this system collapses no shared memory into huge pages (Linux 6.1)")
    assert int(huge) == 2 * HUGE_PAGE_BYTES


def test_in_its_own_process_a_handle_is_the_address(memory: Memory) -> None:
    with memory.reserve(PAGE_BYTES) as span, attach(span.handle()) as address:
        assert address == span.address


def test_an_address_outlives_a_span_that_is_closed_meanwhile(memory: Memory) -> None:
    span = memory.reserve(4 * MIB)
    touch(span.view())
    with attach(span.handle()) as address:
        span.close()
        ctypes.string_at(address, 4 * MIB)  # whatever is there: not a crash
    with pytest.raises(JitllmError, match="no view of 4"), attach(Handle(os.getpid(), address, 4)):
        pass


def test_a_handle_holds_what_was_written_until_its_span_is_closed(memory: Memory) -> None:
    with memory.reserve(PAGE_BYTES) as span:
        handle = span.handle()
        with attach(handle):
            assert holds(handle)
            span.close()
            assert not holds(handle)
    assert holds(replace(handle, pid=1))  # which nobody here can know


@pytest.mark.parametrize("fd", [-1, 1 << 20], ids=["private", "closed"])
def test_memory_that_cannot_be_attached_is_a_clear_error(fd: int) -> None:
    handle = Handle(pid=1, address=0, num_bytes=PAGE_BYTES, fd=fd)
    with pytest.raises(JitllmError, match=r"no view of 4.*process 1"), attach(handle):
        pass


def test_a_closed_span_leaves_no_file_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with SharedMemory().reserve(MIB):
            pass
    assert set(os.listdir("/proc/self/fd")) == before
