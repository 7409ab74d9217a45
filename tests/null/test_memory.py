"""Spans of host memory: free until touched, given back for good, at one address."""

import subprocess
import sys

import pytest

from jitllm.devices.memory import HUGE_PAGE_BYTES, PAGE_BYTES, HostMemory, round_up

MIB = 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def touch(view: memoryview) -> None:
    for offset in range(0, len(view), PAGE_BYTES):
        view[offset] = 1


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES, 3 * MIB + 1, 64 * MIB])
def test_a_span_is_zeroed_writable_and_aligned(num_bytes: int) -> None:
    with HostMemory().reserve(num_bytes) as span:
        assert span.address % HUGE_PAGE_BYTES == 0
        view = span.view()
        assert len(view) == num_bytes
        assert view[0] == view[-1] == 0
        view[-1] = 7
        assert span.view(num_bytes - 1, 1).tolist() == [7]
        view.release()


def test_a_reservation_costs_nothing_until_it_is_touched() -> None:
    before = resident_bytes()
    with HostMemory().reserve(1 << 40):  # more than the machine has
        assert resident_bytes() - before < 4 * MIB


@pytest.mark.parametrize("huge_pages", [True, False])
def test_released_pages_go_back_and_read_as_zeros(huge_pages: bool) -> None:
    with HostMemory().reserve(64 * MIB, huge_pages=huge_pages) as span:
        before = resident_bytes()
        touch(span.view())
        assert resident_bytes() - before > 63 * MIB
        span.release(0, 32 * MIB)
        assert 31 * MIB < resident_bytes() - before < 34 * MIB
        span.release(32 * MIB, 32 * MIB - 1)  # the last page counts as a whole one
        assert resident_bytes() - before < 2 * MIB
        assert span.view()[12345 * PAGE_BYTES] == 0


def test_a_small_page_never_takes_a_huge_one() -> None:
    with HostMemory().reserve(64 * MIB, huge_pages=False) as span:
        span.use_huge_pages(0, 3 * MIB)  # one huge page, and a rest of small ones
        before = resident_bytes()
        span.view()[3 * MIB - 1] = 1
        assert resident_bytes() - before < MIB
        touch(span.view(0, 3 * MIB))
        assert resident_bytes() - before < 3 * MIB + MIB // 2


def test_what_is_outside_is_refused() -> None:
    with HostMemory().reserve(3 * PAGE_BYTES) as span:
        for offset, num_bytes in [(0, 4 * PAGE_BYTES), (-PAGE_BYTES, 1), (1, 1)]:
            with pytest.raises(ValueError, match="of 12288 bytes"):
                span.release(offset, num_bytes)
        with pytest.raises(ValueError, match="outside"):
            span.view(PAGE_BYTES, 3 * PAGE_BYTES)


def test_closing_gives_everything_back_even_under_a_view() -> None:
    before = resident_bytes()
    span = HostMemory().reserve(32 * MIB)
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
