"""Parked histories: every byte comes back, whoever owns which block by then."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitllm.errors import DiskFull, JitllmError
from jitllm.memory.parked import FileStore, Layout, MemoryStore, Parked, Store

KV_BYTES = (6, 10, 2, 14)


@pytest.fixture(params=["disk", "memory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Store]]:
    """Makes stores of either kind."""
    stores: list[Store] = []

    def make(num_bytes: int) -> Store:
        is_file = request.param == "disk"
        stores.append(FileStore(tmp_path, num_bytes) if is_file else MemoryStore(num_bytes))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def piece(block: int, start: int, stop: int) -> bytes:
    """What a block has of some positions: bytes that nothing else has."""
    dice = random.Random(block * 1000 + start)
    return dice.randbytes(KV_BYTES[block] * (stop - start))


OWNERS = (
    ((0, 1, 2, 3),),
    ((0, 3), (1, 2)),
    ((0,), (1,), (2,), (3,)),
    ((0, 2), (1, 3)),
)


@pytest.mark.parametrize("before", OWNERS)
@pytest.mark.parametrize("after", OWNERS)
def test_what_one_owner_put_another_gets(
    make: Callable[[int], Store], before: Any, after: Any
) -> None:
    layout = Layout(KV_BYTES, 100)
    assert layout.stretch_tokens == 3
    parked = Parked(layout, 11, make(11 * layout.position_bytes), where="disk")
    assert parked.num_bytes == 11 * sum(KV_BYTES)
    assert list(parked.stretches()) == [(0, 3), (3, 6), (6, 9), (9, 11)]
    for start, stop in parked.stretches():
        for blocks in before:
            data = b"".join(piece(block, start, stop) for block in blocks)
            parked.put(blocks, start, stop, data)
    for start, stop in parked.stretches():
        for blocks in after:
            expected = b"".join(piece(block, start, stop) for block in blocks)
            assert parked.get(blocks, start, stop) == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 200), st.integers(0, 40))
def test_everything_has_a_place_of_its_own(
    kv_bytes: list[int], stretch_bytes: int, num_tokens: int
) -> None:
    layout = Layout(kv_bytes, stretch_bytes)
    taken = [
        run
        for start, stop in layout.stretches(num_tokens)
        for block in range(len(kv_bytes))
        for run in layout.runs([block], start, stop)
    ]
    end = 0
    for offset, num_bytes in sorted(taken):
        assert offset == end
        end += num_bytes
    assert end == num_tokens * layout.position_bytes


def test_neighbours_are_read_together() -> None:
    layout = Layout(KV_BYTES, 1000)
    assert list(layout.runs((0, 1, 3), 0, 2)) == [(0, 32), (36, 28)]
    assert list(layout.runs((), 0, 2)) == []


def test_nothing_parked_takes_nothing(make: Callable[[int], Store]) -> None:
    parked = Parked(Layout(KV_BYTES, 100), 0, make(0), where="disk")
    assert list(parked.stretches()) == []
    parked.close()
    parked.close()


def test_a_parcel_that_is_too_long_is_an_error(make: Callable[[int], Store]) -> None:
    parked = Parked(Layout(KV_BYTES, 100), 3, make(3 * 32), where="disk")
    with pytest.raises(ValueError, match="1 bytes too many"):
        parked.put((0,), 0, 3, bytes(19))


def test_a_file_has_no_name_and_only_its_user_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "for it"
    store = FileStore(folder, 5000)
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o077 == 0
    [link] = [fd for fd in Path("/proc/self/fd").iterdir() if _is_in(fd, folder)]
    assert link.stat().st_mode & 0o777 == 0o600
    assert link.stat().st_blocks * 512 >= 5000  # the room is taken at once
    store.close()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if _is_in(fd, folder)]


def _is_in(fd: Path, folder: Path) -> bool:
    try:
        return os.readlink(fd).startswith(f"{folder}/")
    except OSError:
        return False


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_is_told_with_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, full)
    told = r"needs 1.00 MiB and its disk has .* free; free some"
    if call == "posix_fallocate":
        with pytest.raises(DiskFull, match=told):
            FileStore(tmp_path, 1 << 20)
    else:
        store = FileStore(tmp_path, 1 << 20)
        with pytest.raises(DiskFull, match=told):
            store.write(0, memoryview(b"x"))
        store.close()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if _is_in(fd, tmp_path)]


def test_a_filesystem_that_cannot_reserve_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    store = FileStore(tmp_path, 3)
    store.write(0, memoryview(b"abc"))
    assert store.read(1, 2) == b"bc"
    store.close()


def test_short_writes_and_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:7], at))
    monkeypatch.setattr(os, "pread", lambda fd, count, at: read(fd, min(count, 5), at))
    store = FileStore(tmp_path, 100)
    store.write(0, memoryview(bytes(range(100))))
    assert store.read(10, 80) == bytes(range(10, 90))
    store.close()


def test_what_goes_wrong_is_said_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(JitllmError, match=r"a parked history cannot go to .*; name another folder"):
        FileStore(tmp_path / "file", 10)
    store = FileStore(tmp_path, 10)
    with pytest.raises(JitllmError, match="ends 3 B too early"):
        store.read(8, 5)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(JitllmError, match="Input/output error; name another folder"):
        store.read(0, 1)
    store.close()
